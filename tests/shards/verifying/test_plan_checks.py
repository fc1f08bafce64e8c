"""A shard that matches the plan has no faults; each difference is found."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shards.dataset import Dataset, open_dataset
from shards.images.config import Resize
from shards.index import LeftOut, read_commit
from shards.manifest import index_path
from shards.packing.write_shard import planned_samples
from shards.verifying.plan_checks import check_planned
from tests.rigs.datasets import index_rows, packed_folders

AS_IT_IS = Resize()


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
