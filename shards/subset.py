"""Which sample ids a part of a dataset has: pure functions of numbers, block sizes and a key.

A dataset is packed in a random order, so a random choice of its blocks is a random choice of its samples, and is read
as fast as the whole. The last block chosen is cut to the number asked for. Single samples are chosen where the order is
not random (tars made by others), and for a number per class.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shards.hashing import hash_array

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Runs:
    """Sample ids first[i] .. first[i] + count[i] - 1, rising; int64[n] both."""

    first: Ids
    count: Ids

    @cached_property
    def ends(self) -> Ids:
        """int64[n]: how many ids there are up to and with each run."""
        return np.cumsum(self.count, dtype=np.int64)

    @property
    def num_samples(self) -> int:
        """The number of samples of all runs."""
        return int(self.ends[-1]) if self.ends.size else 0

    def ids(self) -> Ids:
        """int64[num_samples]: every id."""
        starts = self.ends - self.count
        return np.asarray(np.repeat(self.first - starts, self.count) + np.arange(self.num_samples), dtype=np.int64)

    def num_below(self, ids: Ids) -> Ids:
        """How many are below each of `ids`; same shape."""
        if not self.first.size:
            return np.zeros_like(ids)
        run = np.maximum(np.searchsorted(self.first, ids, side="left") - 1, 0)
        before = self.ends[run] - self.count[run]
        return np.asarray(before + np.clip(ids - self.first[run], 0, self.count[run]), dtype=np.int64)

    def at(self, places: Ids) -> Ids:
        """The ids at these places of all, counted from 0; same shape."""
        run = np.searchsorted(self.ends, places, side="right")
        return np.asarray(self.first[run] + places - (self.ends[run] - self.count[run]), dtype=np.int64)


def between(first: int, end: int) -> Runs:
    """The ids first..end-1."""
    return Runs(np.array([first], dtype=np.int64), np.array([end - first], dtype=np.int64))


def single(ids: Ids) -> Runs:
    """Each id as a run of its own; `ids` rise."""
    return Runs(ids, np.ones_like(ids))


def cut(runs: Runs, block_first: Ids) -> Runs:
    """The same ids, with a new run wherever a block begins; `block_first`: the first id of each block, rising."""
    inside = block_first[runs.num_below(block_first + 1) > runs.num_below(block_first)]
    first = np.union1d(runs.first, inside)
    place = runs.num_below(first)
    return Runs(first, np.diff(place, append=runs.num_samples))


def chosen(runs: Runs, num_samples: int, *, names: Ids, key: int) -> Runs:
    """The first `num_samples` ids, with the runs in the order of the hash of their `names`, int64[n]. Nested: fewer are
    among more of the same runs."""
    order = np.argsort(hash_array(names, key=key), kind="stable")
    ends = np.cumsum(runs.count[order])
    last = int(np.searchsorted(ends, num_samples))
    taken, count = order[: last + 1], runs.count[order[: last + 1]].copy()
    count[-1] -= ends[last] - num_samples
    rising = np.argsort(taken)
    return joined(Runs(runs.first[taken][rising], count[rising]))


def joined(runs: Runs) -> Runs:
    """The same ids in as few runs as possible."""
    begins = np.ones(runs.first.size, dtype=bool)
    begins[1:] = runs.first[1:] != runs.first[:-1] + runs.count[:-1]
    starts = np.flatnonzero(begins)
    return Runs(runs.first[starts], np.add.reduceat(runs.count, starts) if starts.size else runs.count)


def without(runs: Runs, others: Runs) -> Runs:
    """The ids of `runs` but for those of `others`, all of which are among them."""
    edges = np.unique(np.concatenate([runs.first, runs.first + runs.count, others.first, others.first + others.count]))
    first, end = edges[:-1], edges[1:]
    stays = (runs.num_below(end) > runs.num_below(first)) & (others.num_below(end) == others.num_below(first))
    return joined(Runs(first[stays], (end - first)[stays]))


def per_class(ids: Ids, labels: Ids, num_samples: int, *, key: int) -> Ids:
    """The first `num_samples` of each class by the hash of their ids, rising. `labels`: int64[n], those of `ids`; every
    class has at least as many."""
    order = np.lexsort((hash_array(ids, key=key), labels))
    nums = np.unique(labels, return_counts=True)[1]
    firsts = np.cumsum(nums) - nums
    return np.sort(ids[order[(firsts[:, None] + np.arange(num_samples)).ravel()]])
