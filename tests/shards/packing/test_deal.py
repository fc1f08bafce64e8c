"""Rows are dealt to slots through files: every row once, in the order of the slots, however the rows were spread."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from shards.class_labels import are_names
from shards.packing.deal import (
    DROPPED_SCHEMA,
    DealTask,
    GatherTask,
    deal,
    dropped_rows,
    gather,
    samples_path,
    shards_per_file,
)
from shards.packing.scan import scan_path
from shards.sources.kinds import FolderSource
from shards.store import open_store
from tests.rigs.images import class_folders
from tests.rigs.packing import pack_spec, scanned
from tests.rigs.tables import read_table


@pytest.mark.parametrize("scans_a_task", [1, 2, 5])
def test_rows_come_out_by_slot(tmp_path: Path, scans_a_task: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.packing.listing.SLICE_ENTRIES", 4)
    monkeypatch.setattr("shards.packing.deal.SAMPLES_A_FILE", 8)
    root = class_folders(tmp_path / "images", num_classes=3, images_a_class=6)
    spec, store = pack_spec(FolderSource(root=str(root))), open_store(str(tmp_path / "out"))
    assert len(scanned(store, spec).slices) == 5  # of 4, 4, 4, 4 and 2 rows
    slots = np.random.default_rng(0).permutation(18) - 2  # two rows are dropped
    slots[slots < 0] = -1
    dropped = np.flatnonzero(slots < 0).tolist()
    drops = [{"position": dropped[0], "kind": "duplicate", "reason": "r", "match": "m", "distance": 3}]
    fields = [DROPPED_SCHEMA.field(name) for name in drops[0]]
    (tmp_path / "spill").mkdir()
    for begin in range(0, 5, scans_a_task):
        numbers = tuple(range(begin, min(begin + scans_a_task, 5)))
        first, after = begin * 4, min((begin + len(numbers)) * 4, 18)
        deal(
            DealTask(
                url=store.url,
                spec=spec,
                numbers=numbers,
                first_position=first,
                slots=slots[first:after],
                drops=pa.Table.from_pylist(drops, schema=pa.schema(fields)),
                merged={int(np.flatnonzero(slots == 5)[0]): (("c2", "c0"), (0.5, 0.25))},
                meaning=are_names(None),
                label_names=("c0", "c1", "c2"),
                num_files=2,
                folder=str(tmp_path / "spill"),
            )
        )
    rows = []
    for number in range(2):
        task = GatherTask(url=store.url, number=number, samples_per_shard=4, folder=str(tmp_path / "spill"))
        path, _ = gather(task)
        assert path == samples_path(number)
        rows += read_table(store.read(path)).to_pylist()
    assert [row["slot"] for row in rows] == list(range(16))
    assert [row["position"] for row in rows] == [int(np.flatnonzero(slots == slot)[0]) for slot in range(16)]
    sources = [row for number in range(5) for row in read_table(store.read(scan_path(number))).to_pylist()]
    assert all(row["source"] == sources[row["position"]]["source"] for row in rows)
    assert (rows[5]["labels"], rows[5]["weights"]) == ([2, 0], [0.5, 0.25])
    assert all(row["labels"] == [int(row["source"][1])] for row in rows if row["slot"] != 5)
    out = dropped_rows(str(tmp_path / "spill"))
    assert out.schema == DROPPED_SCHEMA
    assert out.column("position").to_pylist() == dropped
    assert out.column("kind").to_pylist() == ["duplicate", "refused"]


def test_files_of_a_plan_hold_whole_shards() -> None:
    assert [shards_per_file(size) for size in (1, 1000, 2**18, 2**20)] == [256, 256, 1, 1]
