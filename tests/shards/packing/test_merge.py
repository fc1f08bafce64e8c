"""The end of packing: manifest, tables and the summary with its counts, classes and reasons."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shards.dataset import open_dataset
from shards.errors import UserError
from shards.index import LABELS_SCHEMA, QUARANTINE_SCHEMA
from shards.manifest import FORMAT_VERSION, LABELS_PATH, QUARANTINE_PATH, Manifest, ShardRecord, index_path
from shards.packing.merge import (
    blocks_of_shard,
    class_warnings,
    class_words,
    is_refused,
    merge,
    packed_words,
    refuse_quarantine,
)
from shards.packing.plan import Plan, read_plan
from shards.sources.kinds import FolderSource
from shards.store import Store, open_store
from shards.tables import table_bytes
from tests.rigs.datasets import packed_folders
from tests.rigs.packing import pack_spec
from tests.rigs.tables import read_table


@pytest.mark.parametrize(
    ("num_samples", "samples_per_block", "expected"),
    [
        (0, 2, []),
        (1, 2, [(0, 0, 9999, 1)]),
        (5, 2, [(0, 0, 4096, 2), (2, 4096, 8192, 2), (4, 8192, 9999, 1)]),
        (4, 2, [(0, 0, 4096, 2), (2, 4096, 9999, 2)]),
    ],
)
def test_blocks_run_from_header_to_header(
    num_samples: int, samples_per_block: int, expected: list[tuple[int, int, int, int]]
) -> None:
    offsets = np.arange(num_samples, dtype=np.int64) * 2048 + 512
    assert list(blocks_of_shard(offsets, data_end=9999, samples_per_block=samples_per_block)) == expected


def test_the_block_table_covers_every_sample_and_byte_once(tmp_path: Path) -> None:
    dataset = open_dataset(str(packed_folders(tmp_path)))
    blocks = dataset.blocks
    assert blocks.num_samples.tolist() == [3, 1, 3, 1, 3, 1, 3]  # shards of 4, 4, 4 and 3 samples
    assert blocks.first_sample_id.tolist() == [0, 3, 4, 7, 8, 11, 12]
    for shard in range(4):
        mine = np.flatnonzero(blocks.shard == shard)
        assert blocks.first_byte[mine[0]] == 0
        assert blocks.end_byte[mine[:-1]].tolist() == blocks.first_byte[mine[1:]].tolist()
        end = int(blocks.end_byte[mine[-1]])
        tar = dataset.store.read(dataset.shard_path(shard))
        assert tar[end:] == bytes(1024)


def test_labels_have_their_names_and_counts(tmp_path: Path) -> None:
    store = open_dataset(str(packed_folders(tmp_path))).store
    assert read_table(store.read(LABELS_PATH)).to_pylist() == [
        {"label": label, "name": f"c{label}", "num_samples": 5} for label in range(3)
    ]
    assert read_table(store.read(QUARANTINE_PATH)).num_rows == 0


def test_a_missing_shard_stops_the_merge(tmp_path: Path) -> None:
    store = open_dataset(str(packed_folders(tmp_path))).store
    source = FolderSource(root=str(tmp_path / "images"))
    spec = pack_spec(source, samples_per_block=3, seed=0)
    plan = read_plan(store, spec)
    assert plan is not None
    store.delete(index_path(2))
    with pytest.raises(UserError, match=r"shard 2 of .* is not packed.*--phase shards"):
        merge(store, spec, plan, max_quarantined=0.0)


def test_the_share_that_a_refusal_prints_is_allowed() -> None:
    none: dict[str, Any] = {field.name: {} for field in fields(Plan)}
    plan = Plan(**none | {field.name: 0 for field in fields(Plan) if field.name.startswith("num_")})
    assert not is_refused(plan, max_quarantined=0.0)
    for total in (*range(1, 101), 300):
        for count in range(1, total + 1):
            refused = replace(plan, num_samples=total - count, num_quarantined=count, num_refused=count)
            with pytest.raises(UserError) as refusal:
                refuse_quarantine(refused, max_quarantined=0.0, url="u")
            assert not is_refused(refused, max_quarantined=float(refusal.value.flags[1])), (count, total)


def manifest(*, num_quarantined: int, num_shards: int = 2) -> Manifest:
    shards = tuple(
        ShardRecord(path=f"{n}.tar", first_sample_id=0, num_samples=719, sha256="", num_bytes=2_200_000)
        for n in range(num_shards)
    )
    return Manifest(
        format_version=FORMAT_VERSION,
        plan_hash="",
        split="train",
        num_samples=719 * num_shards,
        num_classes=10,
        num_quarantined=num_quarantined,
        samples_per_block=64,
        shards=shards,
        files={},
    )


def write_labels(store: Store, classes: list[tuple[str, int]]) -> None:
    rows = [{"label": number, "name": name, "num_samples": num} for number, (name, num) in enumerate(classes)]
    store.write(LABELS_PATH, table_bytes(pa.Table.from_pylist(rows, schema=LABELS_SCHEMA)))


def row(position: int, kind: str, source: str) -> dict[str, object]:
    fields = {"position": position, "source": source, "phase": "scan", "kind": kind, "reason": f"why {position}"}
    return fields | {"match": "", "distance": 0}


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        pytest.param([], [], id="nothing is left out"),
        pytest.param(["duplicate"], ["left out: 1 duplicate"], id="copies need no reasons"),
        pytest.param(
            ["refused", "duplicate", "duplicate", "refused"],
            ["left out: 2 refused, 2 duplicates", "  a/0.jpg: why 0", "  a/3.jpg: why 3"],
            id="all reasons",
        ),
        pytest.param(
            ["evaluation", "unlabeled", *["refused"] * 1500],
            [
                "left out: 1,500 refused, 1 without a label (--unlabeled keep packs them), 1 of evaluation sets",
                *(f"  a/{n}.jpg: why {n}" for n in range(2, 22)),
                "  and 1,480 more",
            ],
            id="the first twenty reasons",
        ),
    ],
)
def test_what_is_left_out(tmp_path: Path, kinds: list[str], said: list[str]) -> None:
    store = open_store(str(tmp_path))
    rows = [row(position, kind, f"a/{position}.jpg") for position, kind in enumerate(kinds)]
    store.write(QUARANTINE_PATH, table_bytes(pa.Table.from_pylist(rows, schema=QUARANTINE_SCHEMA)))
    write_labels(store, [("cat", 1438), ("dog", 0)])
    lines = packed_words(store, manifest(num_quarantined=len(kinds)), seconds=1.25).split("\n")
    assert lines[0] == f"{tmp_path}: 1,438 images of 10 classes in 2 shards, 4.4 MB, in 1.2 s"
    list_words = f"the list: {tmp_path}/quarantine.csv, and for programs quarantine.parquet"
    assert lines[1:] == ["without any image: 1 class (dog)", *said, *([list_words] if said else [])]


@pytest.mark.parametrize(
    ("names", "warnings"),
    [
        pytest.param(["cat", "dog"], [], id="two classes"),
        pytest.param(["IMG"], ["there is only one class, 'IMG', so there is nothing to tell it from"], id="one"),
        pytest.param(["Cat", "cat", "dog"], ["the classes 'Cat', 'cat' differ only in case"], id="case"),
        pytest.param(["a b", "a  b"], ["the classes 'a b', 'a  b' differ only in case, spaces"], id="spaces"),
        pytest.param(["\ufb01sh", "fish"], ["the classes '\ufb01sh', 'fish' differ only"], id="a ligature"),
        pytest.param(["stra\u00dfe", "strasse"], ["the classes"], id="two spellings of one letter"),
        pytest.param(["cat\t", "cat"], [r"the classes 'cat\t', 'cat' differ"], id="a tab"),
        pytest.param([f"{n}{c}" for n in range(9) for c in "aA"], ["the classes"] * 5 + ["4 more groups"], id="many"),
    ],
)
def test_classes_that_are_probably_wrong(names: list[str], warnings: list[str]) -> None:
    found = list(class_warnings(names))
    assert len(found) == len(warnings)
    assert all(one.startswith(start) for one, start in zip(found, warnings, strict=True)), found


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (2, "2 classes (c0, c1)"),
        (12, f"12 classes ({', '.join(f'c{n}' for n in range(12))})"),
        (13, "13 classes (c0, c1, c2, c3, c4, ..., c8, c9, c10, c11, c12)"),
    ],
)
def test_how_classes_are_named(number: int, said: str) -> None:
    assert class_words([f"c{n}" for n in range(number)]) == said


def test_names_cannot_move_the_cursor(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    table = pa.Table.from_pylist([row(0, "refused", "a\x1b[2J\nb.jpg")], schema=QUARANTINE_SCHEMA)
    store.write(QUARANTINE_PATH, table_bytes(table))
    write_labels(store, [("cat", 1)])
    assert "  a\\x1b[2J\\nb.jpg: why 0\n" in packed_words(store, manifest(num_quarantined=1), seconds=0)
