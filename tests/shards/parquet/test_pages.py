"""Page headers are structs of Thrift's compact protocol; damage and lies are refused before Arrow sees them."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shards.parquet.pages import Chunk, Group, footer_bytes, read_groups, refuse_pages
from shards.parquet.thrift import Want, read_struct
from shards.tables import table_bytes

# The integers 1000 and 1023 in Thrift's compact protocol, as a field that follows the one before it.
_THOUSAND, _MORE = b"\x15\xd0\x0f", b"\x15\xfe\x0f"


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


@pytest.mark.parametrize("end", [b"", b"PAR1", b"\x00" * 8])
def test_the_end_of_no_parquet_file(end: bytes) -> None:
    with pytest.raises(ValueError, match="not a sound Parquet file: its end"):
        footer_bytes(end)


@pytest.mark.parametrize(
    "footer", [b"", b"\x00", b"\x19\xfc\xff\xff\xff\x7f", b"\x1c" * 100, b"\xff" * 50, b"\x15" + b"\xff" * 20]
)
def test_footers_that_are_none(footer: bytes) -> None:
    with pytest.raises(ValueError, match="its footer is damaged"):
        read_groups(footer)


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


def test_pages_outside_the_file_are_refused() -> None:
    data = made()
    with pytest.raises(ValueError, match="its pages are said to be at bytes 4 to"):
        refuse_pages(data[:100], groups_of(data), ["a"])


def test_an_encoding_that_repeats_parts_of_values_is_refused() -> None:
    """A megabyte once, and a million times `the same as before` in a byte each."""
    sink = pa.BufferOutputStream()
    table = pa.table({"a": ["x" * 1000] * 1000})
    pq.write_table(table, sink, use_dictionary=False, column_encoding={"a": "DELTA_BYTE_ARRAY"})
    data = sink.getvalue().to_pybytes()
    with pytest.raises(ValueError, match="has encoding 7"):
        refuse_pages(data, groups_of(data), ["a"])


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


@pytest.mark.parametrize("data", [b"\x1c" * 100, b"\x19" * 100, b"\x1f", b"\x15" + b"\xff" * 20])
def test_what_is_no_struct(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"nested|kind|no end"):
        read_struct(data, 0, {})
