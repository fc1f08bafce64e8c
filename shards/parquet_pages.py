"""What a Parquet file declares, read by ourselves: its footer, and the headers of its pages.

Arrow would allocate what a page declares, whatever its column does, and ends the process with some damaged footers when
their columns are looked at. The format: parquet.thrift of apache/parquet-format, in Thrift's compact protocol.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shards.config_values import shown_value

FOOTER_END_BYTES = 8  # the footer's length and the magic word
MOST_FOOTER_BYTES = 1 << 28
_TAIL_BYTES = 64 << 10  # read at once; most footers are shorter
_MAGIC = b"PAR1"
_MOST_DEPTH = 12
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_SIMPLE = (0, 2, 3, 8)  # PLAIN, PLAIN_DICTIONARY, RLE, RLE_DICTIONARY: no value repeats parts of the one before
_HEADERS = {_DATA: (5, 2), _DATA_V2: (8, 4)}  # the field with a data page's own header, and the encoding's field in it
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _STRUCT = 1, 2, 3, 7, 8, 9, 12
Fields = dict[int, Any]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A column's part of a row group; `column` is the name of the whole column, without those of lists in it.
    `first_data`: where its data begin, behind its dictionary if it has one."""

    column: str
    num_values: int
    num_bytes: int
    begin: int
    first_data: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Group:
    """A row group."""

    num_rows: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True)
class _Page:
    kind: int
    num_values: int
    num_bytes: int
    encoding: int
    end: int


def read_footer(file: Any, *, num_bytes: int) -> bytes:
    """The footer of an open file of `num_bytes`, with the FOOTER_END_BYTES behind it. ValueError if it has none, or one
    that is too large."""
    tail = _tail(file, min(num_bytes, _TAIL_BYTES), num_bytes=num_bytes)
    size = footer_bytes(tail[-FOOTER_END_BYTES:])
    most = min(num_bytes, MOST_FOOTER_BYTES)
    if size + FOOTER_END_BYTES > most:
        raise ValueError(f"its footer has {size} bytes; allowed: 0 to {most - FOOTER_END_BYTES:,}")
    size += FOOTER_END_BYTES
    return tail[-size:] if size <= len(tail) else _tail(file, size, num_bytes=num_bytes)


def footer_bytes(end: bytes) -> int:
    """Bytes of a file's footer, from the file's last FOOTER_END_BYTES. ValueError if it is no Parquet file."""
    if len(end) < FOOTER_END_BYTES or end[-4:] != _MAGIC:
        raise ValueError("not a sound Parquet file: its end is not that of one")
    return int.from_bytes(end[-8:-4], "little")


def read_groups(footer: bytes) -> tuple[int, tuple[Group, ...]]:
    """The rows that a footer declares, and its row groups. ValueError if it is damaged."""
    try:
        fields, _ = _struct(footer, 0, depth=0)
        groups = tuple(
            Group(num_rows=int(group[3]), chunks=tuple(_chunk(column[3]) for column in group[1])) for group in fields[4]
        )
        return int(fields[3]), groups
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"not a sound Parquet file: its footer is damaged ({error})") from error


def refuse_pages(data: bytes, groups: Sequence[Group], columns: Sequence[str]) -> None:
    """ValueError if a page of these columns is not within the column's part of the file, or declares more than it."""
    for chunk in (chunk for group in groups for chunk in group.chunks if chunk.column in columns):
        try:
            _refuse_chunk(data, chunk)
        except (LookupError, TypeError) as error:
            raise ValueError(f"column {shown_value(chunk.column)}: a page header is damaged ({error})") from error
        except ValueError as error:
            raise ValueError(f"column {shown_value(chunk.column)}: {error}") from error


def _tail(file: Any, count: int, *, num_bytes: int) -> bytes:
    file.seek(num_bytes - count)
    data = bytes(file.read(count))
    if len(data) < count:
        raise EOFError(f"it ends {count - len(data)} bytes early")
    return data


