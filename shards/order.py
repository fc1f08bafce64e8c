"""The sample order: a pure function of (block sizes, seed, lanes, window, step). There is no state to save.

Every global position p = step * batch + slot has an epoch e = p // N and an index q = p mod N in it. An epoch permutes
the blocks by a keyed hash; the permuted samples are cut into L lanes; index q is sample q // L of lane q mod L; inside
a lane the samples of every window of W blocks are shuffled by the same hash. So positions eN .. (e+1)N-1 are an exact
permutation of all samples, and any number of ranks reads the same global batches.

A stream of several datasets is mixed just as exactly: every lane group draws from the datasets on its own, by one table
that covers a period of P draws. In any P consecutive draws, dataset d comes exactly quotas[d] times, evenly spread as
in stride scheduling (Waldspurger and Weihl, "Stride Scheduling: Deterministic Proportional-Share Resource Management",
1995). A keyed hash rotates the table for each lane group, so that the samples of a rare dataset do not all come in the
same batch. Positions stay in their lane group, so a rank reads its own lanes of every dataset.

Shape letters: N samples, B batch, L lanes (lane groups of a mixture), W blocks per window, R ranks, P draws per period,
D datasets.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import gcd, lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shards.errors import UserError
from shards.hashing import BLOCKS, REPEATS, ROTATIONS, WINDOWS, hash_array, hash_order

ORDER_VERSION = 1
MOST_SAMPLES = 1 << 62
_MOST_POSITION = int(np.iinfo(np.int64).max)
_EPOCHS_KEPT = 2  # a batch touches at most two epochs: the end of one and the start of the next (unless N < B)
_LEAST_SHARED_BLOCKS = 1 << 18  # sorting fewer takes less time (30 ms) than sharing the result
Arrays = tuple[NDArray[np.int64], ...]
MIXING_VERSION = 1
MOST_DRAWS = 65_536  # a period of this length for ten datasets is a table of 5 MB


class WindowId(NamedTuple):
    """W consecutive (permuted) blocks of one lane: the unit that is read ahead and freed."""

    epoch: int
    lane: int
    window: int


@dataclass(frozen=True, kw_only=True)
class BlockSlice:
    """Samples `first_sample_id` .. `first_sample_id + num_samples - 1`, all of one block."""

    first_sample_id: int
    num_samples: int

    def ids(self) -> NDArray[np.int64]:
        """Returns the sample ids of the slice: int64[num_samples]."""
        return np.arange(self.first_sample_id, self.first_sample_id + self.num_samples, dtype=np.int64)


class _Epoch:
    """The block permutation of one epoch, with prefix sums of the block sizes."""

    def __init__(self, block_at: NDArray[np.int64], ends: NDArray[np.int64], *, lanes: int, window_blocks: int) -> None:
        self.block_at = block_at  # the block at each place of the epoch
        self.ends = ends  # the number of permuted samples up to and including each place
        num_samples = int(self.ends[-1])
        self.window_blocks = window_blocks
        # The first N mod L lanes are one longer than the others.
        lane = np.arange(lanes + 1, dtype=np.int64)
        self.lane_start = lane * (num_samples // lanes) + np.minimum(lane, num_samples % lanes)
        self.first_block = np.searchsorted(self.ends, self.lane_start[:-1], side="right")

    def window_bounds(self, lane: int, window: int) -> tuple[int, int]:
        """Returns the places at which a lane's window begins and ends among the permuted samples."""
        first = int(self.first_block[lane]) + window * self.window_blocks
        last = min(first + self.window_blocks, self.ends.size) - 1
        start = int(self.ends[first - 1]) if first > 0 else 0
        low, high = int(self.lane_start[lane]), int(self.lane_start[lane + 1])
        return max(start, low), min(int(self.ends[last]), high)

    def places_of(
        self, lane: NDArray[np.int64], index: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns (window, offset inside the window) of each place `index` of a lane. All have the same shape."""
        permuted = index + self.lane_start[lane]
        block = np.searchsorted(self.ends, permuted, side="right")
        window = (block - self.first_block[lane]) // self.window_blocks
        first = self.first_block[lane] + window * self.window_blocks
        start = np.where(first > 0, self.ends[first - 1], 0)
        return window, permuted - np.maximum(start, self.lane_start[lane])


def _permuted(block_sizes: NDArray[np.int64], *, key: int) -> Arrays:
    """Returns the arrays that an `_Epoch` is made of, with the blocks in the order of the hash under `key`."""
    block_at = hash_order(block_sizes.size, key=key)
    return block_at, np.cumsum(block_sizes[block_at])


class SampleOrder:
    """The sample ids of every global batch, for any number of ranks, from any step. Thread-safe.

    `block_sizes`: int64[num_blocks], the samples per block. They may be uneven, and sample ids continue from block to
    block. `lanes` L and `window_blocks` W determine how far the shuffle reaches (L x W blocks at a time) and how much
    is read ahead. `of_host`: a function that computes arrays once for all ranks of the host, and finds them by name.
    Raises ValueError for empty blocks, for more lanes than samples, and for sizes below one.
    """

    def __init__(
        self,
        block_sizes: NDArray[np.int64],
        *,
        seed: int,
        lanes: int,
        window_blocks: int,
        of_host: Callable[[str, Callable[[], Arrays]], Arrays] | None = None,
    ) -> None:
        self.block_sizes = np.asarray(block_sizes, dtype=np.int64)
        if self.block_sizes.ndim != 1 or self.block_sizes.size == 0 or int(self.block_sizes.min()) < 1:
            raise ValueError("block_sizes must be a non-empty list of sizes of 1 or more; repack the dataset")
        if self.block_sizes.sum(dtype=np.float64) >= MOST_SAMPLES:  # 64-bit sums would overflow
            raise ValueError(f"block_sizes add up to more than {MOST_SAMPLES:,} samples; repack the dataset")
        self.num_samples = int(self.block_sizes.sum())
        if not 1 <= lanes <= self.num_samples:
            raise ValueError(f"lanes is {lanes}; allowed: 1 to {self.num_samples} (the number of samples)")
        if window_blocks < 1:
            raise ValueError(f"window_blocks is {window_blocks}; allowed: 1 or more")
        self.seed, self.lanes, self.window_blocks = seed, lanes, window_blocks
        self._block_first = np.cumsum(self.block_sizes) - self.block_sizes
        self._of_host = of_host if self.block_sizes.size >= _LEAST_SHARED_BLOCKS else None
        self._lock = threading.Lock()
        self._epochs: dict[int, Future[_Epoch]] = {}
        self._windows: dict[WindowId, NDArray[np.int64]] = {}

    def batch(self, step: int, batch_size: int) -> NDArray[np.int64]:
        """Returns the sample ids of global batch `step`, lane group by lane group: int64[batch_size]."""
        return self.rank_batch(step, batch_size, 0, 1)

    def rank_batch(self, step: int, batch_size: int, rank: int, num_ranks: int) -> NDArray[np.int64]:
        """Returns a rank's contiguous slice of global batch `step`: int64[batch_size / num_ranks]."""
        return self.at(self.positions(step, batch_size, rank, num_ranks))

    def positions(self, step: int, batch_size: int, rank: int, num_ranks: int) -> NDArray[np.int64]:
        """Returns the global positions of the samples of `rank_batch`. Entry g * (B/L) + m of a batch is position step
        * B + m * L + g.

        Raises ValueError if the batch is not a multiple of the lanes and the ranks, or if positions do not fit in
        int64.
        """
        if batch_size % self.lanes or batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; allowed: multiples of lanes = {self.lanes}")
        if num_ranks < 1 or batch_size % num_ranks or not 0 <= rank < num_ranks:
            raise ValueError(f"rank {rank} of {num_ranks} does not fit a batch of {batch_size}: ranks must divide it")
        most = _MOST_POSITION // batch_size - 1
        if not 0 <= step <= most:
            raise ValueError(f"step is {step}; allowed: 0 to {most} with a batch of {batch_size}")
        share = batch_size // num_ranks
        entry = np.arange(rank * share, (rank + 1) * share, dtype=np.int64)
        group, member = np.divmod(entry, batch_size // self.lanes)
        return np.asarray(step * batch_size + member * self.lanes + group, dtype=np.int64)

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the sample ids at global positions, in the shape of `positions`."""
        ids = np.empty(positions.shape, dtype=np.int64)
        for window, chosen, offset in self.locate(positions):
            ids[chosen] = self.window_samples(window)[offset]
        return ids

    def locate(self, positions: NDArray[np.int64]) -> list[tuple[WindowId, NDArray[np.int64], NDArray[np.int64]]]:
        """Returns the windows that contain `positions`, each as (window, indices into `positions`, offsets inside the
        window)."""
        epoch, place = np.divmod(positions, self.num_samples)
        index, lane = np.divmod(place, self.lanes)
        found = []
        for e in sorted(set(epoch.tolist())):
            of_epoch = np.flatnonzero(epoch == e)
            windows, offsets = self._epoch(e).places_of(lane[of_epoch], index[of_epoch])
            lanes = lane[of_epoch]
            by_window = np.lexsort((windows, lanes))
            lanes, windows = lanes[by_window], windows[by_window]
            firsts = np.flatnonzero((np.diff(lanes, prepend=-1) != 0) | (np.diff(windows, prepend=-1) != 0)).tolist()
            chosen, offsets = of_epoch[by_window], offsets[by_window]
            for first, end in zip(firsts, [*firsts[1:], chosen.size], strict=True):
                window = WindowId(epoch=e, lane=int(lanes[first]), window=int(windows[first]))
                found.append((window, chosen[first:end], offsets[first:end]))
        return found

    def window_size(self, window: WindowId) -> int:
        """Returns the number of samples of a window."""
        start, end = self._epoch(window.epoch).window_bounds(window.lane, window.window)
        return end - start

    def window_samples(self, window: WindowId) -> NDArray[np.int64]:
        """Returns the shuffled sample ids of a window: int64[window size]."""
        with self._lock:
            found = self._windows.get(window)
        if found is None:
            ids = np.concatenate([one.ids() for one in self.window_slices(window)])
            found = ids[self.shuffle(window, ids)]
            with self._lock:
                if len(self._windows) >= 4 * self.lanes:  # a window is soon no longer needed: drop the oldest
                    del self._windows[next(iter(self._windows))]
                self._windows[window] = found
        return found

    def shuffle(self, window: WindowId, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns indices into `ids` in the order of the shuffled window. `ids` has the samples of the window block by
        block."""
        hashed = hash_array(ids, key=WINDOWS.key(self.seed, window.epoch))
        return np.argsort(hashed, kind="stable")

    def window_slices(self, window: WindowId) -> tuple[BlockSlice, ...]:
        """Returns the blocks of a window, in permuted order. If two lanes share a block, only this lane's slice of it
        is returned."""
        table = self._epoch(window.epoch)
        start, end = table.window_bounds(window.lane, window.window)
        slices = []
        place = int(np.searchsorted(table.ends, start, side="right"))
        while start < end:
            block, block_end = int(table.block_at[place]), int(table.ends[place])
            inside = start - (block_end - int(self.block_sizes[block]))
            count = min(block_end, end) - start
            first = int(self._block_first[block]) + inside
            slices.append(BlockSlice(first_sample_id=first, num_samples=count))
            start, place = start + count, place + 1
        return tuple(slices)

    def next_window(self, window: WindowId) -> WindowId:
        """Returns the next window of the same lane group, which is in the same lane or, at the end of an epoch, in the
        rotated lane of the next epoch."""
        table = self._epoch(window.epoch)
        if table.window_bounds(window.lane, window.window)[1] < int(table.lane_start[window.lane + 1]):
            return WindowId(epoch=window.epoch, lane=window.lane, window=window.window + 1)
        lane = (window.lane - self.num_samples) % self.lanes  # position eN + q has lane q mod L: groups rotate by N
        return WindowId(epoch=window.epoch + 1, lane=lane, window=0)

    def _epoch(self, epoch: int) -> _Epoch:
        """Returns the table of an epoch. The first thread that needs it makes it, which takes a second for millions of
        blocks; only threads that need the same epoch wait."""
        with self._lock:
            found, is_ours = self._epochs.get(epoch), False
            if found is None:
                while len(self._epochs) >= _EPOCHS_KEPT:
                    del self._epochs[min(self._epochs)]
                found, is_ours = self._epochs.setdefault(epoch, Future()), True
        if is_ours:
            try:
                table = _Epoch(*self._permuted(epoch), lanes=self.lanes, window_blocks=self.window_blocks)
            except BaseException as error:
                with self._lock:
                    self._epochs.pop(epoch, None)
                found.set_exception(error)
                raise
            found.set_result(table)
        return found.result()

    def _permuted(self, epoch: int) -> Arrays:
        permuted = partial(_permuted, self.block_sizes, key=BLOCKS.key(self.seed, epoch))
        return self._of_host(f"epoch {epoch} of seed {self.seed}", permuted) if self._of_host else permuted()


@dataclass(frozen=True, kw_only=True)
class RepeatedSamples:
    """What a batch with repeated samples takes. `positions`, int64[n]: where each entry's sample is in the order of
    samples. `numbers`, int64[n]: which of the sample's repeats the entry is, from 0. `return_later`, bool[n]: whether
    the next batch has further repeats of the sample."""

    positions: NDArray[np.int64]
    numbers: NDArray[np.int64]
    return_later: NDArray[np.bool_]


def repeated(positions: NDArray[np.int64], *, step: int, batch_size: int, lanes: int, repeats: int) -> RepeatedSamples:
    """Returns the samples of batch `step` if each sample is drawn `repeats` times in a row, as in repeated augmentation
    (Hoffer et al., "Augment Your Batch", CVPR 2020; DeiT's RASampler). `positions`: some of the batch's positions.

    Draw c of a lane group is repeat c mod r of the group's sample c // r. The repeats of a sample are therefore in one
    batch or, where it ends between them, in two that follow each other; and they stay in the sample's lane group, whose
    rank reads the sample once. Inside a batch, a lane group has the first repeats of all its samples, then the second
    ones, and so on. If it has at least 2 r draws, no two neighbours are the same sample, so mixup does not mix a sample
    with itself.
    """
    num_draws = batch_size // lanes
    counts, group = np.divmod(positions, lanes)
    draws = np.arange(step * num_draws, (step + 1) * num_draws, dtype=np.int64)
    draws = draws[np.lexsort((draws // repeats, draws % repeats))]
    of_lane, numbers = np.divmod(draws[counts - step * num_draws], repeats)
    return RepeatedSamples(
        positions=of_lane * lanes + group,
        numbers=numbers,
        return_later=(of_lane + 1) * repeats > (step + 1) * num_draws,
    )


def seed_of_repeat(seed: int, number: int) -> int:
    """Returns the seed that augments a repeat of the samples that `seed` augments: the same one for repeat 0."""
    return seed if number == 0 else REPEATS.key(seed, number)


def quotas(weights: Sequence[float | str]) -> tuple[int, ...]:
    """Returns the smallest integers in exactly the ratio of the weights as written: 0.7 and 0.3 give 7 and 3.

    Raises UserError if a weight is not a number above 0, or if the sum of the integers, which is the period, would be
    above MOST_DRAWS.
    """
    shares = [_share(weight) for weight in weights]
    if not shares:
        raise UserError("there are no weights to mix by; give one for each dataset, e.g. 3 1")
    scale = lcm(*(share.denominator for share in shares))
    whole = [int(share * scale) for share in shares]
    common = gcd(*whole)
    found = tuple(number // common for number in whole)
    if sum(found) > MOST_DRAWS:
        what = f"the weights {', '.join(str(weight) for weight in weights)} repeat only after {sum(found):,} samples"
        raise UserError(f"{what}; allowed: {MOST_DRAWS:,}; round them, e.g. to {', '.join(_rounded(shares))}")
    return found


def _share(weight: float | str) -> Fraction:
    try:
        share = Fraction(str(weight).strip())
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if share <= 0:
        raise UserError(f"the weight {weight!r} cannot be mixed by; allowed: numbers above 0, e.g. 0.7 or 3")
    return share


def _rounded(shares: list[Fraction]) -> list[str]:
    total = sum(shares)
    return [f"{max(0.001, float(share / total)):.3f}" for share in shares]


class Mixture:
    """Maps every position of a mixed stream to a dataset and a position in that dataset's own order.

    `quotas`: how many times each dataset is drawn in a period. `lanes`: L, the same for the order of every dataset.
    """

    def __init__(self, quotas: tuple[int, ...], *, seed: int, lanes: int) -> None:
        if not quotas or min(quotas) < 1:
            raise ValueError(f"quotas are {quotas}; allowed: one or more numbers of 1 or more")
        if lanes < 1:
            raise ValueError(f"lanes is {lanes}; allowed: 1 or more")
        self.quotas, self.lanes = quotas, lanes
        self.period = sum(quotas)
        self._quotas_D = np.array(quotas, dtype=np.int64)
        self._drawn_P = _even_draws(self._quotas_D)
        one_hot = self._drawn_P[:, None] == np.arange(len(quotas))
        # Row k counts the draws of each dataset before draw k.
        self._before_PD = np.cumsum(one_hot, axis=0, dtype=np.int64) - one_hot
        key = ROTATIONS.key(seed)
        rotation = hash_array(np.arange(lanes, dtype=np.int64), key=key) % np.uint64(self.period)
        self._rotation_L = rotation.astype(np.int64)

    def split(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns (dataset, position in that dataset's own order) of each position of the mixed stream. All have the
        same shape.

        In lane group g, a dataset's own positions are g, g + L, g + 2L, ... without a gap.
        """
        count, group = np.divmod(positions, self.lanes)
        rotation = self._rotation_L[group]
        rounds, place = np.divmod(count + rotation, self.period)
        dataset = self._drawn_P[place]
        drawn = rounds * self._quotas_D[dataset] + self._before_PD[place, dataset]
        own_count = drawn - self._before_PD[rotation, dataset]
        return dataset, own_count * self.lanes + group


def _even_draws(quotas_D: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the dataset of each draw of a period: int64[P]. Draw j of a dataset with quota q is due at (j + 1/2) /
    q."""
    dataset = np.repeat(np.arange(quotas_D.size), quotas_D)
    number = np.concatenate([np.arange(quota) for quota in quotas_D.tolist()])
    due = (2 * number + 1) / (2 * quotas_D[dataset])  # correctly rounded, so equal fractions give equal floats
    return dataset[np.lexsort((dataset, due))]
