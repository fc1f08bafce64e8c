"""Reads a Parquet file in pieces with Arrow, after checking what the file declares.

Arrow allocates as much memory as a page declares, even if its column declares less, and crashes the process on some
damaged footers. So the footer is read here first, and the header of each page is checked while its bytes are passed to
Arrow. The format is that of parquet.thrift in apache/parquet-format, in Thrift's compact protocol.
"""

import io
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from shards.config_values import shown_value

_MOST_DEPTH = 12
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _STRUCT = 1, 2, 3, 7, 8, 9, 12
Fields = dict[int, Any]
Data = bytes | memoryview
# The wanted fields by number: those of a struct, or those of a list's items.
Wanted = Mapping[int, "Want"]
FOOTER_END_BYTES = 8  # the footer's length and the magic bytes
MOST_FOOTER_BYTES = 1 << 25
_MAGIC, _ENCRYPTED_MAGIC = b"PAR1", b"PARE"
_ENCRYPTED = "it is encrypted; give a copy that is not"
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_SIMPLE = (0, 2, 3, 8)  # PLAIN, PLAIN_DICTIONARY, RLE, RLE_DICTIONARY: they never share bytes between values
# For each kind of page: the field of its header, and the field of the encoding in that header.
_HEADERS = {_DATA: (5, 2), _DICTIONARY: (7, 2), _DATA_V2: (8, 4)}
_FREE_PAGE_BYTES = 64 << 20  # always allowed in a foreign file, since writers count bytes differently
_MOST_RATIO = 1024  # the highest compression ratio of a larger page
_MOST_HEADER_BYTES = 16 << 20  # the limit of Arrow
MOST_BATCH_BYTES = 1 << 30  # the largest batch, even if all its values are the longest of a dictionary
_HEADER_BYTES = 4096  # longer than most page headers


class Want:
    """A field to keep. `fields`: the fields to keep of its struct. `made`: a function that converts this struct. All
    other fields are skipped without taking memory."""

    def __init__(self, fields: Wanted | None = None, made: Callable[[Fields], Any] | None = None) -> None:
        self.fields, self.made = fields or {}, made


def read_struct(data: Data, at: int, wanted: Wanted, *, depth: int = 0) -> tuple[Fields, int]:
    """Returns the wanted fields of a struct by their numbers, and the offset at which it ends. Raises IndexError if the
    data ends within the struct, and ValueError for other faults."""
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
        want = wanted.get(number)
        if _BYTE < kind < _DOUBLE and data[at] < 0x80:  # the usual case: a whole number in one byte
            value: Any = (data[at] >> 1) ^ -(data[at] & 1)
            at += 1
        elif kind in (_TRUE, _FALSE):
            value = kind == _TRUE
        else:
            value, at = _value(data, at, kind, want, depth=depth)
        if want is not None:
            fields[number] = value
    return fields, at + 1


def _value(data: Data, at: int, kind: int, want: Want | None, *, depth: int) -> tuple[Any, int]:
    if _BYTE < kind < _DOUBLE:  # whole numbers of 16, 32 and 64 bits
        return _integer(data, at)
    if kind == _BINARY:
        length, at = _varint(data, at)
        if length > len(data) - at:
            raise IndexError("it is cut off")
        return (data[at : at + length] if want else b""), at + length
    if kind == _STRUCT:
        fields, at = read_struct(data, at, want.fields if want else {}, depth=depth + 1)
        return (want.made(fields) if want and want.made else fields), at
    if kind == _LIST:
        return _list(data, at, want, depth=depth + 1)
    if kind in (_TRUE, _FALSE, _BYTE, _DOUBLE):
        return None, at + (8 if kind == _DOUBLE else 1)
    raise ValueError(f"it has a value of kind {kind}")


def _list(data: Data, at: int, want: Want | None, *, depth: int) -> tuple[list[Any], int]:
    length, kind = data[at] >> 4, data[at] & 15
    at += 1
    if length == 15:
        length, at = _varint(data, at)
    if length > len(data) - at:
        raise IndexError("a list is cut off")
    if depth > _MOST_DEPTH:
        raise ValueError("it is nested too deep")
    found = []
    for _ in range(length):
        item, at = _value(data, at, kind, want, depth=depth)
        if want:
            found.append(item)
    return found, at


