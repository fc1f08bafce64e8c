"""A shard and tables that match the plan have no faults; each difference is found."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from shards.dataset import Dataset, open_dataset
from shards.images.config import Resize
from shards.index import LABELS_SCHEMA, QUARANTINE_SCHEMA, LeftOut, read_commit
from shards.manifest import FORMAT_VERSION, Manifest, index_path
from shards.packing.deal import DROPPED_SCHEMA
from shards.packing.plan import DROPPED_PATH, Plan
from shards.packing.write_shard import planned_samples
from shards.sources.kinds import FolderSource
from shards.store import Store, open_store
from shards.tables import table_bytes
from shards.verifying.plan_checks import (
    check_adopted_quarantine,
    check_label_table,
    check_manifest,
    check_planned,
    check_positions,
    check_quarantine,
)
from tests.rigs.datasets import index_rows, packed_folders
from tests.rigs.images import class_folders
from tests.rigs.packing import pack_spec, planned
from tests.rigs.tables import read_table

AS_IT_IS = Resize()
MANIFEST = Manifest(
    format_version=FORMAT_VERSION,
    plan_hash="",
    split="train",
    num_samples=0,
    num_classes=2,
    num_quarantined=3,
    samples_per_block=4,
    shards=(),
    files={"plan/dropped.parquet": "00"},
)
PLAN = {
    "format_version": FORMAT_VERSION,
    "versions": {},
    "num_refused": 0,
    "num_unlabeled": 0,
    "num_duplicates": 0,
    "num_relabelled": 0,
    "num_evaluation": 0,
    "num_shards": 0,
    "evaluation_sets": {},
    "label_names": ["a", "b"],
    "settings": {"split": "train", "samples_per_block": 4},
    "num_samples": 0,
    "num_quarantined": 3,
    "files": {"plan/dropped.parquet": "00"},
}
DROPPED = pa.Table.from_pylist(
    [
        {"position": 1, "source": "x", "kind": "refused", "reason": "no image"},
        {"position": 5, "source": "y", "kind": "duplicate", "reason": "the same", "match": "z", "distance": 0},
    ],
    schema=DROPPED_SCHEMA,
)
LEFT_OUT = (LeftOut(position=3, source="w", reason="gone"),)
QUARANTINE = [
    {"position": 1, "source": "x", "phase": "scan", "kind": "refused", "reason": "no image"},
    {"position": 3, "source": "w", "phase": "shards", "kind": "refused", "reason": "gone"},
    {
        "position": 5,
        "source": "y",
        "phase": "plan",
        "kind": "duplicate",
        "reason": "the same",
        "match": "z",
        "distance": 0,
    },
]
SAMPLES = "plan/samples-00000.parquet"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return open_dataset(str(packed_folders(Path(tmp_path_factory.mktemp("plan")))))


def test_a_shard_holds_what_the_plan_dealt_to_it(dataset: Dataset) -> None:
    rows, commit = index_rows(dataset, 0), read_commit(dataset.store.read(index_path(0)))
    planned = planned_samples(dataset.store, 0, samples_per_shard=4)
    assert not list(check_planned(rows, commit, planned, resize=AS_IT_IS))
    [first, second, *others] = planned
    lost = LeftOut(position=first.position, source=first.source, reason="gone")
    stranger = LeftOut(position=99, source="x", reason="gone")
    faults = {
        "neither in it nor listed": (rows, commit, [*planned, replace(second, slot=77)]),
        "is not what the plan dealt": (rows, replace(commit, left_out=(lost,)), planned),
        "did not deal to it": (rows, replace(commit, left_out=(stranger,)), planned),
        "under another name": (rows, replace(commit, left_out=(replace(lost, source="x"),)), [first, second, *others]),
        "not in the plan's order": ([*rows[1::-1], *rows[2:]], commit, planned),
    }
    for message, (found, footer, dealt) in faults.items():
        whats = list(check_planned(found, footer, dealt, resize=AS_IT_IS))
        assert any(message in what for what in whats), message


def test_what_the_plan_says_of_a_sample_is_compared(dataset: Dataset) -> None:
    rows, commit = index_rows(dataset, 0), read_commit(dataset.store.read(index_path(0)))
    planned = planned_samples(dataset.store, 0, samples_per_shard=4)
    first = rows[0]
    changed = {
        "labels": replace(first, labels=(7,)),
        "weights": replace(first, weights=(9.0,)),
        "format": replace(first, ext="gif"),
        "height and width": replace(first, height=first.height + 1),
        "orientation": replace(first, orientation=first.orientation + 1),
        "size": replace(first, size=first.size + 1),
        "crc32": replace(first, crc32=first.crc32 ^ 1),
    }
    for name, found in changed.items():
        (what,) = check_planned([found, *rows[1:]], commit, planned, resize=AS_IT_IS)
        assert f"has {name} " in what
        assert first.source in what


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({}, ""),
        ({"size": 5, "crc32": 5}, ""),  # a copy has its own bytes
        ({"height": 12, "width": 8}, ""),  # turned upright
        ({"height": 9}, "sides (9, 12), by the plan (8, 12)"),
        ({"orientation": 6}, "orientation 6, by the plan 1"),
        ({"ext": "png"}, "format png, by the plan jpg"),
    ],
)
def test_a_copy_follows_from_the_plan(dataset: Dataset, change: dict[str, Any], what: str) -> None:
    rows, commit = index_rows(dataset, 0), read_commit(dataset.store.read(index_path(0)))
    planned = [
        replace(item, height=24, width=36, orientation=6)
        for item in planned_samples(dataset.store, 0, samples_per_shard=4)
    ]
    copies = [replace(row, ext="jpg", height=8, width=12, orientation=1) for row in rows]
    copies[0] = replace(copies[0], **change)
    found = list(check_planned(copies, commit, planned, resize=Resize(short_side=8)))
    assert len(found) == bool(what)
    assert all(what in item for item in found)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"num_classes": 100}, "num_classes is 100, the plan has 2"),
        ({"split": "test"}, "split is 'test', by the plan 'train'"),
        ({"samples_per_block": 5}, "samples_per_block is 5, by the plan 4"),
        ({"files": {"plan/dropped.parquet": "01"}}, "the sha256 of plan/dropped.parquet is not the plan's"),
        ({"adopted": True, "num_quarantined": 2}, "num_quarantined is 2, by the plan 3"),
    ],
)
def test_the_manifest_repeats_the_plan(change: dict[str, object], what: str) -> None:
    plan = json.dumps(PLAN).encode()
    assert not list(check_manifest(MANIFEST, plan))
    assert not list(check_manifest(replace(MANIFEST, adopted=True), plan))
    (found,) = check_manifest(replace(MANIFEST, **change), plan)  # type: ignore[arg-type]
    assert what in found


@pytest.mark.parametrize(
    ("rows", "faults"),
    [
        ([(0, "a", 3), (1, "b", 0)], 0),
        ([(0, "a", 3), (1, "c", 0)], 1),
        ([(0, "a", 2), (1, "b", 1)], 2),
        ([(0, "a", 3)], 1),
        ([(1, "a", 3), (0, "b", 0)], 2),
    ],
)
def test_the_label_table(rows: list[tuple[int, str, int]], faults: int) -> None:
    table = pa.Table.from_pylist([dict(zip(LABELS_SCHEMA.names, row, strict=True)) for row in rows], LABELS_SCHEMA)
    assert len(list(check_label_table(table, ("a", "b"), {0: 3}))) == faults


@pytest.mark.parametrize(
    ("rows", "whats"),
    [
        (QUARANTINE, []),
        ([], ["position 1 is not in it", "position 3 is not in it", "position 5 is not in it"]),
        (QUARANTINE[1:], ["position 1 is not in it"]),
        ([*QUARANTINE, {**QUARANTINE[0], "position": 9}], ["position 9 is in it, but was neither"]),
        ([*QUARANTINE, QUARANTINE[2]], ["position 5 is in it more than once"]),
        ([{**QUARANTINE[0], "reason": "?", "source": "?"}, *QUARANTINE[1:]], ["has another source, reason"]),
        ([QUARANTINE[1], QUARANTINE[0], QUARANTINE[2]], ["not in the order"]),
    ],
)
def test_the_quarantine_list(rows: list[dict[str, object]], whats: list[str]) -> None:
    found = list(check_quarantine(pa.Table.from_pylist(rows, QUARANTINE_SCHEMA), DROPPED, LEFT_OUT))
    assert len(found) == len(whats)
    assert all(what in item for what, item in zip(whats, found, strict=True))


@pytest.mark.parametrize(("positions", "faults"), [([], 0), ([0, 5], 0), ([5, 5], 1), ([6], 1), ([-1], 1)])
def test_the_quarantine_list_of_adopted_tars(positions: list[int], faults: int) -> None:
    table = pa.Table.from_pylist([{"position": position} for position in positions], QUARANTINE_SCHEMA)
    assert len(list(check_adopted_quarantine(table, 6))) == faults


@pytest.fixture
def made(tmp_path: Path) -> tuple[Store, Plan]:
    """A plan of 6 images, of which one is refused."""
    root = class_folders(tmp_path / "images", num_classes=2, images_a_class=3)
    (root / "c1" / "img 0.JPEG").write_bytes(b"")
    store = open_store(str(tmp_path / "out"))
    return store, planned(store, pack_spec(FolderSource(root=str(root))))


def test_a_plan_of_ours_places_every_image_once(made: tuple[Store, Plan]) -> None:
    assert list(check_positions(*made)) == []


@pytest.mark.parametrize(
    ("path", "position", "faults"),
    [
        (SAMPLES, 3, ["position 3 is in more than one place", "is in no shard"]),
        (DROPPED_PATH, 0, ["position 0 is in more than one place", "position 3 is in no shard"]),
        (SAMPLES, 6, ["positions outside 0 to 5"]),
        (SAMPLES, -1, ["positions outside 0 to 5"]),
    ],
)
def test_an_image_lost_or_placed_twice_is_named(
    made: tuple[Store, Plan], path: str, position: int, faults: list[str]
) -> None:
    store, plan = made
    table = read_table(store.read(path))
    positions = pa.array([position, *table.column("position").to_pylist()[1:]], pa.int64())
    place = table.schema.get_field_index("position")
    store.write(path, table_bytes(table.set_column(place, "position", positions)))
    found = sorted(check_positions(store, plan), reverse=True)
    assert len(found) == len(faults)
    assert all(any(fault in what for what in found) for fault in faults)


def test_a_plan_that_counts_other_images_is_found(made: tuple[Store, Plan]) -> None:
    store, plan = made
    assert list(check_positions(store, replace(plan, num_samples=plan.num_samples + 1))) == [
        "the image at position 6 is in no shard and not among the dropped"
    ]
