"""A part of a packed dataset, which can be used like a whole one: its samples are numbered from 0, and nothing is
copied.

Code that reads, orders, scores or counts samples need not know that a dataset is a part. A dataset is packed in a
random order, so a random choice of its blocks is a random choice of its samples, and is read as fast as the whole. The
last block chosen is cut to the required number. Single samples are chosen instead if the dataset's order is not random
(tars made by others), or if a number per class is set.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shards.config import HeldOutConfig, SubsetConfig
from shards.dataset import Dataset
from shards.errors import UserError
from shards.hashing import HELD_OUT, SUBSETS, hash_array
from shards.output.terminal import printable_name
from shards.sample_rows import BlockTable, SampleRows
from shards.storage.ranges import RangeReads

Ids = NDArray[np.int64]
PART_VERSION = 1


@dataclass(frozen=True)
class Runs:
    """Runs of sample ids, in rising order: run i is first[i] .. first[i] + count[i] - 1. `first`, `count`: int64[n]."""

    first: Ids
    count: Ids

    @cached_property
    def ends(self) -> Ids:
        """int64[n]: the number of ids up to and including each run."""
        return np.cumsum(self.count, dtype=np.int64)

    @property
    def num_samples(self) -> int:
        """The number of samples of all runs."""
        return int(self.ends[-1]) if self.ends.size else 0

    def ids(self) -> Ids:
        """Returns every id: int64[num_samples]."""
        starts = self.ends - self.count
        return np.asarray(np.repeat(self.first - starts, self.count) + np.arange(self.num_samples), dtype=np.int64)

    def num_below(self, ids: Ids) -> Ids:
        """Returns how many ids of the runs are below each of `ids`, in the shape of `ids`."""
        if not self.first.size:
            return np.zeros_like(ids)
        run = np.maximum(np.searchsorted(self.first, ids, side="left") - 1, 0)
        before = self.ends[run] - self.count[run]
        return np.asarray(before + np.clip(ids - self.first[run], 0, self.count[run]), dtype=np.int64)

    def at(self, places: Ids) -> Ids:
        """Returns the ids at these places, which are counted from 0 over all runs, in the shape of `places`."""
        run = np.searchsorted(self.ends, places, side="right")
        return np.asarray(self.first[run] + places - (self.ends[run] - self.count[run]), dtype=np.int64)


def between(first: int, end: int) -> Runs:
    """Returns the ids first..end-1."""
    return Runs(np.array([first], dtype=np.int64), np.array([end - first], dtype=np.int64))


def single(ids: Ids) -> Runs:
    """Returns each id as a separate run. `ids` must be in rising order."""
    return Runs(ids, np.ones_like(ids))


def cut(runs: Runs, block_first: Ids) -> Runs:
    """Returns the same ids, with a new run wherever a block begins. `block_first`: the first id of each block, in
    rising order."""
    inside = block_first[runs.num_below(block_first + 1) > runs.num_below(block_first)]
    first = np.union1d(runs.first, inside)
    place = runs.num_below(first)
    return Runs(first, np.diff(place, append=runs.num_samples))


def chosen(runs: Runs, num_samples: int, *, names: Ids, key: int) -> Runs:
    """Chooses `num_samples` ids: whole runs, in the order of the hash of their `names` (int64[n]), with the last run
    cut. With the same runs and key, a smaller choice is contained in a larger one."""
    order = np.argsort(hash_array(names, key=key), kind="stable")
    ends = np.cumsum(runs.count[order])
    last = int(np.searchsorted(ends, num_samples))
    taken, count = order[: last + 1], runs.count[order[: last + 1]].copy()
    count[-1] -= ends[last] - num_samples
    rising = np.argsort(taken)
    return joined(Runs(runs.first[taken][rising], count[rising]))


def joined(runs: Runs) -> Runs:
    """Returns the same ids in as few runs as possible."""
    begins = np.ones(runs.first.size, dtype=bool)
    begins[1:] = runs.first[1:] != runs.first[:-1] + runs.count[:-1]
    starts = np.flatnonzero(begins)
    return Runs(runs.first[starts], np.add.reduceat(runs.count, starts) if starts.size else runs.count)


def without(runs: Runs, others: Runs) -> Runs:
    """Returns the ids of `runs` except those of `others`. All ids of `others` must be in `runs`."""
    edges = np.unique(np.concatenate([runs.first, runs.first + runs.count, others.first, others.first + others.count]))
    first, end = edges[:-1], edges[1:]
    stays = (runs.num_below(end) > runs.num_below(first)) & (others.num_below(end) == others.num_below(first))
    return joined(Runs(first[stays], (end - first)[stays]))


def per_class(ids: Ids, labels: Ids, num_samples: int, *, key: int) -> Ids:
    """Returns `num_samples` ids of each class, those with the smallest hashes, in rising order. `labels`: int64[n], the
    labels of `ids`. Every class must have at least `num_samples`."""
    order = np.lexsort((hash_array(ids, key=key), labels))
    nums = np.unique(labels, return_counts=True)[1]
    firsts = np.cumsum(nums) - nums
    return np.sort(ids[order[(firsts[:, None] + np.arange(num_samples)).ravel()]])


def labels_of(dataset: Dataset, *, what: str) -> Ids:
    """Returns the label of every sample: int64[N]. Raises UserError if a sample has several labels or none. `what`:
    what needs exactly one label, for the message. Reads the index of every shard once per host, and no image."""
    [labels] = dataset.of_host("labels", lambda: (_labels_of(dataset, what=what),))
    return labels


def _labels_of(dataset: Dataset, *, what: str) -> Ids:
    found = []
    for shard in range(len(dataset.manifest.shards)):
        rows = dataset.sample_rows(shard)
        nums = np.diff(rows.label_ends)
        if (nums != 1).any():
            num = int(nums[nums != 1][0])
            raise UserError(
                f"{dataset.url} has a sample with {num or 'no'} label{'s' * (num > 1)}; {what} needs images with "
                "exactly one label: give another dataset"
            )
        found.append(rows.label_values.astype(np.int64))
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def refuse_too_few(labels: Ids, names: Sequence[str], *, least: int, flag: str, url: str) -> None:
    """Raises UserError if a class has fewer images than `least`. `flag`: the flag and its value, for the message.
    `names`: the names of the classes."""
    nums = np.bincount(labels, minlength=len(names))
    short = np.flatnonzero(nums < least)
    if short.size:
        fewest = int(short[np.argmin(nums[short])])
        others = f" ({short.size} of {len(names)} classes have too few)" if short.size > 1 else ""
        raise UserError(
            f"{url} has {nums[fewest]} images of class {printable_name(names[fewest])!r}, fewer than {flag}"
            f"{others}; allowed: at most {nums.min()} here"
            + ("" if nums.min() else ": none; give a dataset with images of every class")
        )


class Part(Dataset):
    """The samples `runs` of a dataset. Its `fingerprint` is a hash of the dataset's fingerprint and of the runs."""

    def __init__(self, whole: Dataset, runs: Runs, *, is_scattered: bool) -> None:
        digest = hashlib.sha256(whole.fingerprint.encode())
        for column in (runs.first, runs.count):
            digest.update(column.tobytes())
        super().__init__(whole.store, whole.manifest, fingerprint=digest.hexdigest(), ranks=whole._ranks)
        self.packed_fingerprint = whole.packed_fingerprint
        self._whole, self._runs, self._is_scattered = whole, runs, is_scattered
        self._packed_first = self.first_sample_ids  # the first sample id of each shard in the whole dataset
        self.num_samples, self.first_sample_ids = runs.num_samples, runs.num_below(self._packed_first)

    def read_by(self, reads: RangeReads) -> "Part":
        """Returns the same as `Dataset.read_by`. The whole dataset is read through `reads`, too."""
        stream = cast("Part", super().read_by(reads))
        stream._whole = self._whole.read_by(reads)
        return stream

    def packed_ids(self, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the ids that these samples have in the whole dataset."""
        return self._runs.at(sample_ids)

    @property
    def whole(self) -> Dataset:
        """The dataset that this is a part of."""
        return self._whole

    @property
    def packed_blocks(self) -> BlockTable:
        """The place of every block in the whole dataset."""
        return self._whole.packed_blocks

    @property
    def label_table(self) -> pa.Table:
        """The label table of the whole dataset."""
        return self._whole.label_table

    @cached_property
    def blocks(self) -> BlockTable:
        """The table of the blocks that have samples of the part. It counts only these samples."""
        whole = self.packed_blocks
        first = self._runs.num_below(whole.first_sample_id)
        num_samples = self._runs.num_below(whole.first_sample_id + whole.num_samples) - first
        has = num_samples > 0
        table = BlockTable(
            shard=whole.shard[has],
            first_byte=whole.first_byte[has],
            end_byte=whole.end_byte[has],
            first_sample_id=first[has],
            num_samples=num_samples[has],
        )
        return replace(table, read_bytes=self._read_bytes(table)) if self._is_scattered else table

    def _read_rows(self, shard: int) -> SampleRows:
        return super()._read_rows(shard).take(self._rows_of(shard))

    def _rows_of(self, shard: int) -> Ids:
        """Returns which rows of a shard's index are in the part."""
        first = self.first_sample_ids[shard]
        end = self.first_sample_ids[shard + 1] if shard + 1 < self.first_sample_ids.size else self.num_samples
        rows: Ids = self._runs.at(np.arange(first, end)) - self._packed_first[shard]
        return rows

    def _read_bytes(self, blocks: BlockTable) -> Ids:
        """Returns how many bytes of each block are read: int64[num_blocks]. Reads the index of every shard that has
        samples of the part."""
        found = []
        for shard in np.unique(blocks.shard).tolist():
            rows = self.sample_rows(shard)
            first = blocks.first_sample_id[blocks.shard == shard] - self.first_sample_ids[shard]
            begins = np.union1d(rows.reads(), first)
            last = np.append(begins[1:], rows.size.size) - 1
            of_read = rows.offset[last] + rows.size[last] - rows.offset[begins]
            found.append(np.add.reduceat(of_read, np.searchsorted(begins, first)))
        return np.concatenate(found).astype(np.int64)


def opened_parts(dataset: Dataset, subset: SubsetConfig, held_out: HeldOutConfig) -> tuple[Dataset, Dataset | None]:
    """Opens the part to train on, and the held-out part (None: none).

    Raises UserError for a part without samples, for more samples than the dataset has, and for classes with too few
    samples. The range from `subset.first` to `subset.end` is taken first, then the held-out part from it, then the
    subset from the rest. Reads the index of every shard only if a number per class is set or the tars were made by
    others.
    """
    if subset.is_whole and held_out.is_none:
        return dataset, None
    is_random = not dataset.manifest.adopted
    rest = _range(dataset, subset)
    held = None
    if not held_out.is_none:
        num = _number("held_out", held_out.share, held_out.count, rest.num_samples, url=dataset.url)
        if num == rest.num_samples:
            raise UserError(
                f"held_out takes all {num:,} samples of {dataset.url}, and leaves none to train on; lower it"
            )
        taken = _chosen(dataset, rest, num, key=HELD_OUT.key(held_out.seed), by_blocks=is_random)
        rest, held = without(rest, taken), Part(dataset, taken, is_scattered=not is_random)
    if subset.per_class:
        return Part(dataset, _per_class(dataset, rest, subset), is_scattered=True), held
    if subset.count or subset.share < 1:
        num = _number("subset", subset.share, subset.count, rest.num_samples, url=dataset.url)
        rest = _chosen(dataset, rest, num, key=SUBSETS.key(subset.seed), by_blocks=is_random)
    return Part(dataset, rest, is_scattered=not is_random), held


def _range(dataset: Dataset, subset: SubsetConfig) -> Runs:
    num = dataset.num_samples
    if max(subset.first + 1, subset.end) > num:
        raise UserError(
            f"the subset is samples {subset.first:,} to {subset.end or 'the end'}, but {dataset.url} has {num:,} "
            f"samples; allowed: subset.first to {num - 1:,} (0 leaves none out), subset.end to {num:,}"
        )
    return between(subset.first, subset.end or num)


def _number(what: str, share: float, count: int, available: int, *, url: str) -> int:
    """Returns the number of samples that the settings ask for. Raises UserError if it is zero or more than are
    available."""
    if count > available:
        raise UserError(f"{what}.count is {count:,}; allowed: at most {available:,}, which {url} has for it")
    number = count or round(share * available)
    if not number:
        raise UserError(
            f"{what}.share {share:g} of the {available:,} samples of {url} is less than one sample; allowed: from "
            f"{1 / available:.2g} on"
        )
    return number


def _chosen(dataset: Dataset, runs: Runs, num_samples: int, *, key: int, by_blocks: bool) -> Runs:
    if not by_blocks:
        runs = single(runs.ids())
        return chosen(runs, num_samples, names=runs.first, key=key)
    block_first = dataset.blocks.first_sample_id
    runs = cut(runs, block_first)
    names = block_first[np.searchsorted(block_first, runs.first, side="right") - 1]
    return chosen(runs, num_samples, names=names, key=key)


def _per_class(dataset: Dataset, runs: Runs, subset: SubsetConfig) -> Runs:
    ids, what = runs.ids(), "a subset by samples per class"
    labels = labels_of(dataset, what=what)[ids]
    flag = f"subset.per_class {subset.per_class}"
    refuse_too_few(labels, dataset.label_names, least=subset.per_class, flag=flag, url=dataset.url)
    return single(per_class(ids, labels, subset.per_class, key=SUBSETS.key(subset.seed)))


def settings_of(config: SubsetConfig | HeldOutConfig) -> dict[str, int | float]:
    """Returns the settings that determine a part, without those at their defaults. They show whether a resumed run has
    the same part."""
    kind = type(config)()
    given = {name: value for name, value in asdict(config).items() if value != getattr(kind, name)}
    return given | {"version": PART_VERSION}
