"""Packing's summary: counts, the first three refused images with their reasons, and the place of the list."""

from pathlib import Path

import pyarrow as pa
import pytest

from shards.index import QUARANTINE_SCHEMA, table_bytes
from shards.manifest import FORMAT_VERSION, QUARANTINE_PATH, Manifest, ShardRecord
from shards.packing.summary import packed_words
from shards.store import open_store


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
            ["evaluation", *["refused"] * 1500],
            [
                "left out: 1,500 refused, 1 of evaluation sets",
                *(f"  a/{n}.jpg: why {n}" for n in (1, 2, 3)),
                "  and 1,497 more",
            ],
            id="the first three reasons",
        ),
    ],
)
def test_what_is_left_out(tmp_path: Path, kinds: list[str], said: list[str]) -> None:
    store = open_store(str(tmp_path))
    rows = [row(position, kind, f"a/{position}.jpg") for position, kind in enumerate(kinds)]
    store.write(QUARANTINE_PATH, table_bytes(pa.Table.from_pylist(rows, schema=QUARANTINE_SCHEMA)))
    lines = packed_words(store, manifest(num_quarantined=len(kinds)), seconds=1.25).split("\n")
    assert lines[0] == f"{tmp_path}: 1,438 images of 10 classes in 2 shards, 4.4 MB, in 1.2 s"
    assert lines[1:] == [*said, f"the list: {tmp_path}/quarantine.parquet"][: len(said) + bool(said)]


def test_names_cannot_move_the_cursor(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    table = pa.Table.from_pylist([row(0, "refused", "a\x1b[2J\nb.jpg")], schema=QUARANTINE_SCHEMA)
    store.write(QUARANTINE_PATH, table_bytes(table))
    assert "  a\\x1b[2J\\nb.jpg: why 0\n" in packed_words(store, manifest(num_quarantined=1), seconds=0)
