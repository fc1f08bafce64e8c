"""Third phase of packing: one shard, a pure function of the plan. Any machine writes the same bytes.

The tar is whole or absent, and the index file written after it is the commit record of both.
"""

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow.parquet as pq

from shards.errors import UserError
from shards.index import IndexRow, LeftOut, ShardCommit, index_bytes, read_commit
from shards.manifest import index_path, shard_path
from shards.plan import SHARDS_PER_FILE, Plan, samples_path
from shards.sources import Source
from shards.store import MissingObjectError, Store, open_store
from shards.store_file import StoreFile
from shards.tar_writer import TarWriter


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """One shard to pack into the dataset at `url`."""

    url: str
    plan: Plan
    source: Source
    shard: int
    max_quarantined: float


@dataclass(frozen=True, kw_only=True)
class PlannedSample:
    """A row of the plan: the sample's place and the image that the scan found."""

    slot: int
    position: int
    locator: bytes
    source: str
    ext: str
    height: int
    width: int
    size: int
    crc32: int
    label: int


def pack_shard(task: ShardTask) -> int:
    """Write one shard and commit it, unless that was done before; the number of its samples in the plan."""
    store = open_store(task.url)
    samples = planned_samples(store, task.shard)
    if committed(store, task.plan, task.shard) is None:
        with store.create(shard_path(task.shard)) as file:
            rows, commit = _write_tar(file, task, samples)
        store.write(index_path(task.shard), index_bytes(task.shard, rows, commit))
    return len(samples)


def committed(store: Store, plan: Plan, shard: int) -> ShardCommit | None:
    """The commit record of a finished shard of this plan whose tar is there in full; None otherwise."""
    try:
        commit = read_commit(store.read(index_path(shard)))
        whole = store.size(shard_path(shard)) == commit.tar_bytes
    except (MissingObjectError, ValueError):
        return None
    return commit if whole and commit.plan_hash == plan.hash else None


def planned_samples(store: Store, shard: int) -> list[PlannedSample]:
    """The samples dealt to a shard; reads this shard's row group of the plan and no more."""
    with pq.ParquetFile(StoreFile(store, samples_path(shard))) as file:
        table = file.read_row_group(shard % SHARDS_PER_FILE)
    return [PlannedSample(**row) for row in table.to_pylist()]


def _write_tar(file: BinaryIO, task: ShardTask, samples: list[PlannedSample]) -> tuple[list[IndexRow], ShardCommit]:
    tar, rows, left_out = TarWriter(file), [], []
    for sample, image in _images(task.source, samples):
        if isinstance(image, bytes):
            rows.append(_add(tar, sample, image))
        else:
            left_out.append(LeftOut(position=sample.position, source=sample.source, reason=str(image)))
    _refuse_losses(task, left_out, len(samples))
    data_end = tar.num_bytes
    tar.finish()
    commit = ShardCommit(
        tar_sha256=tar.sha256(),
        tar_bytes=tar.num_bytes,
        data_end=data_end,
        plan_hash=task.plan.hash,
        left_out=tuple(left_out),
    )
    return rows, commit


def _images(source: Source, samples: list[PlannedSample]) -> Iterator[tuple[PlannedSample, bytes | OSError]]:
    locators = [os.fsdecode(sample.locator) for sample in samples]
    for sample, image in zip(samples, source.reader().read_many(locators), strict=True):
        if isinstance(image, OSError):
            yield sample, OSError(f"unreadable: {image}")
        elif len(image) != sample.size or zlib.crc32(image) != sample.crc32:
            yield sample, OSError("the image has changed since the scan")
        else:
            yield sample, image


def _add(tar: TarWriter, sample: PlannedSample, image: bytes) -> IndexRow:
    key = f"{sample.slot:010d}"
    offset = tar.add(f"{key}.{sample.ext}", image)
    tar.add(f"{key}.cls", str(sample.label).encode())
    facts = {
        "height": sample.height,
        "labels": [sample.label],
        "source": sample.source,
        "width": sample.width,
    }
    tar.add(f"{key}.json", json.dumps(facts, ensure_ascii=False, sort_keys=True).encode())
    return IndexRow(
        key=key,
        offset=offset,
        size=sample.size,
        ext=sample.ext,
        height=sample.height,
        width=sample.width,
        labels=(sample.label,),
        crc32=sample.crc32,
        source=sample.source,
    )


def _refuse_losses(task: ShardTask, left_out: list[LeftOut], num_samples: int) -> None:
    # Once committed, a shard is never tried again: a source that is away for a moment must not empty it.
    if len(left_out) > max(1, task.max_quarantined * num_samples):
        example = f"{left_out[0].source}: {left_out[0].reason}"
        message = f"{len(left_out)} of {num_samples} images of shard {task.shard} are not as scanned ({example})"
        raise UserError(f"{message}; allowed is a share of {task.max_quarantined:g}; restore the source")
