"""Reads the labels of scan files: what they mean is settled once for all of them, before the plan."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shards.class_labels import Meaning, WrittenLabels, are_names, settle
from shards.class_names import read_label_names
from shards.errors import ImageRefusedError
from shards.packing.config import PackSpec
from shards.packing.scan import SCAN_SCHEMA, read_scan
from shards.reading.parallel import run_tasks
from shards.store import Store, open_store


@dataclass(frozen=True, kw_only=True)
class _CountTask:
    """A scan file of the dataset at `url`, whose labels are counted as they are written."""

    url: str
    number: int


def settled(store: Store, spec: PackSpec, num_scans: int, *, workers: int) -> Meaning:
    """What the labels of a scan mean; a source of names needs no look at them. UserError if they could be meant two
    ways."""
    listed = read_label_names(spec.labels_file) if spec.labels_file else None
    numbered = spec.source.known_labels()
    if spec.source.labels_are_names:
        return are_names(listed or numbered)
    tasks = (_CountTask(url=store.url, number=number) for number in range(num_scans))
    written = WrittenLabels.joined(run_tasks(_count, tasks, workers=workers))
    return settle(spec.labels, written, listed=listed, numbered=numbered or ())


def labelled(table: pa.Table, meaning: Meaning) -> pa.Table:
    """Rows of a scan with the classes that their labels mean, and with the reason if they are none."""
    lists = table.column("labels").combine_chunks()
    labels_each = pc.list_flatten(lists).dictionary_encode()
    if meaning.is_same(labels_each.dictionary.to_pylist()) and not _has_repeated(lists, labels_each):
        return table
    has_weights = "weights" in table.column_names
    weights = table.column("weights").to_pylist() if has_weights else [None] * table.num_rows
    reasons = table.column("reason").to_pylist() if "reason" in table.column_names else [None] * table.num_rows
    labels, kept = list[tuple[str, ...]](), list[tuple[float, ...]]()
    for row, (written, some) in enumerate(zip(lists.to_pylist(), weights, strict=True)):
        try:
            found = meaning.of(written, some or ())
        except ImageRefusedError as refusal:
            found, reasons[row] = ((), ()), reasons[row] or str(refusal)
        labels.append(found[0])
        kept.append(found[1])
    columns = {"labels": labels, "weights": kept, "reason": reasons}
    for name in [name for name in columns if name in table.column_names]:
        column = pa.array(columns[name], SCAN_SCHEMA.field(name).type)
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


def _has_repeated(lists: pa.ListArray, each: pa.DictionaryArray) -> bool:
    """Whether one image has a label twice. `each`: the labels of all lists."""
    places = pc.list_parent_indices(lists).to_numpy().astype(np.int64) * len(each.dictionary) + each.indices.to_numpy()
    return len(np.unique(places)) < len(places)


def _count(task: _CountTask) -> WrittenLabels:
    _, table = read_scan(open_store(task.url), task.number, ["labels"])
    return WrittenLabels.of(table.column("labels").to_pylist())
