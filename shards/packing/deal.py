"""The plan's second pass over the scan files deals rows to their slots. Its memory does not grow with the number of
rows.

It is an external sort in two passes. First, each task takes a few scan files and writes their rows, sorted by slot,
into one local file of Arrow batches, one batch per samples file. Then the batches of each samples file are gathered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shards.class_labels import Meaning
from shards.config_values import Range
from shards.index import KINDS_BY_PLAN, QUARANTINE_SCHEMA, LeftOut
from shards.manifest import MOST_SAMPLES, sha256_hex
from shards.packing.config import PackSpec
from shards.packing.left_out import Labels
from shards.packing.scan import SCAN_SCHEMA, read_scan
from shards.packing.survey import labelled, reasons
from shards.store import open_store
from shards.tables import MOST_ROWS, TableSchema, read_checked, table_bytes

# A samples file has about this many rows, so that planning takes little memory for any collection.
SAMPLES_A_FILE = 1 << 18
MOST_SHARDS_A_FILE = 256

_KEPT = ["locator", "source", "ext", "height", "width", "mode", "orientation", "size", "crc32"]
SAMPLES_SCHEMA = pa.schema(
    [
        ("slot", pa.int64()),
        ("position", pa.int64()),
        *(SCAN_SCHEMA.field(name) for name in _KEPT),
        ("labels", pa.list_(pa.int32())),
        ("weights", pa.list_(pa.float32())),
    ]
)
DROPPED_SCHEMA = pa.schema(
    [
        ("position", pa.int64()),
        ("locator", pa.binary()),
        ("source", pa.string()),
        ("kind", pa.string()),
        ("reason", pa.string()),
        ("match", pa.string()),
        ("distance", pa.int32()),
    ]
)
_DROPPED_RULES = TableSchema(
    schema=DROPPED_SCHEMA,
    ranges={"position": Range(0, MOST_SAMPLES)},
    may_be_null=frozenset(DROPPED_SCHEMA.names) - {"position", "kind"},
)


@dataclass(frozen=True, kw_only=True)
class DealTask:
    """A task: consecutive scan files. `first_position`: the position of their first row.

    `slots`: the slot of every row, or -1 if it is dropped. `drops`: a table (position, kind, reason, match, distance)
    with the reasons for dropped rows that the scan accepted. `merged`: by position, the labels that replace the scanned
    ones.
    """

    url: str
    spec: PackSpec
    numbers: tuple[int, ...]
    first_position: int
    slots: NDArray[np.int64]
    drops: pa.Table
    merged: dict[int, Labels]
    meaning: Meaning
    label_names: tuple[str, ...]
    num_files: int
    folder: str


@dataclass(frozen=True, kw_only=True)
class GatherTask:
    """A task: one samples file of the dataset at `url`, made from the batches that the deal tasks left in `folder`."""

    url: str
    number: int
    samples_per_shard: int
    folder: str


def samples_path(number: int) -> str:
    """Returns the path of a samples file, which has one row group for each of several consecutive shards."""
    return f"plan/samples-{number:05d}.parquet"


def shards_per_file(samples_per_shard: int) -> int:
    """Returns the number of shards whose samples share one samples file, in one row group each."""
    return max(1, min(MOST_SHARDS_A_FILE, SAMPLES_A_FILE // samples_per_shard))


def deal(task: DealTask) -> int:
    """Writes the rows of some scan files, sorted by slot, and the dropped rows to a second file. Returns the number of
    scan files."""
    store, kept, dropped, done = open_store(task.url), [], [], 0
    columns = [*_KEPT, "labels", "weights", "reason"]
    for number in task.numbers:
        _, table = read_scan(store, number, columns)
        table = labelled(table, task.meaning)
        slots = task.slots[done : done + table.num_rows]
        positions = pa.array(task.first_position + done + np.arange(table.num_rows))
        table = table.add_column(0, "position", positions).add_column(0, "slot", pa.array(slots))
        kept.append(_labelled(table.filter(pa.array(slots >= 0)), task))
        dropped.append(_dropped(table.filter(pa.array(slots < 0)), task))
        done += len(slots)
    _spill(pa.concat_tables(kept), task)
    _write_batches(Path(task.folder) / f"dropped-{task.numbers[0]:08d}", [pa.concat_tables(dropped)])
    return len(task.numbers)


def gather(task: GatherTask) -> tuple[str, str]:
    """Writes one samples file. Returns its path and sha256."""
    batches = []
    for spill in sorted(Path(task.folder).glob("kept-*")):
        with pa.memory_map(str(spill)) as file:
            batches.append(pa.ipc.open_file(file).get_batch(task.number))
    table = pa.Table.from_batches(batches)
    slots = table.column("slot").to_numpy()
    ordered = table.take(pa.array(np.argsort(slots, kind="stable")))
    data = table_bytes(ordered, row_group_size=task.samples_per_shard)
    open_store(task.url).write(samples_path(task.number), data)
    return samples_path(task.number), sha256_hex(data)


def dropped_rows(folder: str) -> pa.Table:
    """Returns all rows that the deal tasks dropped, in the order of their positions."""
    tables = []
    for path in sorted(Path(folder).glob("dropped-*")):
        with pa.OSFile(str(path)) as file:
            tables.append(pa.ipc.open_file(file).read_all())
    return pa.concat_tables(tables)


def _labelled(table: pa.Table, task: DealTask) -> pa.Table:
    """Returns the rows with the ids of their labels. Rows whose duplicates were merged get the merged labels."""
    labels, weights = table.column("labels").combine_chunks(), table.column("weights").combine_chunks()
    if task.merged:
        pairs = zip(table.column("position").to_pylist(), labels.to_pylist(), weights.to_pylist(), strict=True)
        merged = [task.merged.get(position, (names, some)) for position, names, some in pairs]
        labels = pa.array([item[0] for item in merged], labels.type)
        weights = pa.array([item[1] for item in merged], weights.type)
    ids = pc.index_in(pc.list_flatten(labels), value_set=pa.array(task.label_names, pa.string()))
    ends = np.cumsum(pc.list_value_length(labels).to_numpy(zero_copy_only=False), dtype=np.int32)
    offsets = pa.array(np.concatenate([np.zeros(1, np.int32), ends]))
    listed = pa.ListArray.from_arrays(offsets, ids)
    return table.select(["slot", "position", *_KEPT]).append_column("labels", listed).append_column("weights", weights)


def _dropped(table: pa.Table, task: DealTask) -> pa.Table:
    """Returns the rows that are not packed: refused by the scan, with wrong labels or formats, or left out by the plan
    as duplicates, near-duplicates of evaluation images, or images of the other split."""
    why = task.drops.filter(pc.is_in(task.drops.column("position"), value_set=table.column("position")))
    refused = table.filter(pc.invert(pc.is_in(table.column("position"), value_set=why.column("position"))))
    reason, is_unlabeled = reasons(refused, task.spec)
    kind = pc.if_else(is_unlabeled, "unlabeled", "refused")
    names = ["position", "locator", "source"]
    refused = refused.select(names).append_column("kind", kind).append_column("reason", reason)
    others = table.select(names).join(why, "position", join_type="inner")
    both = pa.concat_tables([refused, others], promote_options="default")  # missing columns become null
    return both.select(DROPPED_SCHEMA.names).cast(DROPPED_SCHEMA).sort_by("position")


def _spill(table: pa.Table, task: DealTask) -> None:
    rows_a_file = shards_per_file(task.spec.samples_per_shard) * task.spec.samples_per_shard
    table = table.take(pa.array(np.argsort(table.column("slot").to_numpy(), kind="stable"))).combine_chunks()
    edges = np.searchsorted(table.column("slot").to_numpy(), np.arange(task.num_files + 1) * rows_a_file)
    batches = [table.slice(begin, end - begin) for begin, end in pairwise(edges.tolist())]
    _write_batches(Path(task.folder) / f"kept-{task.numbers[0]:08d}", batches)


def _write_batches(path: Path, tables: list[pa.Table]) -> None:
    """Writes one record batch per table, even if the table is empty."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, tables[0].schema) as writer:
        for table in tables:
            whole = table.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)]
            writer.write_batch(whole[0])


def read_dropped(data: bytes) -> pa.Table:
    """Reads the images that are not packed, as the plan lists them. Raises ValueError for impossible values."""
    return read_checked(data, _DROPPED_RULES, most_rows=MOST_ROWS)


def quarantine_table(dropped: pa.Table, left_out: Sequence[LeftOut]) -> pa.Table:
    """Returns the quarantine list, sorted by position: the images that the plan left out, and those that could not be
    packed later."""
    by_plan = pc.is_in(dropped["kind"], value_set=pa.array(KINDS_BY_PLAN))
    of_plan = dropped.append_column("phase", pc.if_else(by_plan, "plan", "scan")).select(QUARANTINE_SCHEMA.names)
    of_shards = [{**vars(item), "phase": "shards", "kind": "refused"} for item in left_out]
    both = [of_plan.cast(QUARANTINE_SCHEMA), pa.Table.from_pylist(of_shards, schema=QUARANTINE_SCHEMA)]
    return pa.concat_tables(both).sort_by("position")