def _integer(data: Data, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: Data, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if shift > 63:
            raise ValueError("a number has no end")
    return value | byte << shift, at + 1


_PAGE = {1: Want(), 2: Want(), 3: Want()} | {
    header: Want({1: Want(), encoding: Want()}) for header, encoding in _HEADERS.values()
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A column's part of a row group. `column`: the name of the top-level column, without the names of nested
    fields."""

    column: str
    num_values: int
    num_bytes: int
    begin: int
    end: int
    data_begin: int = field(default=0, compare=False)  # the first page after the dictionary
    is_encrypted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A row group of a file."""

    num_rows: int
    chunks: tuple[Chunk, ...]

    def chunks_of(self, columns: Sequence[str]) -> list[Chunk]:
        """Returns the chunks of these columns."""
        return [chunk for chunk in self.chunks if chunk.column in columns]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Page:
    kind: int
    num_values: int
    num_bytes: int
    stored_bytes: int
    encoding: int
    end: int


class PageCheck:
    """Checks the headers of a column's pages while its bytes are read in order. Raises ValueError for the first page
    that declares more than the column, or more than its bytes can contain.

    `ours`: whether Patchline wrote the file, so that its pages have simple encodings and do not exceed what the column
    declares.
    """

    def __init__(self, chunk: Chunk, *, ours: bool) -> None:
        self.chunk, self.ours = chunk, ours
        self.seen = self._next = chunk.begin
        self._num_values = self._num_bytes = 0
        self._kept = b""  # the beginning of a header that is cut off

    def add(self, data: bytes | memoryview) -> None:
        """Checks the next bytes of the column."""
        begin = self.seen - len(self._kept)
        if self._kept:
            data, self._kept = self._kept + bytes(data), b""
        self.seen = begin + len(data)
        try:
            while self._num_values < self.chunk.num_values and self._next < self.seen:
                self._add_page(data, begin)
        except IndexError as error:
            self._kept = bytes(data[self._next - begin :])
            if self.seen >= self.chunk.end or len(self._kept) > _MOST_HEADER_BYTES:
                raise self._fault(f"a page header is damaged ({error})") from error
        except (LookupError, TypeError) as error:
            raise self._fault(f"a page header is damaged ({error})") from error
        except ValueError as error:
            raise self._fault(str(error)) from error

    def repeated_bytes(self, data: bytes) -> int:
        """Returns an upper bound, from the column's first page header, on the bytes of a value that the file stores
        once but may use many times. Returns 0 if a value is stored each time it is used."""
        try:
            page = _page(data, 0)
        except (LookupError, TypeError, ValueError):  # `add` raises the error
            return self.chunk.num_bytes
        return page.num_bytes if page.kind == _DICTIONARY or page.encoding not in _SIMPLE else 0

    def _add_page(self, data: bytes | memoryview, begin: int) -> None:
        page = _page(data, self._next - begin)
        self._next = begin + page.end
        self._num_bytes += page.num_bytes
        self._num_values += page.num_values if page.kind in (_DATA, _DATA_V2) else 0
        most = self.chunk.num_bytes if self.ours else max(self.chunk.num_bytes, _FREE_PAGE_BYTES)
        if self._next > self.chunk.end or self._num_bytes > most or self._num_values > self.chunk.num_values:
            raise ValueError("a page declares more bytes or values than the column")
        if page.num_bytes > max(_FREE_PAGE_BYTES, _MOST_RATIO * page.stored_bytes):
            raise ValueError(f"a page of {page.stored_bytes} bytes declares {page.num_bytes} decompressed ones")
        if page.num_values > max(self.chunk.num_values, page.num_bytes):
            raise ValueError(f"a dictionary of {page.num_bytes} bytes declares {page.num_values} values")
        if self.ours and page.encoding not in _SIMPLE:
            raise ValueError(f"a page of {page.num_values} values has encoding {page.encoding}; allowed: {_SIMPLE}")

    def _fault(self, what: str) -> ValueError:
        return ValueError(f"column {shown_value(self.chunk.column)}: {what}")


def footer_bytes(end: bytes, most: int = MOST_FOOTER_BYTES) -> int:
    """Returns the length of a file's footer, given the last FOOTER_END_BYTES of the file. Raises ValueError if it is
    not a Parquet file, or if the footer has more than `most` bytes."""
    if len(end) >= FOOTER_END_BYTES and end[-4:] == _ENCRYPTED_MAGIC:
        raise ValueError(_ENCRYPTED)
    if len(end) < FOOTER_END_BYTES or end[-4:] != _MAGIC:
        raise ValueError("not a sound Parquet file: its end is not that of one")
    num_bytes, most = int.from_bytes(end[-8:-4], "little"), min(most, MOST_FOOTER_BYTES)
    if num_bytes > most:
        raise ValueError(f"not a sound Parquet file: its footer has {num_bytes} bytes; allowed: 0 to {most:,}")
    return num_bytes


def read_groups(footer: bytes) -> tuple[int, tuple[Group, ...]]:
    """Returns the number of rows that a footer declares, and its row groups. Raises ValueError if it is damaged."""
    try:
        fields, _ = read_struct(footer, 0, _FOOTER)
        if not all(isinstance(group, Group) for group in fields[4]):
            raise TypeError("a row group is none")
        return _whole(fields[3]), tuple(fields[4])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"not a sound Parquet file: its footer is damaged ({error})") from error


def refuse_pages(data: bytes, groups: Sequence[Group], columns: Sequence[str]) -> None:
    """Checks the pages of these columns in a file that Patchline wrote. Raises ValueError if a page is outside its
    column's bytes, or declares more than the column."""
    for group in groups:
        for chunk in group.chunks_of(columns):
            refuse_place(chunk, len(data))
            PageCheck(chunk, ours=True).add(data[chunk.begin : chunk.end])


def refuse_place(chunk: Chunk, num_bytes: int) -> None:
    """Raises ValueError if a column's pages are not within the file's bytes, or cannot be read."""
    refuse_encrypted(chunk)
    if chunk.num_values and not 0 < chunk.begin <= chunk.end <= num_bytes:  # a column without values has no pages
        what = f"its pages are said to be at bytes {chunk.begin} to {chunk.end} of {num_bytes}"
        raise ValueError(f"column {shown_value(chunk.column)}: {what}")


def refuse_encrypted(chunk: Chunk) -> None:
    """Raises ValueError if a column cannot be read without a key."""
    if chunk.is_encrypted:
        raise ValueError(f"column {shown_value(chunk.column)}: {_ENCRYPTED}")


def _chunk(column: Fields) -> Chunk:
    if 3 not in column and 8 in column:  # its metadata is encrypted too
        return Chunk(column="", num_values=0, num_bytes=0, begin=0, end=0, is_encrypted=True)
    if column.get(1):
        raise ValueError("its columns are in other files")
    fields = column[3]
    data_begin, dictionary_begin = _whole(fields[9]), _whole(fields.get(11, 0))
    begin = dictionary_begin if 0 < dictionary_begin < data_begin else data_begin
    return Chunk(
        column=fields[3][0].decode(),
        num_values=_whole(fields[5]),
        num_bytes=_whole(fields[6]),
        begin=begin,
        end=begin + _whole(fields[7]),
        data_begin=data_begin,
        is_encrypted=8 in column,
    )


def _group(fields: Fields) -> Group:
    if not all(isinstance(chunk, Chunk) for chunk in fields[1]):
        raise TypeError("a column is none")
    return Group(num_rows=_whole(fields[3]), chunks=tuple(fields[1]))


_COLUMN = {1: Want(), 3: Want({number: Want() for number in (3, 5, 6, 7, 9, 11)}), 8: Want()}

_FOOTER = {3: Want(), 4: Want({1: Want(_COLUMN, _chunk), 3: Want()}, _group)}


def _page(data: bytes | memoryview, at: int) -> _Page:
    fields, after = read_struct(data, at, _PAGE)
    if not {1, 2, 3} <= fields.keys():
        raise TypeError(f"it has only the fields {sorted(fields)}")
    kind, num_bytes, stored_bytes = (_whole(fields[number]) for number in (1, 2, 3))
    number, encoding = _HEADERS.get(kind, (0, 0))  # pages of other kinds are skipped
    header = fields.get(number, {}) if number else {1: 0, encoding: 0}
    if not isinstance(header, dict) or not {1, encoding} <= header.keys():
        raise TypeError(f"it has no header of kind {kind}")
    num_values = _whole(header[1])
    if min(num_bytes, stored_bytes, num_values) < 0:
        raise ValueError("a page header has a negative number")
    return _Page(
        kind=kind,
        num_values=num_values,
        num_bytes=num_bytes,
        stored_bytes=stored_bytes,
        encoding=_whole(header[encoding]),
        end=after + stored_bytes,
    )


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError("a number is none")
    return value


class ParquetPieces:
    """Reads the footer of an open file, and batches of its rows. All methods may raise ValueError and Arrow's errors.

    `ours`: whether Patchline wrote the file. `buffer_size`: columns are read in pieces of this many bytes; 0: whole
    columns.
    """

    def __init__(self, file: Any, *, ours: bool, buffer_size: int = 0) -> None:
        self._file = _PagesFile(file, ours=ours)
        self.num_bytes = self._file.seek(0, io.SEEK_END)
        self.num_rows, self.groups = self._footer()
        self._file.seek(0)
        self._ours, self._buffer_size, self._arrow = ours, buffer_size, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def schema(self) -> pa.Schema:
        """The schema as Arrow sees it."""
        return self._opened().schema_arrow

    def batches(
        self, columns: Sequence[str], *, rows: int, groups: Sequence[int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yields up to `rows` rows at a time, or fewer if a dictionary has values so long that a batch could become too
        large."""
        opened = self._opened()
        for number in range(len(self.groups)) if groups is None else groups:
            chunks = [chunk for chunk in self.groups[number].chunks_of(columns) if chunk.num_values]
            for chunk in chunks:
                refuse_place(chunk, self.num_bytes)
            self._file.watch(())
            longest = max((self._longest(chunk, rows) for chunk in chunks), default=0)
            self._file.watch(chunks)
            size = max(1, min(rows, MOST_BATCH_BYTES // max(1, longest)))
            yield from opened.iter_batches(size, row_groups=[number], columns=list(columns), use_threads=False)

    def read(self, columns: Sequence[str], *, rows: int, groups: Sequence[int] | None = None) -> pa.Table:
        """Reads all rows. Raises ValueError if they have more than MOST_BATCH_BYTES."""
        batches, num_bytes = [], 0
        for batch in self.batches(columns, rows=rows, groups=groups):
            batches.append(batch)
            if (num_bytes := num_bytes + batch.nbytes) > MOST_BATCH_BYTES:
                raise ValueError(f"it has more than {MOST_BATCH_BYTES:,} bytes, the most allowed")
        schema = pa.schema([self.schema.field(name) for name in columns], self.schema.metadata)
        arrays = [[batch.column(name) for batch in batches] for name in columns]
        return pa.table([pa.chunked_array(some, one.type) for some, one in zip(arrays, schema, strict=True)], schema)

    def _opened(self) -> pq.ParquetFile:
        if self._arrow is None:
            options = {"buffer_size": self._buffer_size, "page_checksum_verification": True}
            self._arrow = pq.ParquetFile(self._file, pre_buffer=False, **options)
        return self._arrow

    def _footer(self) -> Any:
        self._file.seek(max(0, self.num_bytes - FOOTER_END_BYTES))
        num_bytes = footer_bytes(self._file.read(), self.num_bytes)
        self._file.seek(max(0, self.num_bytes - FOOTER_END_BYTES - num_bytes))
        return read_groups(self._file.read(num_bytes))

    def _longest(self, chunk: Chunk, rows: int) -> int:
        """Returns an upper bound on the bytes of a value that a batch may repeat. The column's first page header is
        read only if `rows` values of the whole column's size would be too large."""
        if rows * chunk.num_bytes <= MOST_BATCH_BYTES:
            return chunk.num_bytes
        self._file.seek(chunk.begin)
        return PageCheck(chunk, ours=self._ours).repeated_bytes(self._file.read(_HEADER_BYTES))


class _PagesFile(io.RawIOBase):
    """A file that forwards reads to another file. While columns are watched, only their pages can be read, in order
    from the beginning of each column."""

    def __init__(self, file: Any, *, ours: bool) -> None:
        super().__init__()
        self._file, self._ours = file, ours
        self._has_buffers = isinstance(file, pa.NativeFile)
        self._watched: list[Chunk] | None = None
        self._checks: dict[int, PageCheck] = {}

    def watch(self, chunks: Sequence[Chunk]) -> None:
        """From now on, lets only these columns be read, or everything if `chunks` is empty. Raises ValueError if
        columns overlap."""
        self._watched = sorted(chunks, key=lambda chunk: chunk.begin) or None
        self._checks = {}
        for before, after in zip(self._watched or (), (self._watched or ())[1:], strict=False):
            if before.end > after.begin:
                raise ValueError(f"columns {shown_value(before.column)} and {shown_value(after.column)} overlap")

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """Returns the position of the next byte to be read."""
        return int(self._file.tell())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves to a byte of the file."""
        self._file.seek(offset, whence)
        return self.tell()

    def read(self, size: int | None = -1) -> bytes:
        """Reads up to `size` bytes, or all that are left if `size` is negative or None."""
        most = None if size is None or size < 0 else size
        if self._watched is None:
            return bytes(self._file.read(most))
        begin = self.tell()
        data = memoryview(self._file.read_buffer(most) if self._has_buffers else self._file.read(most)).cast("B")
        if data:
            self._look(self._watched, begin, data)
        return data  # type: ignore[return-value]  # Arrow takes any buffer

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        super().close()

    def _look(self, watched: list[Chunk], begin: int, data: memoryview) -> None:
        place = bisect_right(watched, begin, key=lambda chunk: chunk.begin) - 1
        if place < 0 or begin >= watched[place].end:
            raise ValueError(f"bytes from {begin} on are read, where no column is")
        chunk = watched[place]
        if begin == chunk.begin:
            self._checks[place] = PageCheck(chunk, ours=self._ours)
        check = self._checks.get(place)
        if check is None or check.seen != begin:
            raise ValueError(f"column {shown_value(chunk.column)} is not read from its beginning on")
        check.add(data[: chunk.end - begin])
