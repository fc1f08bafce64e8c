"""Index files: rows as arrays, the commit record in the footer; reasons without the details of one image."""

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shards.index import (
    INDEX_SCHEMA,
    IndexRow,
    LeftOut,
    ShardCommit,
    general_reasons,
    index_bytes,
    read_commit,
    read_rows,
    read_sample_rows,
    read_sources,
)
from shards.tables import table_bytes

ROWS = [
    IndexRow(
        key=f"{row:010d}",
        offset=512 + 4096 * row,
        size=100 + row,
        ext="jpg",
        height=20,
        width=30 + row,
        labels=labels,
        crc32=2**32 - 1 - row,
        source=f"ü/{row}.jpg",
    )
    for row, labels in enumerate([(4,), (2, 7), ()])
]
COMMIT = ShardCommit(
    tar_sha256="ab" * 32,
    tar_bytes=9000,
    data_end=8000,
    plan_hash="cd" * 32,
    left_out=(LeftOut(position=3, source="x.jpg", reason="unreadable"),),
)


def test_rows_and_commit_come_back() -> None:
    data = index_bytes(7, ROWS, COMMIT)
    assert read_commit(data) == COMMIT
    assert read_rows(data) == ROWS
    weighted = [replace(row, weights=(0.5,) * len(row.labels), orientation=8) for row in ROWS]
    assert read_rows(index_bytes(7, weighted, COMMIT)) == weighted


def test_what_reading_needs_comes_back() -> None:
    data = index_bytes(7, ROWS, COMMIT)
    rows = read_sample_rows(data)
    for name in ("offset", "size", "height", "width", "orientation", "crc32"):
        assert getattr(rows, name).tolist() == [getattr(row, name) for row in ROWS]
    assert [rows.labels_of(row) for row in range(3)] == [(4,), (2, 7), ()]
    assert rows.num_bytes == 3 * (8 + 8 + 4 + 4 + 1 + 4) + 4 * 8 + 3 * 4
    assert read_sources(data) == ["ü/0.jpg", "ü/1.jpg", "ü/2.jpg"]


def test_rows_without_labels_have_none() -> None:
    """As in tables made by others: an empty list or null."""
    table = pq.read_table(pa.BufferReader(index_bytes(7, ROWS, COMMIT)))
    column = table.schema.get_field_index("labels")
    data = table_bytes(table.set_column(column, "labels", pa.array([None, [3], None], pa.list_(pa.int32()))))
    rows = read_sample_rows(data)
    assert [rows.labels_of(row) for row in range(3)] == [(), (3,), ()]
    assert [row.labels for row in read_rows(data)] == [(), (3,), ()]


def test_the_columns_are_the_contract() -> None:
    table = pq.read_table(pa.BufferReader(index_bytes(7, ROWS, COMMIT)))
    assert table.schema.remove_metadata() == INDEX_SCHEMA
    assert table.column("shard").to_pylist() == [7, 7, 7]
    assert table.column("row").to_pylist() == [0, 1, 2]


def test_equal_rows_give_equal_bytes() -> None:
    assert index_bytes(7, ROWS, COMMIT) == index_bytes(7, ROWS, COMMIT)


def test_an_empty_shard_has_an_index_too() -> None:
    assert read_rows(index_bytes(0, [], COMMIT)) == []
    few = read_sample_rows(index_bytes(0, [], COMMIT))
    assert (few.offset.size, few.label_ends.tolist(), few.label_values.size) == (0, [0], 0)


def test_weights_come_back_beside_their_labels() -> None:
    weighted = [replace(row, weights=weights) for row, weights in zip(ROWS, [(), (0.5, 0.0), ()], strict=True)]
    rows = read_sample_rows(index_bytes(7, weighted, COMMIT))
    assert [rows.weights_of(row) for row in range(3)] == [(), (0.5, 0.0), ()]
    assert [rows.slice(1, 3).weights_of(row) for row in range(2)] == [(0.5, 0.0), ()]
    plain = read_sample_rows(index_bytes(7, ROWS, COMMIT))
    assert [plain.weights_of(row) for row in range(3)] == [(), (), ()]
    assert plain.slice(0, 2).weights_of(1) == ()


@pytest.mark.parametrize(
    ("reason", "general"),
    [
        (None, ""),
        ("empty file", "empty file"),
        ("too large: 7 bytes, allowed: 5", "too large"),
        ("unknown label 'a: b'", "unknown label …"),
        ('unknown label "it\'s"', "unknown label …"),
        (r"unknown label 'it\'s \"'", "unknown label …"),
        ("'../x' is not a path below the source's root: no '..'", "… is not a path below the source's root"),
        ("some list.csv row 12: a label with a weight appears twice", "a label with a weight appears twice"),
        ("x.parquet row 3: the weight '1: 2': allowed: numbers", "the weight …"),
        ("bob's list.tsv.gz row 3: no label", "no label"),
        ("a quote 'that never ends: so", "a quote 'that never ends"),
        ("damaged\nfile: a\nb", "damaged\nfile"),
    ],
)
def test_the_general_part(reason: str | None, general: str) -> None:
    assert general_reasons(pa.chunked_array([[reason]], pa.string())).to_pylist() == [general]