def _chunk(fields: Fields) -> Chunk:
    data_begin, dictionary_begin = fields[9], fields.get(11, 0)
    begin = dictionary_begin if 0 < dictionary_begin < data_begin else data_begin
    return Chunk(
        column=fields[3][0].decode(),
        num_values=int(fields[5]),
        num_bytes=int(fields[6]),
        begin=int(begin),
        first_data=int(data_begin),
        end=int(begin + fields[7]),
    )


def _refuse_chunk(data: bytes, chunk: Chunk) -> None:
    at, end = chunk.begin, chunk.end
    if chunk.num_values == 0:  # it has no pages
        return
    if not 0 < at <= end <= len(data):
        raise ValueError(f"its pages are said to be at bytes {at} to {end} of {len(data)}")
    num_values = num_bytes = 0
    while num_values < chunk.num_values and at < end:
        page = _page(data, at)
        num_bytes += page.num_bytes
        num_values += page.num_values if page.kind != _DICTIONARY else 0
        at = page.end
        if at > end or num_bytes > chunk.num_bytes or num_values > chunk.num_values:
            raise ValueError("a page declares more bytes or values than the column")
        if page.encoding not in _SIMPLE or page.num_values > max(chunk.num_values, page.num_bytes):
            raise ValueError(f"a page of {page.num_values} values has encoding {page.encoding}; allowed: {_SIMPLE}")


def _page(data: bytes, at: int) -> _Page:
    fields, after = _struct(data, at, depth=0)
    kind, num_bytes, stored_bytes = fields[1], fields[2], fields[3]
    header, encoding = _HEADERS[kind] if kind != _DICTIONARY else (7, 2)
    num_values = fields[header][1]
    if min(num_bytes, stored_bytes, num_values) < 0:
        raise ValueError("a page header has a negative number")
    return _Page(
        kind=kind,
        num_values=num_values,
        num_bytes=num_bytes,
        encoding=fields[header][encoding],
        end=after + stored_bytes,
    )


def _struct(data: bytes, at: int, *, depth: int) -> tuple[Fields, int]:
    """A Thrift struct by field numbers, and where it ends. IndexError if the data ends first."""
    if depth > _MOST_DEPTH:
        raise ValueError("it is nested too deep")
    fields: Fields = {}
    number = 0
    while byte := data[at]:
        at += 1
        if byte >> 4:
            number += byte >> 4
        else:
            number, at = _integer(data, at)
        kind = byte & 15
        if _BYTE < kind < _DOUBLE and data[at] < 0x80:  # most values are such: a whole number in one byte
            fields[number] = (data[at] >> 1) ^ -(data[at] & 1)
            at += 1
        elif kind in (_TRUE, _FALSE):
            fields[number] = kind == _TRUE
        else:
            fields[number], at = _value(data, at, kind, depth=depth)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, *, depth: int) -> tuple[Any, int]:
    if _BYTE < kind < _DOUBLE:  # whole numbers of 16, 32 and 64 bits
        return _integer(data, at)
    if kind == _BINARY:
        length, at = _varint(data, at)
        if length > len(data) - at:
            raise ValueError("it is cut off")
        return data[at : at + length], at + length
    if kind == _STRUCT:
        return _struct(data, at, depth=depth + 1)
    if kind == _LIST:
        return _list(data, at, depth=depth + 1)
    if kind in (_TRUE, _FALSE, _BYTE, _DOUBLE):
        return None, at + (8 if kind == _DOUBLE else 1)
    raise ValueError(f"it has a value of kind {kind}")


def _list(data: bytes, at: int, *, depth: int) -> tuple[list[Any], int]:
    length, kind = data[at] >> 4, data[at] & 15
    at += 1
    if length == 15:
        length, at = _varint(data, at)
    if length > len(data) - at or depth > _MOST_DEPTH:
        raise ValueError("a list is cut off")
    found = []
    for _ in range(length):
        item, at = _value(data, at, kind, depth=depth)
        found.append(item)
    return found, at


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if shift > 63:
            raise ValueError("a number has no end")
    return value | byte << shift, at + 1
