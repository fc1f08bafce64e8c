"""Streams the rows of CSV and Parquet files from disk or a bucket, and reads the labels and weights in their cells."""

import codecs
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shards.class_labels import MISSING, is_list, is_vector, split_text
from shards.class_names import MOST_LABEL_CHARACTERS, MOST_LABELS, class_name, labels_fault
from shards.config_values import shown_value
from shards.errors import ImageRefusedError, InvalidDataError, UserError
from shards.files.local_files import at_home
from shards.sources.entry import IMAGE_SUFFIXES, printable
from shards.sources.found_files import MOST_GROUP_ROWS, open_found, refuse_groups, unreadable
from shards.store import Buckets

if TYPE_CHECKING:
    import pyarrow as pa

TABLE_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
_BLOCK_BYTES = _MOST_LINE_BYTES = 1 << 20
_BATCH_ROWS = 4096
_DELIMITERS = (b",", b";", b"\t")
# A cell is quoted or bare. A bare cell does not begin with a quote.
_CELLS = {
    delimiter: re.compile(rb' *+"((?:[^"]|"")*+)" *(?=%b|$)|(?! *")([^%b]*)' % (delimiter, delimiter))
    for delimiter in _DELIMITERS
}
_MOST_COLUMNS = 10_000
_MOST_SHOWN = 16
# The text in a .gz may have _MOST_SHRUNK times the file's bytes (lists shrink to a tenth), and always at least _SMALL
# bytes.
_MOST_SHRUNK, _SMALL = 200, 64 << 20
# The values of a row (bytes in a CSV, Python types in a Parquet file), or the reason why they cannot be read.
RowValues = tuple[Any, ...] | ImageRefusedError
# Labels, and their weights: either none, or one per label.
Weighted = tuple[tuple[str, ...], tuple[float, ...]]


def read_rows(path: str, columns: Mapping[str, str], *, beside: str = "") -> Iterator[tuple[int, RowValues]]:
    """Yields (number, values of `columns`) for each row. The keys of `columns` are the options that name the columns.
    `beside` names an optional column; its value, or None, comes last.

    A CSV row has the number of its line; Parquet rows are counted from 0. A CSV row with too many or too few columns is
    refused. Raises UserError if the file is unreadable or lacks a column, and for a line whose quotes do not come in
    pairs.
    """
    if not path.lower().endswith(TABLE_SUFFIXES):
        raise UserError(f"{printable(path)!r} is not a table; give a file that ends in {', '.join(TABLE_SUFFIXES)}")
    buckets = Buckets()
    try:
        if path.lower().endswith(".parquet"):
            yield from _parquet_rows(path, columns, buckets, beside)
        else:
            yield from _csv_rows(path, columns, buckets, beside)
    except unreadable() as error:
        raise InvalidDataError(
            f"{printable(path)} cannot be read: {error}; give a whole CSV or Parquet file"
        ) from error


def path_in(cell: Any) -> str:
    """Returns the path or URL in a cell. Raises ImageRefusedError if there is none, or if it has a line break.

    A backslash in a path counts as a slash, as on Windows. `~/` is the home folder.
    """
    path = cell.decode("utf-8", "surrogateescape") if isinstance(cell, bytes) else "" if cell is None else str(cell)
    if not path:
        raise ImageRefusedError("the row names no image")
    if "\n" in path or "\r" in path:
        raise ImageRefusedError("its path has a line break")
    path = path if "\\" not in path or "://" in path else path.replace("\\", "/")
    return at_home(path) if path.startswith("~/") else path


def check_columns(path: str, have: Sequence[str], wanted: Mapping[str, str]) -> None:
    """Raises UserError, which lists the file's columns, if a wanted column is missing or occurs twice."""
    for option, column in wanted.items():
        if have.count(column) != 1:
            what = "no column" if column not in have else f"{have.count(column)} columns"
            columns = ", ".join(shown_value(name) for name in have[:_MOST_SHOWN])
            columns += f" and {more} more" if (more := len(have) - _MOST_SHOWN) > 0 else ""
            raise UserError(f"{printable(path)} has {what} {column!r}; it has {columns}; set --source.{option}")


