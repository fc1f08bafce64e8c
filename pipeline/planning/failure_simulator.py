"""Runs on nodes that fail, event by event: each node has a clock of its own, exponentially distributed.

It shares nothing with the formula in cluster_plan.py but the description of what interrupts training, so that one
checks the other. A job begins on nodes that work; a failure, the limit of the queue or its last step ends it.
"""

import heapq
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.planning.cluster_plan import Regime

_ROUNDING_SECONDS = 1e-6


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
    draw = random.Random(seed)  # noqa: S311 - no secret
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
