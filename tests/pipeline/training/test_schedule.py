"""The learning rate against closed forms."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.training.schedule import ScheduleConfig, learning_rate, steps_of
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


@pytest.mark.parametrize(("epochs", "num_images", "global_batch"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_no_steps_of_nothing(epochs: int, num_images: int, global_batch: int) -> None:
    with pytest.raises(ValueError, match="all must be 1 or more"):
        steps_of(epochs, num_images=num_images, global_batch=global_batch)


@pytest.mark.parametrize(
    ("rate", "final", "warmup"),
    [
        pytest.param(-1e-3, 0.0, 0, id="learning rate"),
        pytest.param(1e-3, -1e-5, 0, id="end"),
        pytest.param(1e-3, 0.0, -1, id="warm-up"),
    ],
)
def test_negative_values_are_refused(rate: float, final: float, warmup: int) -> None:
    with pytest.raises(UserError, match=r"^schedule\.\w+ is -.*; allowed: 0 or more$"):
        ScheduleConfig(learning_rate=rate, final_learning_rate=final, warmup_steps=warmup)
