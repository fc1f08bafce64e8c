"""The interval between checkpoints: against the exact expression, searched by brute force, and within its limits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoints.config import (
    LEAST_SECONDS,
    MOST_SECONDS,
    best_interval,
    daly_interval,
    mean_seconds_to_failure,
)
from shards.output.quantities import DAY_SECONDS

SECONDS = st.floats(min_value=0, max_value=1e5)
MEANS = st.floats(min_value=1, max_value=1e9)


def wall_time_of_work(interval: float, *, stall: float, mean: float) -> float:
    """Daly's exact expression for one second of work, without the factor exp(R/M) that no interval changes."""
    return mean * math.expm1((interval + stall) / mean) / interval


def searched(*, stall: float, mean: float) -> float:
    """The interval with the least wall time among 20,001 from mean/10^6 to 10 x mean, 0.08 % apart."""
    intervals = [mean * 10 ** (-6 + 7 * number / 20_000) for number in range(20_001)]
    return min(intervals, key=lambda interval: wall_time_of_work(interval, stall=stall, mean=mean))


@pytest.mark.parametrize(
    ("stall_of_mean", "most_off"),
    [(1e-6, 0.001), (1e-4, 0.001), (0.01, 0.001), (0.1, 0.0015), (0.5, 0.01), (1, 0.02), (1.9, 0.06), (5, 0.04)],
)
def test_the_estimate_is_near_the_best_of_all_intervals(stall_of_mean: float, most_off: float) -> None:
    stall, mean = stall_of_mean * 40_000, 40_000.0
    best, found = searched(stall=stall, mean=mean), daly_interval(stall_seconds=stall, mean_seconds=mean)
    assert found == pytest.approx(best, rel=most_off)
    cost = wall_time_of_work(found, stall=stall, mean=mean) / wall_time_of_work(best, stall=stall, mean=mean)
    assert cost < 1.002, "what the estimate costs beyond the best"


@pytest.mark.parametrize(
    ("num_nodes", "stall", "minutes"),
    [  # from published failure rates: 6.5 failures per 1,000 node-days
        pytest.param(8, 5, 68, id="8 nodes"),
        pytest.param(64, 5, 24, id="64 nodes"),
        pytest.param(512, 5, 8.5, id="512 nodes"),
        pytest.param(2048, 5, 4.2, id="2,048 nodes"),
    ],
)
def test_known_clusters(num_nodes: int, stall: float, minutes: float) -> None:
    mean = mean_seconds_to_failure(num_nodes=num_nodes, failures_per_node_day=0.0065)
    found = best_interval(stall_seconds=stall, commit_seconds=stall, mean_seconds=mean)
    assert found / 60 == pytest.approx(minutes, rel=0.03)


def test_a_commit_that_takes_longer_than_the_best_interval_sets_it() -> None:
    assert best_interval(stall_seconds=1, commit_seconds=600, mean_seconds=3600) == 750
    assert best_interval(stall_seconds=1, commit_seconds=2 * MOST_SECONDS, mean_seconds=1e9) == 2.5 * MOST_SECONDS


def test_the_ends_of_the_range() -> None:
    assert best_interval(stall_seconds=0, commit_seconds=0, mean_seconds=DAY_SECONDS) == LEAST_SECONDS
    assert best_interval(stall_seconds=60, commit_seconds=60, mean_seconds=1e9) == MOST_SECONDS


@given(stall=SECONDS, more=SECONDS, mean=MEANS)
def test_saves_never_pile_up_and_limits_hold(stall: float, more: float, mean: float) -> None:
    found = best_interval(stall_seconds=stall, commit_seconds=stall + more, mean_seconds=mean)
    assert found >= 1.2 * (stall + more)
    assert found >= LEAST_SECONDS
    assert found <= max(MOST_SECONDS, 1.3 * (stall + more))


@given(stall=SECONDS, factor=st.floats(min_value=1, max_value=100), mean=MEANS)
def test_rarer_failures_and_dearer_saves_never_shorten_it(stall: float, factor: float, mean: float) -> None:
    def interval(stall: float, mean: float) -> float:
        return best_interval(stall_seconds=stall, commit_seconds=stall, mean_seconds=mean)

    assert interval(stall, mean * factor) >= interval(stall, mean) * (1 - 1e-9)
    assert interval(stall * factor, mean) >= interval(stall, mean) * (1 - 1e-9)
