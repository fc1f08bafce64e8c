"""The formula for the goodput, against runs that are simulated event by event over a grid of clusters.

In the simulation, each node has a clock of its own, exponentially distributed. It shares nothing with the formula in
cluster_plan.py but the description of what interrupts training, so that one checks the other. A job begins on nodes
that work; a failure, the limit of the queue or its last step ends it.
"""

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from pipeline.checkpoints.config import best_interval, mean_seconds_to_failure
from pipeline.planning.cluster_plan import Regime, outcome
from shards.output.quantities import DAY_SECONDS

_ROUNDING_SECONDS = 1e-6
QUIET = Regime(interval=100.0, stall=2.0, commit=10.0, mean_to_failure=1e15, startup=50.0, down=300.0, queue=20.0)
HOUR = 3600.0
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


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The outcome of several simulated runs. `goodput`: the work of all divided by their wall time. `spread`: the
    standard deviation of the goodput between runs. `num_failures`: the mean of a run."""

    goodput: float
    spread: float
    num_failures: float


def simulate(regime: Regime, *, num_nodes: int, work_seconds: float, num_runs: int = 20, seed: int = 0) -> Simulated:
    """`num_runs` runs of `work_seconds` of training on `num_nodes` nodes, with `regime.mean_to_failure` for all of them
    together. The same seed gives the same result."""
    draw = random.Random(seed)
    walls, failures = [], []
    for _ in range(num_runs):
        run = _Run(regime, work_seconds=work_seconds, nodes=_Nodes(draw, regime, num_nodes))
        walls.append(run.wall_seconds())
        failures.append(run.num_failures)
    return Simulated(
        goodput=work_seconds / statistics.fmean(walls),
        spread=_deviation([work_seconds / wall for wall in walls]),
        num_failures=statistics.fmean(failures),
    )


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


class _Nodes:
    """The moment at which each node fails next; a node that has failed is replaced."""

    def __init__(self, draw: random.Random, regime: Regime, num_nodes: int) -> None:
        self._draw, self._rate = draw, 1 / (regime.mean_to_failure * num_nodes)
        self._fails = [draw.expovariate(self._rate) for _ in range(num_nodes)]
        heapq.heapify(self._fails)

    def next_failure(self, now: float) -> float:
        """The next failure among all nodes, for a job that starts at `now`: those that failed while no job ran are
        replaced by then."""
        while self._fails[0] <= now:
            heapq.heapreplace(self._fails, now + self._draw.expovariate(self._rate))
        return self._fails[0]


class _Run:
    def __init__(self, regime: Regime, *, work_seconds: float, nodes: _Nodes) -> None:
        self.regime, self.nodes, self.work_seconds = regime, nodes, work_seconds
        self.num_failures = 0

    def wall_seconds(self) -> float:
        """The wall time until the last save of the run is committed."""
        now, committed = 0.0, 0.0
        while True:
            failure = self.nodes.next_failure(now)
            saves = list(self._saves(now, committed, until=failure))
            last_commit = saves[-1][0]
            committed = max((work for commit, work in saves if commit < failure), default=committed)
            if last_commit >= failure:
                self.num_failures += 1
                now = failure + self.regime.down
            elif committed < self.work_seconds:
                now = last_commit + self.regime.queue
            else:
                return last_commit

    def _saves(self, start: float, committed: float, *, until: float) -> Iterator[tuple[float, float]]:
        """The saves of a job that starts with the work `committed`, up to the first that ends after `until`: when each
        would be committed, and the work in it."""
        now, work, limit = start + self.regime.startup, committed, start + self.regime.limit
        while True:
            seconds = min(self.regime.interval, self.work_seconds - work, max(0.0, limit - now))
            now, work = now + seconds, min(work + seconds, self.work_seconds)
            if self.work_seconds - work < _ROUNDING_SECONDS:
                work = self.work_seconds
            yield now + self.regime.commit, work
            if work == self.work_seconds or now >= limit or now >= until:
                return
            now += self.regime.stall


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
