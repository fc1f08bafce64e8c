"""A shard that matches the plan has no faults; each difference is found."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shards.checking.plan_checks import check_planned
from shards.dataset import Dataset, open_dataset
from shards.images.config import Resize
from shards.index import LeftOut, read_commit
from shards.manifest import index_path
from shards.packing.write_shard import planned_samples
from tests.rigs.datasets import packed_folders

AS_IT_IS = Resize()
NO_WEIGHTS: list[list[float]] = [[], [], [], []]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return open_dataset(str(packed_folders(Path(tmp_path_factory.mktemp("plan")))))


def test_a_shard_holds_what_the_plan_dealt_to_it(dataset: Dataset) -> None:
    rows, commit = dataset.shard_rows(0), read_commit(dataset.store.read(index_path(0)))
    planned = planned_samples(dataset.store, 0, samples_per_shard=4)
    assert not list(check_planned(rows, NO_WEIGHTS, commit, planned, resize=AS_IT_IS))
    [first, second, *others] = planned
    lost = LeftOut(position=first.position, source=first.source, reason="gone")
    stranger = LeftOut(position=99, source="x", reason="gone")
    turned: dict[str, Any] = {name: [*getattr(rows, name)[1::-1], *getattr(rows, name)[2:]] for name in vars(rows)}
    faults = {
        "neither in it nor listed": (rows, commit, [*planned, replace(second, slot=77)]),
        "is not what the plan dealt": (rows, replace(commit, left_out=(lost,)), planned),
        "did not deal to it": (rows, replace(commit, left_out=(stranger,)), planned),
        "under another name": (rows, replace(commit, left_out=(replace(lost, source="x"),)), [first, second, *others]),
        "not in the plan's order": (replace(rows, **turned), commit, planned),
    }
    for message, (found, footer, dealt) in faults.items():
        whats = list(check_planned(found, NO_WEIGHTS, footer, dealt, resize=AS_IT_IS))
        assert any(message in what for what in whats), message


def test_what_the_plan_says_of_a_sample_is_compared(dataset: Dataset) -> None:
    rows, commit = dataset.shard_rows(0), read_commit(dataset.store.read(index_path(0)))
    planned = planned_samples(dataset.store, 0, samples_per_shard=4)
    one = np.array([1, 0, 0, 0])
    changed = {
        "labels": replace(rows, labels=[[7], *rows.labels[1:]]),
        "format": replace(rows, ext=["gif", *rows.ext[1:]]),
        "height and width": replace(rows, height=rows.height + one),
        "orientation": replace(rows, orientation=rows.orientation + one),
        "size": replace(rows, size=rows.size + one),
        "crc32": replace(rows, crc32=rows.crc32 ^ one.astype(np.uint32)),
    }
    for name, found in changed.items():
        (what,) = check_planned(found, NO_WEIGHTS, commit, planned, resize=AS_IT_IS)
        assert f"has {name} " in what
        assert rows.source[0] in what
    weights = [[9.0], *NO_WEIGHTS[1:]]
    assert [" has weights " in what for what in check_planned(rows, weights, commit, planned, resize=AS_IT_IS)] == [
        True
    ]


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
def test_a_copy_follows_from_the_plan(dataset: Dataset, change: dict[str, object], what: str) -> None:
    rows, commit = dataset.shard_rows(0), read_commit(dataset.store.read(index_path(0)))
    planned = [
        replace(item, height=24, width=36, orientation=6)
        for item in planned_samples(dataset.store, 0, samples_per_shard=4)
    ]
    copies = replace(
        rows,
        ext=["jpg"] * 4,
        height=np.full(4, 8, np.int32),
        width=np.full(4, 12, np.int32),
        orientation=np.ones(4, np.int8),
    )
    for name, value in change.items():
        column = list(getattr(copies, name))
        column[0] = value
        changed: dict[str, Any] = {name: column}
        copies = replace(copies, **changed)
    found = list(check_planned(copies, NO_WEIGHTS, commit, planned, resize=Resize(short_side=8)))
    assert len(found) == bool(what)
    assert all(what in item for item in found)
