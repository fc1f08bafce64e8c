"""Last phase of packing: block table, labels, quarantine list, and the manifest that makes it a dataset."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shards.errors import UserError
from shards.index import (
    BLOCKS_SCHEMA,
    LABELS_SCHEMA,
    QUARANTINE_SCHEMA,
    ShardCommit,
    read_commit,
    read_rows,
    table_bytes,
)
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
from shards.plan import PLAN_PATH, PackSpec, Plan
from shards.progress import Progress
from shards.scan import quarantined
from shards.store import MissingObjectError, Store
from shards.tar_writer import BLOCK_BYTES


@dataclass(kw_only=True)
class _Merged:
    """What is gathered from shard to shard."""

    shards: list[ShardRecord] = field(default_factory=list)
    blocks: list[dict[str, int]] = field(default_factory=list)
    quarantine: list[dict[str, object]] = field(default_factory=list)
    label_counts: Counter[int] = field(default_factory=Counter)
    files: dict[str, str] = field(default_factory=dict)
    num_samples: int = 0


def merge(store: Store, spec: PackSpec, plan: Plan, *, max_quarantined: float) -> Manifest:
    """Write what describes the whole, the manifest last. Every shard must be committed."""
    merged = _Merged(files={PLAN_PATH: plan.hash, **plan.files})
    merged.quarantine = list(_refused_by_scan(store, plan))
    with Progress("merge", plan.num_shards, unit="shards") as progress:
        for shard in range(plan.num_shards):
            _add_shard(store, merged, plan, shard, spec.samples_per_block)
            progress.advance()
    refuse_quarantine(len(merged.quarantine), plan, max_quarantined=max_quarantined, url=store.url)
    _write_tables(store, merged, plan)
    store.discard_unfinished()
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        plan_hash=plan.hash,
        split=spec.split,
        num_samples=merged.num_samples,
        num_classes=len(plan.label_names),
        num_quarantined=len(merged.quarantine),
        samples_per_block=spec.samples_per_block,
        shards=tuple(merged.shards),
        files=merged.files,
    )
    store.write(MANIFEST_PATH, manifest.to_bytes())
    return manifest


def refuse_quarantine(count: int, plan: Plan, *, max_quarantined: float, url: str) -> None:
    """UserError where more images were refused than the job allows."""
    total = plan.num_samples + plan.num_quarantined
    if count > max_quarantined * total:
        message = f"{count} of {total} images cannot be packed, allowed is a share of {max_quarantined:g}"
        raise UserError(f"{message}; see column reason of {url}/plan/scan-*.parquet, or raise --max-quarantined")


def blocks_of_shard(
    offsets: NDArray[np.int64], *, data_end: int, samples_per_block: int
) -> Iterator[tuple[int, int, int, int]]:
    """(first row, first byte, end byte, samples) of each block; every image's header is right before it."""
    starts = offsets - BLOCK_BYTES
    for row in range(0, len(starts), samples_per_block):
        after = row + samples_per_block
        end_byte = int(starts[after]) if after < len(starts) else data_end
        yield row, int(starts[row]), end_byte, min(samples_per_block, len(starts) - row)


def _add_shard(store: Store, merged: _Merged, plan: Plan, shard: int, samples_per_block: int) -> None:
    data, commit = _committed_index(store, plan, shard)
    rows = read_rows(data)
    for row, first_byte, end_byte, count in blocks_of_shard(
        rows.offset, data_end=commit.data_end, samples_per_block=samples_per_block
    ):
        place = (shard, first_byte, end_byte, merged.num_samples + row, count)
        merged.blocks.append(dict(zip(BLOCKS_SCHEMA.names, place, strict=True)))
    merged.shards.append(
        ShardRecord(
            path=shard_path(shard),
            first_sample_id=merged.num_samples,
            num_samples=len(rows.offset),
            sha256=commit.tar_sha256,
            num_bytes=commit.tar_bytes,
        )
    )
    merged.num_samples += len(rows.offset)
    merged.label_counts.update(label for labels in rows.labels for label in labels)
    merged.files[index_path(shard)] = sha256_hex(data)
    merged.quarantine += [
        {"position": item.position, "source": item.source, "phase": "shards", "reason": item.reason}
        for item in commit.left_out
    ]


def _committed_index(store: Store, plan: Plan, shard: int) -> tuple[bytes, ShardCommit]:
    try:
        data = store.read(index_path(shard))
        commit = read_commit(data)
        if commit.plan_hash == plan.hash and store.size(shard_path(shard)) == commit.tar_bytes:
            return data, commit
    except (MissingObjectError, ValueError) as error:
        reason = str(error)
    else:
        reason = "it is of another plan, or its tar has another size"
    raise UserError(f"shard {shard} of {store.url} is not packed ({reason}); run --phase shards with every part")


def _refused_by_scan(store: Store, plan: Plan) -> Iterator[dict[str, object]]:
    for path in sorted(path for path in plan.files if path.startswith("plan/scan-")):
        for row in quarantined(store.read(path)).to_pylist():
            yield {
                "position": row["position"],
                "source": row["source"],
                "phase": "scan",
                "reason": row["reason"],
            }


def _write_tables(store: Store, merged: _Merged, plan: Plan) -> None:
    labels = [
        {"label": label, "name": name, "num_samples": merged.label_counts[label]}
        for label, name in enumerate(plan.label_names)
    ]
    tables = {
        BLOCKS_PATH: pa.Table.from_pylist(merged.blocks, schema=BLOCKS_SCHEMA),
        LABELS_PATH: pa.Table.from_pylist(labels, schema=LABELS_SCHEMA),
        QUARANTINE_PATH: pa.Table.from_pylist(merged.quarantine, schema=QUARANTINE_SCHEMA),
    }
    for path, table in tables.items():
        data = table_bytes(table)
        store.write(path, data)
        merged.files[path] = sha256_hex(data)
