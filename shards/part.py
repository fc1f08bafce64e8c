"""A part of a packed dataset, opened as a dataset of its own: its samples are numbered from 0, nothing is copied.

What reads, orders, scores or counts samples does not need to know of it. shards/subset.py chooses the samples.
"""

import hashlib
from dataclasses import asdict, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shards.config import HeldOutConfig, SubsetConfig
from shards.dataset import Dataset
from shards.errors import UserError
from shards.hashing import HELD_OUT, SUBSETS
from shards.sample_rows import BlockTable, SampleRows
from shards.single_labels import labels_of, refuse_too_few
from shards.subset import Ids, Runs, between, chosen, cut, per_class, single, without

PART_VERSION = 1


class Part(Dataset):
    """The samples `runs` of a dataset. `fingerprint`: of the dataset and the runs."""

    def __init__(self, whole: Dataset, runs: Runs, *, is_scattered: bool) -> None:
        digest = hashlib.sha256(whole.fingerprint.encode())
        for column in (runs.first, runs.count):
            digest.update(column.tobytes())
        super().__init__(whole.store, whole.manifest, fingerprint=digest.hexdigest(), ranks=whole._ranks)
        self.packed_fingerprint = whole.packed_fingerprint
        self._whole, self._runs, self._is_scattered = whole, runs, is_scattered
        self._packed_first = self.first_sample_ids  # of each shard
        self.num_samples, self.first_sample_ids = runs.num_samples, runs.num_below(self._packed_first)

    def packed_ids(self, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids that samples have in the whole dataset."""
        return self._runs.at(sample_ids)

    @property
    def packed_blocks(self) -> BlockTable:
        """Every block's place in the whole dataset."""
        return self._whole.packed_blocks

    @property
    def label_table(self) -> pa.Table:
        """The label table of the whole dataset."""
        return self._whole.label_table

    @cached_property
    def blocks(self) -> BlockTable:
        """The table of all blocks that have samples of the part, with these samples alone."""
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
        """The part's rows of a shard's index."""
        first = self.first_sample_ids[shard]
        end = self.first_sample_ids[shard + 1] if shard + 1 < self.first_sample_ids.size else self.num_samples
        rows: Ids = self._runs.at(np.arange(first, end)) - self._packed_first[shard]
        return rows

    def _read_bytes(self, blocks: BlockTable) -> Ids:
        """int64[num_blocks]: what is read of each. Reads the index of every shard."""
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
    """The part that is trained on, and the one that is held out (None: none). UserError for a part of no samples, for
    more samples than there are, and for classes with fewer samples than asked for.

    The range is taken first, the held-out part out of it, the subset out of the rest. Reads the index of every shard
    for a number per class, and for tars made by others; else nothing.
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
    """How many samples are meant. UserError for none, and for more than there are."""
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
    """What determines a part, to see whether it is still the same; what has its default is left out."""
    kind = type(config)()
    given = {name: value for name, value in asdict(config).items() if value != getattr(kind, name)}
    return given | {"version": PART_VERSION}