def batch_rows(batch: "pa.RecordBatch", columns: Sequence[str]) -> list[RowValues]:
    """Returns the values of `columns` for each row. A row is refused if one of them is a date or time that Python has
    no value for, such as a day of the year 10000."""
    try:
        return list(zip(*(batch.column(column).to_pylist() for column in columns), strict=True))
    except OverflowError:
        return [_batch_row(batch, columns, row) for row in range(batch.num_rows)]


def _batch_row(batch: "pa.RecordBatch", columns: Sequence[str], row: int) -> RowValues:
    values = list[Any]()
    for column in columns:
        cell = batch.column(column)[row]
        try:
            values.append(cell.as_py())
        except OverflowError:
            what = f"its value in column {column!r} is a {cell.type} that is out of range"
            return ImageRefusedError(f"{what}; allowed: text, whole numbers and lists of them")
    return tuple(values)


def _parquet_rows(
    path: str, columns: Mapping[str, str], buckets: Buckets, beside: str
) -> Iterator[tuple[int, RowValues]]:
    from shards.parquet_pieces import MOST_BATCH_BYTES, ParquetPieces

    wanted = list(columns.values())
    with ParquetPieces(open_found(path, buckets), ours=False, buffer_size=_BLOCK_BYTES) as file:
        check_columns(path, file.schema.names, columns)
        has_beside = file.schema.names.count(beside) == 1
        wanted += [beside] * has_beside
        absent = (None,) * (bool(beside) and not has_beside)
        refuse_groups(file, wanted, most_rows=MOST_GROUP_ROWS, most_bytes=MOST_BATCH_BYTES)
        number = 0
        for batch in file.batches(wanted, rows=_BATCH_ROWS):
            for values in batch_rows(batch, wanted):
                yield number, values if isinstance(values, ImageRefusedError) else values + absent
                number += 1
        if number < file.num_rows:
            raise EOFError(f"it has {number} rows, its footer says {file.num_rows}")


def _csv_rows(path: str, columns: Mapping[str, str], buckets: Buckets, beside: str) -> Iterator[tuple[int, RowValues]]:
    """Yields the rows of a CSV. Each line is a row: values with line breaks are refused, because an unclosed quote
    looks the same and would swallow rows."""
    lines = enumerate(_lines(path, buckets), start=1)
    first = next(((number, line) for number, line in lines if line.strip()), None)
    if first is None:
        raise InvalidDataError(f"{printable(path)} cannot be read: it is empty; give a whole CSV or Parquet file")
    delimiter, header = _header(path, *first, columns)
    places = [header.index(column) for column in columns.values()]
    if has_beside := header.count(beside) == 1:
        places.append(header.index(beside))
    absent = (None,) * (bool(beside) and not has_beside)
    for number, line in lines:
        is_plain = b'"' not in line and b" " not in line
        cells = line.split(delimiter) if is_plain else _cells(path, number, line, delimiter)
        while len(cells) > len(header) and not cells[-1]:
            cells.pop()  # left by a separator at the end of the line
        if len(cells) == len(header):
            yield number, (*[cells[place] for place in places], *absent)
        elif cells != [b""]:
            message = f"the row has {len(cells)} columns, the header has {len(header)}"
            yield number, ImageRefusedError(message)


