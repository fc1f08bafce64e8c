"""Index files: rows as arrays, the commit record in the footer."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shards.index import (
    INDEX_SCHEMA,
    IndexRow,
    LeftOut,
    ShardCommit,
    index_bytes,
    read_commit,
    read_rows,
    table_bytes,
)

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
    rows = read_rows(data)
    assert rows.offset.tolist() == [512, 4608, 8704]
    assert rows.crc32.tolist() == [2**32 - 1, 2**32 - 2, 2**32 - 3]
    assert rows.label.tolist() == [4, 2, -1]
    assert rows.labels == [[4], [2, 7], []]
    assert rows.source == ["ü/0.jpg", "ü/1.jpg", "ü/2.jpg"]


def test_the_columns_are_the_contract() -> None:
    table = pq.read_table(pa.BufferReader(index_bytes(7, ROWS, COMMIT)))
    assert table.schema.remove_metadata() == INDEX_SCHEMA
    assert table.column("shard").to_pylist() == [7, 7, 7]
    assert table.column("row").to_pylist() == [0, 1, 2]


def test_equal_rows_give_equal_bytes() -> None:
    assert index_bytes(7, ROWS, COMMIT) == index_bytes(7, ROWS, COMMIT)


def test_an_empty_shard_has_an_index_too() -> None:
    rows = read_rows(index_bytes(0, [], COMMIT))
    assert rows.offset.size == 0
    assert rows.labels == []


@pytest.mark.parametrize("data", [b"", b"no parquet", table_bytes(pa.table({"a": [1]}))])
def test_other_files_are_no_index(data: bytes) -> None:
    with pytest.raises(ValueError, match="not an index file"):
        read_commit(data)
