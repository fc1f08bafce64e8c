"""Datasets written file by file, for cases that no small packing produces: many classes, odd names, a full list of
quarantined images."""

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from shards.card.facts import MATCHES_RULES
from shards.index import BLOCKS_SCHEMA, LABELS_SCHEMA, QUARANTINE_SCHEMA, IndexRow, ShardCommit, index_bytes
from shards.manifest import (
    BLOCKS_PATH,
    FORMAT_VERSION,
    LABELS_PATH,
    MANIFEST_PATH,
    QUARANTINE_PATH,
    Manifest,
    ShardRecord,
    index_path,
    sha256_hex,
    shard_path,
)
from shards.packing.plan import MATCHES_PATH, PLAN_PATH, Plan
from shards.sources.tar_members import BLOCK_BYTES
from shards.store import Store
from shards.tables import table_bytes


@dataclass(frozen=True, kw_only=True)
class Sample:
    """An image as the index lists it. `num_bytes` is only for a sample without `image`, whose bytes are not in the
    shard."""

    labels: tuple[int, ...] = (0,)
    image: bytes = b""
    num_bytes: int = 1000
    height: int = 24
    width: int = 32
    orientation: int = 1
    source: str = "a.jpg"


def write_dataset(
    store: Store,
    shards: Sequence[Sequence[Sample]],
    names: Sequence[str],
    *,
    quarantine: Sequence[dict[str, object]] = (),
    matches: Sequence[dict[str, object]] = (),
    settings: dict[str, object] | None = None,
    num_relabelled: int = 0,
) -> Manifest:
    """Writes a dataset's files to `store`. A "shard" is just its images, each after a block for its header, which is
    all that the card reads."""
    records, files = _write_shards(store, shards)
    files |= {
        BLOCKS_PATH: _table([_block(shard, record) for shard, record in enumerate(records)], BLOCKS_SCHEMA),
        LABELS_PATH: _table(_label_rows(shards, names), LABELS_SCHEMA),
        QUARANTINE_PATH: _table(quarantine, QUARANTINE_SCHEMA),
        PLAN_PATH: _plan(settings or {}, num_relabelled).to_bytes(),
    }
    if matches:
        files[MATCHES_PATH] = _table(matches, MATCHES_RULES.schema)
    for path, data in files.items():
        store.write(path, data)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        plan_hash=sha256_hex(files[PLAN_PATH]),
        split="train",
        num_samples=sum(record.num_samples for record in records),
        num_classes=len(names),
        num_quarantined=len(quarantine),
        samples_per_block=max([64, *(len(samples) for samples in shards)]),  # a shard is a block
        shards=tuple(records),
        files={path: sha256_hex(data) for path, data in files.items()},
    )
    store.write(MANIFEST_PATH, manifest.to_bytes())
    return manifest


def _write_shards(store: Store, shards: Sequence[Sequence[Sample]]) -> tuple[list[ShardRecord], dict[str, bytes]]:
    """Writes the shards; returns their records, and their index files by path."""
    records: list[ShardRecord] = []
    files: dict[str, bytes] = {}
    for shard, samples in enumerate(shards):
        data = b"".join(bytes(BLOCK_BYTES) + sample.image for sample in samples)
        rows = _rows(samples)
        end = max((row.offset + row.size for row in rows), default=BLOCK_BYTES)
        commit = ShardCommit(tar_sha256=sha256_hex(data), tar_bytes=end, data_end=end, plan_hash="")
        store.write(shard_path(shard), data)
        files[index_path(shard)] = index_bytes(shard, rows, commit)
        records.append(
            ShardRecord(
                path=shard_path(shard),
                first_sample_id=sum(record.num_samples for record in records),
                num_samples=len(samples),
                sha256=commit.tar_sha256,
                num_bytes=end,
            )
        )
    return records, files


def _block(shard: int, record: ShardRecord) -> dict[str, object]:
    return {
        "shard": shard,
        "first_byte": 0,
        "end_byte": record.num_bytes,
        "first_sample_id": record.first_sample_id,
        "num_samples": record.num_samples,
    }


def _label_rows(shards: Sequence[Sequence[Sample]], names: Sequence[str]) -> list[dict[str, object]]:
    counts = Counter(label for samples in shards for sample in samples for label in sample.labels)
    return [{"label": label, "name": name, "num_samples": counts[label]} for label, name in enumerate(names)]


def _table(rows: Sequence[dict[str, object]], schema: pa.Schema) -> bytes:
    return table_bytes(pa.Table.from_pylist(list(rows), schema=schema))


def _rows(samples: Sequence[Sample]) -> list[IndexRow]:
    rows, offset = [], BLOCK_BYTES
    for number, sample in enumerate(samples):
        rows.append(
            IndexRow(
                key=f"{number:010d}",
                offset=offset,
                size=len(sample.image) or sample.num_bytes,
                ext="jpg",
                height=sample.height,
                width=sample.width,
                labels=sample.labels,
                crc32=zlib.crc32(sample.image),
                source=sample.source,
                orientation=sample.orientation,
            )
        )
        offset += len(sample.image or bytes(sample.num_bytes)) + BLOCK_BYTES
    return rows


def _plan(settings: dict[str, object], num_relabelled: int) -> Plan:
    return Plan(
        format_version=FORMAT_VERSION,
        settings=settings,
        versions={"pillow": "12.0.0"},
        label_names=(),
        num_samples=0,
        num_quarantined=0,
        num_refused=0,
        num_unlabeled=0,
        num_duplicates=0,
        num_relabelled=num_relabelled,
        num_evaluation=0,
        num_shards=0,
        evaluation_sets={},
        files={},
    )