def _header(path: str, number: int, line: bytes, columns: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """Returns the separator and the names of the columns. If another separator than the usual one yields more of the
    wanted columns, that one is used."""
    usual = b"\t" if path.lower().removesuffix(".gz").endswith(".tsv") else b","
    read = {delimiter: _names(path, number, line, delimiter) for delimiter in (usual, *_DELIMITERS)}
    readable = {delimiter: names for delimiter, names in read.items() if isinstance(names, list)}
    best = max(readable, key=lambda delimiter: _num_wanted(readable[delimiter], columns), default=usual)
    if best in readable and _num_wanted(readable[best], columns) == len(columns):
        return best, readable[best]
    for delimiter in (usual, best):
        if isinstance(fault := read[delimiter], InvalidDataError):
            raise fault
    have = readable[best]
    if any(name.lower().endswith(tuple(IMAGE_SUFFIXES)) for name in have):
        row = ", ".join(shown_value(name) for name in have[:_MOST_SHOWN])
        raise UserError(
            f"{printable(path)} has no header: its first line is {row}; add a line with the columns' names, "
            f"such as {','.join(columns.values())}"
        )
    check_columns(path, have, columns)
    return best, have


def _num_wanted(names: Sequence[str], columns: Mapping[str, str]) -> int:
    return sum(names.count(column) == 1 for column in columns.values())


def _names(path: str, number: int, line: bytes, delimiter: bytes) -> list[str] | InvalidDataError:
    """Returns the names of the columns if the header is divided at this separator, or the error if that is
    impossible."""
    if line.count(delimiter) >= _MOST_COLUMNS:
        what = f"{1 + line.count(delimiter):,} columns; allowed: {_MOST_COLUMNS:,}"
        return InvalidDataError(f"{printable(path)} has {what}")
    try:
        names = [cell.decode() for cell in _cells(path, number, line, delimiter)]
    except InvalidDataError as error:
        return error
    while len(names) > 1 and not names[-1]:
        names.pop()
    return names


def _cells(path: str, number: int, line: bytes, delimiter: bytes) -> list[bytes]:
    """Returns the values of a line, without the spaces around them. Raises InvalidDataError if the line's quotes do not
    come in pairs."""
    if b'"' not in line:
        return [cell.strip(b" ") for cell in line.split(delimiter)]
    cells, place = list[bytes](), 0
    while place <= len(line):
        found = _CELLS[delimiter].match(line, place)
        quoted, bare = found.groups() if found else (None, b'"')
        if quoted is None and bare.count(b'"') % 2:
            row = shown_value(line[:100].decode("utf-8", "replace"))
            raise InvalidDataError(
                f"{printable(path)}, line {number}: the quotes of {row} do not come in pairs around a value; "
                'each row is one line; write a quote inside a value as "", and the value in quotes'
            )
        cells.append(bare.strip(b" ") if quoted is None else quoted.replace(b'""', b'"'))
        place = found.end() + 1 if found else len(line) + 1
    return cells


def _lines(path: str, buckets: Buckets) -> Iterator[bytes]:
    """Yields the lines of a text without their ends (LF, CR LF or CR). Raises InvalidDataError if a line or the text is
    too long."""
    rest, number = b"", 0
    for block in _blocks(path, buckets):
        text = rest + block
        # The last line may continue in the next block, and a CR at the end may be half of a CR LF.
        end = 1 + max(text.rfind(b"\n"), text.rfind(b"\r", 0, len(text) - 1))
        lines, rest = text[:end].splitlines(), text[end:]
        yield from lines
        number += len(lines)
        if len(rest) > _MOST_LINE_BYTES:
            what = f"line {number + 1} has more than {_MOST_LINE_BYTES:,} bytes, the most allowed"
            raise InvalidDataError(f"{printable(path)}: {what}; is it a text file with one row per line?")
    yield from rest.splitlines()


def _blocks(path: str, buckets: Buckets) -> Iterator[bytes]:
    """Yields the text of a file in UTF-8, without the byte order mark."""
    import pyarrow as pa

    file, num_bytes = open_found(path, buckets), 0
    most = max(_SMALL, _MOST_SHRUNK * file.size())
    if path.lower().endswith(".gz"):
        file = pa.CompressedInputStream(file, "gzip")
    decoder = None
    with file:
        while block := file.read(_BLOCK_BYTES):
            if num_bytes == 0 and block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                decoder = codecs.getincrementaldecoder("utf-16")()
            elif num_bytes == 0:
                block = block.removeprefix(codecs.BOM_UTF8)
            num_bytes += len(block)
            if path.lower().endswith(".gz") and num_bytes > most:
                what = f"it unpacks to more than {most:,} bytes; allowed: {_MOST_SHRUNK} times its own size"
                raise InvalidDataError(f"{printable(path)}: {what}; unpack it yourself if it is right")
            text = block if decoder is None else decoder.decode(block).encode()
            if b"\0" in text:
                message = "it has NUL characters; is it UTF-16 or UTF-32 without a byte order mark? Save it as UTF-8"
                raise InvalidDataError(f"{printable(path)} is not a table: {message}")
            yield text
    if decoder is not None:
        yield decoder.decode(b"", final=True).encode()


def written_labels(value: Any, *, separator: str = "") -> tuple[str, ...]:
    """Returns the labels in a cell, which may be text, a number, or a list of these. Raises ImageRefusedError for
    anything else.

    Bytes come from a CSV and are split at `separator` if it is given. A whole number becomes its digits, even if pandas
    has stored it as a float. None, an empty string and NaN are not labels, but keep their place in a vector of 0 and 1.
    `shards.class_labels` decides what the labels mean.
    """
    values = value if isinstance(value, list) else _cut(value, separator) if isinstance(value, bytes) else [value]
    if len(values) > MOST_LABELS:
        raise ImageRefusedError(f"too many labels: {len(values)}, allowed: {MOST_LABELS}")
    labels = tuple(_written(item, in_list=len(values) > 1) for item in values)
    if len(labels) == 1 and len(labels[0]) > MOST_LABEL_CHARACTERS and "\\" not in labels[0] and is_list(labels[0]):
        labels = split_text(labels[0])  # a list, too long for a name; parsing backslashes would take quadratic time
        if len(labels) > MOST_LABELS:
            raise ImageRefusedError(f"too many labels: {len(labels)}, allowed: {MOST_LABELS}")
    if "" in labels and not is_vector(labels):
        labels = tuple(filter(None, labels))
    if reason := labels_fault(labels):
        raise ImageRefusedError(reason)
    return labels


def _cut(value: bytes, separator: str) -> list[str]:
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        raise ImageRefusedError(
            f"its label {value.decode(errors='backslashreplace')!r} is not UTF-8; save the list as UTF-8"
        ) from error
    return text.split(separator) if separator else [text]


def _written(value: Any, *, in_list: bool) -> str:
    """Returns the label in a value, or "" if there is none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool) and in_list:
        return str(int(value))
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    if isinstance(value, str):
        return class_name(printable(value))
    from decimal import Decimal  # imported here because only rare Parquet columns have this type

    if isinstance(value, Decimal):
        return str(value)
    raise ImageRefusedError(
        f"its label {shown_value(value)} is a {type(value).__name__}; allowed: text, whole numbers and lists of them"
    )


def weighted(labels: tuple[str, ...], value: Any, *, separator: str) -> Weighted:
    """Returns the labels with the weights in another cell. Raises ImageRefusedError if their numbers differ, or if a
    weight is not a number of 0 or more."""
    numbers = _numbers(value, separator)
    if not numbers:
        return labels, ()
    if len(numbers) != len(labels):
        labels = tuple(label for label in labels if label not in MISSING)
    if len(numbers) != len(labels):
        raise ImageRefusedError(f"{len(numbers)} weights for {len(labels)} labels; allowed: one each, or none")
    return labels, numbers


def _numbers(value: Any, separator: str) -> tuple[float, ...]:
    if isinstance(value, bytes):
        text = value.decode("utf-8", "backslashreplace")
        value = [item for item in (text.split(separator) if separator else [text]) if item.strip()]
    items = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(_number(item) for item in items)


def _number(item: Any) -> float:
    try:
        # Rounds to 32 bits, as the index stores it. Raises OverflowError if the result is not finite.
        (number,) = struct.unpack("f", struct.pack("f", float(item)))
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ImageRefusedError(f"the weight {printable(str(item))!r}: allowed: numbers of 0 or more")
    return float(number)
