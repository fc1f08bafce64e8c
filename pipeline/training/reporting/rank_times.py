"""The times of all ranks: the longest of each kind with its rank, and ranks that are slow for long.

All ranks end a step together, so its wall time says nothing of any of them. A rank that is slow works while the others
wait for it in an exchange: its own time, the step without `communication`, is longer than theirs. Every rank puts its
times into its own places of a row of zeros, which is part of the reduction that each step makes anyway; the sum is the
row of all ranks.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.ranks.world import World
from pipeline.training.zero.step_times import StepTimes

SLOW_FACTOR, SLOW_SECONDS = 1.3, 300.0  # of the median of all ranks, and for how long
NUM_WINDOWS = 5  # in each of which it is slow: one long step is no slow rank, and one short step no end of it
OWN_STEP = "own_step"
_KINDS = ("data_wait", OWN_STEP, "checkpoint")


class RankTimes:
    """The mean times of the steps since the last exchange, in each step whose number is a multiple of `every`."""

    def __init__(self, times: StepTimes, world: World, *, every: int) -> None:
        self._times, self._world, self._every = times, world, every
        self.names = tuple(f"rank {rank}: {kind}" for rank in range(world.num_ranks) for kind in _KINDS)

    def is_due(self, step: int) -> bool:
        """Whether step `step`, from 1 on, has them. A rank that is alone has none."""
        return self._world.num_ranks > 1 and step % self._every == 0

    def row(self) -> list[float]:
        """One value for each of `names`: this rank's seconds, and zeros."""
        row, first = [0.0] * len(self.names), self._world.rank * len(_KINDS)
        row[first : first + len(_KINDS)] = self._times.since_exchange()
        return row

    def of(self, kind: str, sums: Mapping[str, float]) -> list[float]:
        """The seconds of each rank, in rank order, from the sums over ranks."""
        return [sums[f"rank {rank}: {kind}"] for rank in range(self._world.num_ranks)]

    def values(self, sums: Mapping[str, float]) -> dict[str, float]:
        """What metrics say of them; empty before the first step has ended."""
        own = self.of(OWN_STEP, sums)
        if not any(own):
            return {}
        found = {f"ranks/{OWN_STEP}_median": statistics.median_low(own)}
        for kind in _KINDS:
            seconds = self.of(kind, sums)
            found[f"ranks/{kind}"] = max(seconds)
            found[f"ranks/{kind}_rank"] = float(seconds.index(max(seconds)))
        return found


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank, the mean of its own seconds per step, and how many times the median of all ranks that is."""

    rank: int
    own_seconds: float
    times: float


class SlowRanks:
    """Finds ranks whose own time is above SLOW_FACTOR times the median in each of NUM_WINDOWS windows in a row, which
    together last SLOW_SECONDS or longer. Each is named once."""

    def __init__(self) -> None:
        self._lines: list[Sequence[float]] = []
        self._began = 0.0
        self._num_slow: dict[int, int] = {}
        self._named: set[int] = set()

    def newly_slow(self, own_seconds: Sequence[float], *, at: float) -> list[SlowRank]:
        """The ranks to name now. `own_seconds`: of each rank per step, since the line before; `at`: monotonic."""
        self._began = self._began if self._lines else at
        self._lines.append(own_seconds)
        if at - self._began < SLOW_SECONDS / NUM_WINDOWS:
            return []
        means = [statistics.fmean(of_rank) for of_rank in zip(*self._lines, strict=True)]
        self._lines.clear()
        median = statistics.median_low(means)
        slow = [rank for rank, seconds in enumerate(means) if seconds > SLOW_FACTOR * median > 0]
        self._num_slow = {rank: self._num_slow.get(rank, 0) + 1 for rank in slow}
        found = [rank for rank in slow if self._num_slow[rank] >= NUM_WINDOWS and rank not in self._named]
        self._named.update(found)
        return [SlowRank(rank=rank, own_seconds=means[rank], times=means[rank] / median) for rank in found]
