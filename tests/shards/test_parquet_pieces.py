"""Footers and page headers are read by ourselves; damage and lies are refused before Arrow sees them."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shards.parquet_pieces import (
    Chunk,
    Group,
    ParquetPieces,
    Want,
    footer_bytes,
    read_groups,
    read_struct,
    refuse_pages,
)
from shards.sources.parquets import ParquetSource
from shards.sources.tables import read_rows
from shards.tables import table_bytes

IMAGES = [random.Random(number).randbytes(3000) for number in range(200)]
TABLE = pa.table(
    {
        "image": [{"bytes": data, "path": f"{number}.jpg"} for number, data in enumerate(IMAGES)],
        "label": [[number % 3, number % 7] for number in range(200)],
        "path": [f"a/{number}.jpg" for number in range(200)],
        "more": [[{"x": 1.5, "y": ["text"]}] * 3 for _ in range(200)],
    }
)
DELTA = {"path": "DELTA_BYTE_ARRAY", "image.bytes": "DELTA_LENGTH_BYTE_ARRAY"}
OPTIONS: dict[str, dict[str, object]] = {
    **{name: {"compression": name} for name in ("none", "snappy", "gzip", "brotli", "zstd", "lz4")},
    "version 1": {"version": "1.0", "store_schema": False},
    "data page 2": {"data_page_version": "2.0"},
    "no dictionary": {"use_dictionary": False},
    "small pages": {"data_page_size": 200, "write_batch_size": 3},
    "checksums": {"write_page_checksum": True, "data_page_version": "2.0", "compression": "zstd"},
    "page index": {"write_page_index": True, "row_group_size": 30},
    "no statistics": {"write_statistics": False},
    "delta": {
        "use_dictionary": False,
        "column_encoding": DELTA,
    },
    "one row a batch": {"write_batch_size": 1, "use_dictionary": False, "row_group_size": 7},
}
# The integers 1000 and 1023 in Thrift's compact protocol, as a field that follows the one before it.
_THOUSAND, _MORE = b"\x15\xd0\x0f", b"\x15\xfe\x0f"


@pytest.mark.parametrize("name", OPTIONS)
def test_files_of_other_writers_pass(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(TABLE, path, **OPTIONS[name])
    source = ParquetSource(files=(str(path),), label_names=tuple("abcdefg"))
    assert [image for _, image in source.images(list(source.entries()), max_bytes=1 << 20)] == IMAGES
    rows = [values for _, values in read_rows(str(path), {"path-column": "path", "label-column": "label"})]
    assert rows == list(zip(TABLE["path"].to_pylist(), TABLE["label"].to_pylist(), strict=True))


def test_large_types_pass(tmp_path: Path) -> None:
    kind = pa.struct([("bytes", pa.large_binary()), ("path", pa.large_string())])
    table = TABLE.set_column(0, "image", TABLE["image"].cast(kind)).set_column(
        2, "path", TABLE["path"].cast("large_string")
    )
    pq.write_table(table, tmp_path / "a.parquet")
    source = ParquetSource(files=(str(tmp_path / "a.parquet"),), label_names=tuple("abcdefg"))
    assert [image for _, image in source.images(list(source.entries()), max_bytes=1 << 20)] == IMAGES
    assert sum(1 for _ in read_rows(str(tmp_path / "a.parquet"), {"path-column": "path"})) == 200


def pieces(data: bytes, buffer_size: int = 0) -> ParquetPieces:
    return ParquetPieces(pa.BufferReader(data), ours=False, buffer_size=buffer_size)


def file_of(table: pa.Table, **options: object) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


@pytest.mark.parametrize("buffer_size", [0, 64, 1 << 20])
def test_a_page_that_declares_two_gigabytes_is_refused(buffer_size: int) -> None:
    data = file_of(pa.table({"a": list(range(1000))}), use_dictionary=False, compression="zstd")
    at = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(0).column(0).data_page_offset
    assert data[at : at + 3] == b"\x15\x00\x15"
    end = next(place for place in range(at + 3, at + 9) if data[place] < 0x80) + 1
    size, chunk = b"\xfe\xff\xff\xff\x0f", read_groups(data[-footer_bytes(data[-8:]) - 8 :])[1][0].chunks[0]
    cut = chunk.end - len(size) + end - at - 3  # so that the file keeps its length
    changed = data[: at + 3] + size + data[end:cut] + data[chunk.end :]
    with pieces(data, buffer_size) as whole:
        assert whole.read(["a"], rows=100).to_pydict() == {"a": list(range(1000))}
    with pieces(changed, buffer_size) as opened, pytest.raises(ValueError, match="column 'a': a page declares more"):
        opened.read(["a"], rows=100)


def test_a_dictionary_is_not_repeated_beyond_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.parquet_pieces.MOST_BATCH_BYTES", 1 << 20)
    data = file_of(pa.table({"a": ["x" * 100_000] * 1000}))
    with pieces(data) as opened:
        assert next(opened.batches(["a"], rows=500)).num_rows <= 10
        with pytest.raises(ValueError, match="it has more than 1,048,576 bytes"):
            opened.read(["a"], rows=500)


def groups_of(data: bytes) -> tuple[Group, ...]:
    return read_groups(data[-footer_bytes(data[-8:]) - 8 :])[1]


def made() -> bytes:
    return table_bytes(pa.table({"a": list(range(1000)), "b": [[7]] * 1000, "c": ["x", "y"] * 500}))


def test_the_footer_says_what_arrow_reads_in_it() -> None:
    for data in (made(), table_bytes(pa.table({"a": list(range(1000))}), row_group_size=10)):
        metadata = pq.ParquetFile(pa.BufferReader(data)).metadata
        groups = groups_of(data)
        assert len(groups) == metadata.num_row_groups
        for number, group in enumerate(groups):
            theirs = metadata.row_group(number)
            assert group.num_rows == theirs.num_rows
            for place, chunk in enumerate(group.chunks):
                column = theirs.column(place)
                assert chunk == Chunk(
                    column=column.path_in_schema.partition(".")[0],
                    num_values=column.num_values,
                    num_bytes=column.total_uncompressed_size,
                    begin=column.dictionary_page_offset or column.data_page_offset,
                    end=(column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size,
                )


def test_honest_pages_pass() -> None:
    for data in (made(), table_bytes(pa.table({"a": list(range(1000))}), row_group_size=10)):
        refuse_pages(data, groups_of(data), ["a", "b", "c"])


@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_page_with_more_values_than_its_column_is_refused(column: int) -> None:
    data = made()
    at = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(0).column(column).data_page_offset
    assert _THOUSAND in data[at : at + 40]
    changed = data[:at] + data[at:].replace(_THOUSAND, _MORE, 1)
    with pytest.raises(ValueError, match="declares more bytes or values than the column"):
        refuse_pages(changed, groups_of(changed), ["a", "b", "c"])
    refuse_pages(changed, groups_of(changed), ["none of them"])


@pytest.mark.parametrize("length", [1, 2, 3, 5, 10, 20])
def test_what_is_no_header_is_refused(length: int) -> None:
    data = made()
    at = groups_of(data)[0].chunks[0].begin
    for byte in (b"\x00", b"\xff", b"\x1c", b"\x19"):
        changed = data[:at] + byte * length + data[at + length :]
        with pytest.raises(ValueError, match="column 'a'"):
            refuse_pages(changed, groups_of(data), ["a"])


def test_wanted_fields_are_kept() -> None:
    # 1: 2, 2: "ab", 3: {1: 3}, 4: [1, 2], 5: true
    data = b"\x15\x04\x18\x02ab\x1c\x15\x06\x00\x19\x25\x02\x04\x11\x00rest"
    wanted = {1: Want(), 2: Want(), 3: Want({1: Want()}), 4: Want(), 5: Want()}
    assert read_struct(data, 0, wanted) == ({1: 2, 2: b"ab", 3: {1: 3}, 4: [1, 2], 5: True}, len(data) - 4)
    assert read_struct(data, 0, {2: Want()}) == ({2: b"ab"}, len(data) - 4)
    assert read_struct(data, 0, {3: Want({1: Want()}, made=lambda fields: fields[1] + 1)})[0] == {3: 4}


@pytest.mark.parametrize("data", [b"", b"\x15", b"\x18\x05ab", b"\x19\xf5\xff\xff\x03", b"\x15\x80"])
def test_a_struct_that_ends_too_early(data: bytes) -> None:
    with pytest.raises(IndexError):
        read_struct(data, 0, {})
