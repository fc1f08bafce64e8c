"""What a Parquet file declares, read by ourselves: its footer, and the headers of its pages.

Arrow would allocate what a page declares, whatever its column does, and ends the process with some damaged footers when
their columns are looked at. The format: parquet.thrift of apache/parquet-format, in Thrift's compact protocol.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shards.config_values import shown_value
from shards.parquet.thrift import Fields, Want, read_struct

FOOTER_END_BYTES = 8  # the footer's length and the magic word
MOST_FOOTER_BYTES = 1 << 25
_MAGIC, _ENCRYPTED_MAGIC = b"PAR1", b"PARE"
_ENCRYPTED = "it is encrypted; give a copy that is not"
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_SIMPLE = (0, 2, 3, 8)  # PLAIN, PLAIN_DICTIONARY, RLE, RLE_DICTIONARY: no value repeats parts of the one before
_HEADERS = {_DATA: (5, 2), _DICTIONARY: (7, 2), _DATA_V2: (8, 4)}  # a kind's own header, and the encoding's field in it
_PAGE = {1: Want(), 2: Want(), 3: Want()} | {
    header: Want({1: Want(), encoding: Want()}) for header, encoding in _HEADERS.values()
}
_FREE_PAGE_BYTES = 64 << 20  # of a column of others, whatever it declares: writers may count otherwise
_MOST_RATIO = 1024  # of a larger page's bytes to those that it has in the file
_MOST_HEADER_BYTES = 16 << 20  # as Arrow allows


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A column's part of a row group; `column` is the name of the whole column, without those of lists in it."""

    column: str
    num_values: int
    num_bytes: int
    begin: int
    end: int
    data_begin: int = field(default=0, compare=False)  # after a dictionary
    is_encrypted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A row group."""

    num_rows: int
    chunks: tuple[Chunk, ...]

    def chunks_of(self, columns: Sequence[str]) -> list[Chunk]:
        """Those of these columns."""
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
    """Looks at the headers of a column's pages as its bytes pass, from the first on. ValueError for the first page that
    declares more than the column, or more than can be in its bytes.

    `ours`: the file is written by us, so its pages have simple encodings and add up to what the column declares.
    """

    def __init__(self, chunk: Chunk, *, ours: bool) -> None:
        self.chunk, self.ours = chunk, ours
        self.seen = self._next = chunk.begin
        self._num_values = self._num_bytes = 0
        self._kept = b""  # the beginning of a header that is cut off

    def add(self, data: bytes | memoryview) -> None:
        """The bytes that follow those seen."""
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
        """Reads from the column's first bytes the most bytes that a value may have which the file holds only once; 0 if
        each value is there as often as it is used."""
        try:
            page = _page(data, 0)
        except (LookupError, TypeError, ValueError):  # add() says what is wrong
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
    """Bytes of a file's footer, from the file's last FOOTER_END_BYTES. ValueError if it is no Parquet file, or if they
    are more than `most`."""
    if len(end) >= FOOTER_END_BYTES and end[-4:] == _ENCRYPTED_MAGIC:
        raise ValueError(_ENCRYPTED)
    if len(end) < FOOTER_END_BYTES or end[-4:] != _MAGIC:
        raise ValueError("not a sound Parquet file: its end is not that of one")
    num_bytes, most = int.from_bytes(end[-8:-4], "little"), min(most, MOST_FOOTER_BYTES)
    if num_bytes > most:
        raise ValueError(f"not a sound Parquet file: its footer has {num_bytes} bytes; allowed: 0 to {most:,}")
    return num_bytes


def read_groups(footer: bytes) -> tuple[int, tuple[Group, ...]]:
    """The rows that a footer declares, and its row groups. ValueError if it is damaged."""
    try:
        fields, _ = read_struct(footer, 0, _FOOTER)
        if not all(isinstance(group, Group) for group in fields[4]):
            raise TypeError("a row group is none")
        return _whole(fields[3]), tuple(fields[4])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"not a sound Parquet file: its footer is damaged ({error})") from error


def refuse_pages(data: bytes, groups: Sequence[Group], columns: Sequence[str]) -> None:
    """ValueError if a page of these columns of our own file is not within the column's part of it, or declares more."""
    for group in groups:
        for chunk in group.chunks_of(columns):
            refuse_place(chunk, len(data))
            PageCheck(chunk, ours=True).add(data[chunk.begin : chunk.end])


def refuse_place(chunk: Chunk, num_bytes: int) -> None:
    """ValueError if a column's pages are not within the file's bytes, or cannot be read."""
    refuse_encrypted(chunk)
    if chunk.num_values and not 0 < chunk.begin <= chunk.end <= num_bytes:  # without values it has no pages
        what = f"its pages are said to be at bytes {chunk.begin} to {chunk.end} of {num_bytes}"
        raise ValueError(f"column {shown_value(chunk.column)}: {what}")


def refuse_encrypted(chunk: Chunk) -> None:
    """ValueError if a column cannot be read without a key."""
    if chunk.is_encrypted:
        raise ValueError(f"column {shown_value(chunk.column)}: {_ENCRYPTED}")


def _chunk(column: Fields) -> Chunk:
    if 3 not in column and 8 in column:  # what is known of it is encrypted too
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
    number, encoding = _HEADERS.get(kind, (0, 0))  # other pages are passed over
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
