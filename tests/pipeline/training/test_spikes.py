"""A spike is a loss far above those before it, whatever their scale; earlier spikes do not hide later ones."""

import math
import random
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.training.guard import judge, with_loss
from pipeline.training.settings.job import GuardConfig
from shards.errors import UserError

CONFIG = GuardConfig(on_spike="warn", spike_z=8.0, spike_window=16, min_history=4)
QUIET = (2.0, 2.1, 1.9, 2.0, 2.1, 1.9, 2.0)  # median 2, MAD 0.1: a z of 8 is 2 + 8 x 1.4826 x 0.1 = 3.186


@pytest.mark.parametrize(
    ("loss", "losses", "is_spike"),
    [
        pytest.param(3.18, QUIET, False, id="just below the threshold"),
        pytest.param(3.19, QUIET, True, id="just above it"),
        pytest.param(0.1, QUIET, False, id="a fall is no spike"),
        pytest.param(9.0, QUIET[:3], False, id="too few losses to compare with"),
        pytest.param(9.0, QUIET[:4], True, id="just enough"),
        pytest.param(3.19, (*QUIET, 50.0, 60.0), True, id="earlier spikes do not hide a later one"),
        pytest.param(2.15, (2.0,) * 8, False, id="losses that do not vary: 8 % is the least of a spike"),
        pytest.param(2.17, (2.0,) * 8, True, id="more than that"),
        pytest.param(0.0, (0.0,) * 8, False, id="nothing but zeros"),
        pytest.param(1e-9, (0.0,) * 8, True, id="and something"),
        pytest.param(math.nan, QUIET, False, id="not a number: of another guard"),
        pytest.param(math.inf, QUIET, False, id="infinite: of another guard"),
    ],
)
def test_what_is_a_spike(loss: float, losses: tuple[float, ...], is_spike: bool) -> None:
    assert judge(loss, losses, config=CONFIG).is_spike is is_spike


def test_nothing_is_a_spike_if_it_is_off() -> None:
    """The losses may be of a time when it was on."""
    assert judge(9.0, QUIET, config=replace(CONFIG, on_spike="off")).is_spike is False


def test_a_verdict_says_how_far_it_is() -> None:
    found = judge(3.4826, QUIET, config=CONFIG)
    assert (found.loss, found.median, found.is_spike) == (3.4826, 2.0, True)
    assert found.mad == pytest.approx(0.1)
    assert found.z == pytest.approx(10.0)


finite = st.floats(-1e6, 1e6).map(lambda value: round(value, 3))


@given(st.lists(finite, min_size=4, max_size=16), finite, st.floats(0, 1e6))
def test_a_higher_loss_is_never_less_of_a_spike(losses: list[float], loss: float, more: float) -> None:
    assert judge(loss + more, losses, config=CONFIG).z >= judge(loss, losses, config=CONFIG).z


@given(st.lists(finite, min_size=4, max_size=16), finite)
def test_the_order_of_the_losses_does_not_matter(losses: list[float], loss: float) -> None:
    mixed = random.Random(0).sample(losses, len(losses))
    assert judge(loss, mixed, config=CONFIG) == judge(loss, losses, config=CONFIG)


@given(st.lists(st.floats(1.0, 1.2), min_size=9, max_size=16), st.integers(-30, 30))
def test_the_scale_of_the_losses_does_not_matter(losses: list[float], power: int) -> None:
    """A power of two changes no rounding."""
    factor = 2.0**power
    scaled = judge(3.0 * factor, [each * factor for each in losses], config=CONFIG)
    assert scaled.z == judge(3.0, losses, config=CONFIG).z
    assert scaled.is_spike


@given(st.lists(st.floats(1.0, 1.2), min_size=9, max_size=15), st.integers(0, 4))
def test_a_minority_of_spikes_moves_the_median_within_the_others(losses: list[float], num_spikes: int) -> None:
    found = judge(3.0, [*losses, *[100.0] * num_spikes], config=CONFIG)
    assert min(losses) <= found.median <= max(losses)
    assert found.median <= median([*losses, *[100.0] * num_spikes])


def test_the_latest_finite_losses_are_kept() -> None:
    losses: tuple[float, ...] = ()
    for loss in [math.nan, *map(float, range(20)), math.inf]:
        losses = with_loss(losses, loss, config=CONFIG)
    assert losses == tuple(map(float, range(4, 20)))
    assert with_loss(losses, 1.0, config=GuardConfig()) == (), "nothing is compared"


def test_a_history_that_can_never_be_long_enough_is_refused() -> None:
    with pytest.raises(UserError, match=r"min_history is 9, above guard\.spike_window, which is 8; lower"):
        GuardConfig(min_history=9, spike_window=8)


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (GuardConfig(skip_steps=9), 0),
        (GuardConfig(on_spike="rewind", skip_steps=9), 4),
        (GuardConfig(on_non_finite="rewind", skip_steps=1), 0),
    ],
)
def test_how_far_a_rewind_goes_back_before_its_finding(config: GuardConfig, steps: int) -> None:
    assert config.rewind_steps == steps
