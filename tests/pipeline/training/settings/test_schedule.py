"""The learning rate against closed forms."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.training.settings.job import TrainingJob
from pipeline.training.settings.schedule import ScheduleConfig, average_decay, learning_rate, steps_of
from shards.errors import UserError

LINEAR = ScheduleConfig(learning_rate=1e-3, decay="linear", warmup_steps=10_000, final_learning_rate=1e-5)
COSINE = ScheduleConfig(learning_rate=0.03, decay="cosine", warmup_steps=500)
CONSTANT = ScheduleConfig(learning_rate=0.01, decay="constant", warmup_steps=4)


@pytest.mark.parametrize(
    ("config", "num_steps", "step", "expected"),
    [
        pytest.param(LINEAR, 312_000, 0, 0.0, id="0 at step 0 of a warm-up, as in the paper's code"),
        pytest.param(LINEAR, 312_000, 2500, 2.5e-4, id="a quarter of the warm-up"),
        pytest.param(LINEAR, 312_000, 10_000, 1e-3, id="the peak right after the warm-up"),
        pytest.param(LINEAR, 312_000, 161_000, (1e-3 + 1e-5) / 2, id="linear: half-way is the mean"),
        pytest.param(LINEAR, 312_000, 312_000, 1e-5, id="linear: the end"),
        pytest.param(
            LINEAR, 312_000, 311_999, 1e-5 + (1e-3 - 1e-5) / 302_000, id="linear: the last update is one step short"
        ),
        pytest.param(COSINE, 20_000, 0, 0.0, id="cosine: 0 at step 0"),
        pytest.param(COSINE, 20_000, 500, 0.03, id="cosine: peak"),
        pytest.param(COSINE, 20_000, 500 + 19_500 // 2, 0.015, id="cosine: half-way is half"),
        pytest.param(COSINE, 20_000, 500 + 19_500 // 3, 0.0225, id="cosine of 60 degrees: three quarters"),
        pytest.param(COSINE, 20_000, 20_000, 0.0, id="cosine: the end"),
        pytest.param(CONSTANT, 10, 2, 0.005, id="constant: with its warm-up"),
        pytest.param(CONSTANT, 10, 9, 0.01, id="constant: to the end"),
        pytest.param(ScheduleConfig(learning_rate=0.1), 10, 0, 0.1, id="no warm-up: the peak at once"),
    ],
)
def test_closed_forms(config: ScheduleConfig, num_steps: int, step: int, expected: float) -> None:
    assert learning_rate(step, config=config, num_steps=num_steps) == pytest.approx(expected, rel=1e-12, abs=1e-18)


@given(
    peak=st.floats(1e-6, 1.0),
    share=st.floats(0.0, 1.0),
    num_steps=st.integers(2, 5000),
    warmup=st.integers(0, 4999),
    kind=st.sampled_from(["linear", "cosine"]),
)
def test_it_rises_then_falls_between_its_bounds(
    peak: float, share: float, num_steps: int, warmup: int, kind: str
) -> None:
    warmup %= num_steps
    config = ScheduleConfig(
        learning_rate=peak,
        decay="linear" if kind == "linear" else "cosine",
        warmup_steps=warmup,
        final_learning_rate=share * peak,
    )
    places = sorted({0, 1, warmup // 2, warmup, (warmup + num_steps) // 2, num_steps - 1, num_steps})
    rates = [(step, learning_rate(step, config=config, num_steps=num_steps)) for step in places]
    slack = 1e-12 * peak
    for (step, rate), (_, following) in pairwise(rates):
        assert rate <= following + slack if step < warmup else following <= rate + slack
    assert all(0 <= rate <= peak + slack for _, rate in rates)
    assert rates[-1][1] == pytest.approx(share * peak, abs=slack)
    assert all(math.isfinite(rate) for _, rate in rates)


@given(
    step=st.integers(0, 999),
    warmup=st.integers(0, 900),
    kind=st.sampled_from(["linear", "cosine"]),
)
def test_it_is_the_papers_code(step: int, warmup: int, kind: str) -> None:
    """vision_transformer multiplies: decay of the clipped progress (linear to linear_end, cosine to 0) x warm-up."""
    peak, linear_end, total = 3e-3, 1e-5, 1000
    progress = min(max((step - warmup) / (total - warmup), 0.0), 1.0)
    decayed = (
        linear_end + (peak - linear_end) * (1 - progress)
        if kind == "linear"
        else peak * 0.5 * (1 + math.cos(math.pi * progress))
    )
    expected = decayed * min(1.0, step / warmup) if warmup else decayed
    config = ScheduleConfig(
        learning_rate=peak,
        decay="linear" if kind == "linear" else "cosine",
        warmup_steps=warmup,
        final_learning_rate=linear_end if kind == "linear" else 0.0,
    )
    assert learning_rate(step, config=config, num_steps=total) == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(
    ("epochs", "num_images", "global_batch", "expected"),
    [
        pytest.param(14, 303_000_000, 4096, 1_035_645, id="JFT, 14 epochs: 1,035,644.53"),
        pytest.param(7, 303_000_000, 4096, 517_822, id="JFT, 7 epochs: 517,822.27"),
        pytest.param(90, 14_200_000, 4096, 312_012, id="ImageNet-21k: 312,011.7"),
        pytest.param(300, 1_280_000, 4096, 93_750, id="ImageNet-1k: exactly"),
        pytest.param(1, 3, 2, 2, id="a half goes up"),
    ],
)
def test_steps_of_epochs(epochs: int, num_images: int, global_batch: int, expected: int) -> None:
    assert steps_of(epochs, num_images=num_images, global_batch=global_batch) == expected


@given(epochs=st.integers(1, 500), num_images=st.integers(1, 10**9), global_batch=st.integers(1, 65_536))
def test_steps_are_the_nearest_whole_number(epochs: int, num_images: int, global_batch: int) -> None:
    steps = steps_of(epochs, num_images=num_images, global_batch=global_batch)
    assert 2 * abs(steps * global_batch - epochs * num_images) <= global_batch


@pytest.mark.parametrize(("warmup", "cooldown", "timescale"), [(10_000, 50_000, 10_000), (0, 0, 3), (40, 60, 7)])
def test_rsqrt_is_big_visions(warmup: int, cooldown: int, timescale: int) -> None:
    """Its utils.py, written out: shift the clock so that the decay is 1 at the end of the warm-up, divide by the root,
    then multiply by the warm-up and by the cooldown."""
    peak, total = 8e-4, 100 + 3 * (warmup + cooldown)
    config = ScheduleConfig(
        learning_rate=peak, decay="rsqrt", warmup_steps=warmup, cooldown_steps=cooldown, timescale=timescale
    )
    for step in [*range(0, total, max(1, total // 97)), warmup, warmup + 1, total - cooldown, total - 1]:
        shift = timescale - warmup
        expected = peak / math.sqrt((step + shift) / timescale) if warmup < step else peak
        expected *= min(1.0, step / warmup) if warmup else 1.0
        expected *= min(1.0, (total - step) / cooldown) if cooldown else 1.0
        assert learning_rate(step, config=config, num_steps=total) == pytest.approx(expected, rel=1e-12), step


@pytest.mark.parametrize("supports", [(100, 200, 300, 400, 500), (500, 6_000, 12_000, 18_000, 20_000)])
def test_the_staircase_is_bits(supports: tuple[int, ...]) -> None:
    """Its hyperrule: a warm-up to the first support, and a tenth from the step after each of the others on."""
    config = ScheduleConfig(
        learning_rate=0.003, decay="staircase", warmup_steps=supports[0], stair_steps=supports[1:-1]
    )
    for step in sorted({0, 1, *(place + by for place in supports for by in (-1, 0, 1))}):
        if step < supports[-1]:
            expected = 0.003 * step / supports[0]
            if step >= supports[0]:
                expected = 0.003 / 10 ** len([place for place in supports[1:] if place < step])
            found = learning_rate(step, config=config, num_steps=supports[-1])
            assert found == pytest.approx(expected, rel=1e-12), step


@given(
    decay=st.sampled_from(["linear", "cosine", "constant", "rsqrt", "staircase"]),
    warmup=st.integers(0, 40),
    cooldown=st.integers(1, 60),
)
def test_a_cooldown_ends_at_the_final_rate(decay: Any, warmup: int, cooldown: int) -> None:
    """And before it the rate is what it would be without one."""
    stairs = (50, 70) if decay == "staircase" else ()
    config = ScheduleConfig(learning_rate=1.0, decay=decay, warmup_steps=warmup, timescale=9, stair_steps=stairs)
    cooled = replace(config, cooldown_steps=cooldown, final_learning_rate=0.0)
    rates = [learning_rate(step, config=cooled, num_steps=100) for step in range(101)]
    assert rates[-1] == 0.0
    assert all(before >= after for before, after in pairwise(rates[warmup:]))
    without = [learning_rate(step, config=config, num_steps=100) for step in range(101)]
    assert rates[: 101 - cooldown] == without[: 101 - cooldown]
    end = learning_rate(100, config=replace(cooled, final_learning_rate=0.25), num_steps=100)
    assert end == pytest.approx(0.25)


def test_a_cooldown_must_fit_the_run() -> None:
    schedule = ScheduleConfig(decay="rsqrt", warmup_steps=30, cooldown_steps=71)
    with pytest.raises(UserError):
        TrainingJob(steps=100, schedule=schedule)
    assert TrainingJob(steps=101, schedule=schedule).schedule == schedule


def test_the_average_forgets_the_initial_weights_only_with_a_warm_up() -> None:
    """What is left of them after 20,000 updates: 0.9999**20000, or the product of TensorFlow's (1 + t) / (10 + t)."""
    left = {False: 1.0, True: 1.0}
    for warmup in left:
        for step in range(20_000):
            decay = average_decay(step, ema_decay=0.9999, ema_warmup=warmup)
            assert decay == (min(0.9999, (1 + (step + 1)) / (10 + (step + 1))) if warmup else 0.9999)
            left[warmup] *= decay
    assert left[False] == pytest.approx(0.1353, abs=1e-4)
    assert left[True] < 1e-30
    assert average_decay(0, ema_decay=0.0, ema_warmup=True) == 0.0, "no average"
