"""The simulator of failures: by itself, and against the formula over a grid of clusters."""

import itertools
import math

import pytest

from pipeline.checkpoints.config import DAY_SECONDS, best_interval, mean_seconds_to_failure
from pipeline.planning.cluster_plan import Regime, outcome
from pipeline.planning.failure_simulator import simulate

QUIET = Regime(interval=100.0, stall=2.0, commit=10.0, mean_to_failure=1e15, startup=50.0, down=300.0, queue=20.0)
HOUR = 3600.0


def test_a_run_that_nothing_interrupts() -> None:
    found = simulate(QUIET, num_nodes=4, work_seconds=250.0, num_runs=2)
    # it saves after 100 and 200 seconds, and at its end it waits for the commit
    assert found.goodput == pytest.approx(250 / (50 + 100 + 2 + 100 + 2 + 50 + 10))
    assert found.spread == pytest.approx(0)
    assert found.num_failures == 0


def test_a_run_in_pieces() -> None:
    regime = Regime(**{**vars(QUIET), "limit": 200.0})
    found = simulate(regime, num_nodes=1, work_seconds=250.0, num_runs=1)
    # 148 seconds of training, a save of 10, the queue of 20; then the other 102 with one stall
    assert found.goodput == pytest.approx(250 / ((50 + 150 + 10) + 20 + (50 + 100 + 2 + 2 + 10)))


def test_failures_come_at_their_rate_and_the_seed_decides() -> None:
    regime = Regime(**{**vars(QUIET), "mean_to_failure": 20_000.0})
    one, same, other = (simulate(regime, num_nodes=8, work_seconds=1e6, num_runs=10, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    # while a job runs: about the work, and what is lost of it
    assert one.num_failures == pytest.approx(1e6 / one.goodput / 20_000, rel=0.15)
    assert one.spread > 0


CASES = list(
    itertools.product(
        (1, 16, 256),  # nodes
        (0.0065, 0.1),  # failures per node and day; the second makes 256 nodes as bad as 1,080 of Meta's worst
        ((0.5, 5.0), (60.0, 90.0)),  # stall and commit
        (422.0, 3600.0),  # from a failure to the next job's start
        (math.inf, 4 * HOUR, 24 * HOUR),  # limit of the queue
        (0.5, 5.0),  # days
    )
)


@pytest.mark.long
def test_the_formula_agrees_within_two_points() -> None:
    """Both share no code. Each case has enough runs that chance is worth about half a point."""
    off = {}
    for seed, case in enumerate(CASES):
        num_nodes, rate, (stall, commit), down, limit, days = case
        mean = mean_seconds_to_failure(num_nodes=num_nodes, failures_per_node_day=rate)
        regime = Regime(
            interval=best_interval(stall_seconds=stall, commit_seconds=commit, mean_seconds=mean),
            stall=stall,
            commit=commit,
            mean_to_failure=mean,
            startup=180.0,
            down=down,
            queue=122.0,
            limit=limit - 120.0,
        )
        work_seconds = days * DAY_SECONDS
        expected = outcome(regime, work_seconds=work_seconds)
        num_runs = round(min(250, max(3, 1500 / (expected.num_failures + 1))))
        found = simulate(regime, num_nodes=num_nodes, work_seconds=work_seconds, num_runs=num_runs, seed=seed)
        off[case] = (expected.goodput - found.goodput) * 100
    worst = max(off, key=lambda case: abs(off[case]))
    assert abs(off[worst]) < 2, f"{worst}: {off[worst]:.2f} points"
