"""Packing's summary: counts, classes, the first refused images with their reasons, and the place of the list."""

from pathlib import Path

import pyarrow as pa
import pytest

from shards.index import LABELS_SCHEMA, QUARANTINE_SCHEMA, table_bytes
from shards.manifest import FORMAT_VERSION, LABELS_PATH, QUARANTINE_PATH, Manifest, ShardRecord
from shards.packing.merge import class_warnings, class_words, packed_words
from shards.store import Store, open_store


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
