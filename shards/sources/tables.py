"""Rows of CSV and Parquet files, streamed: some columns, one row at a time, from disk or a bucket."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shards.errors import ImageRefusedError, InvalidDataError, UserError
from shards.schema.config_values import shown_value
from shards.sources.entry import printable
from shards.sources.found_files import open_found
from shards.sources.parquet_groups import MOST_GROUP_ROWS, refuse_groups, unreadable
from shards.storage.buckets import Buckets

if TYPE_CHECKING:
    import pyarrow.csv as pc

TABLE_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
_BLOCK_BYTES = 1 << 20
_BATCH_ROWS = 4096
_MOST_COLUMNS = 10_000
_MOST_SHOWN = 16
_MOST_SHRUNK, _SMALL = 200, 64 << 20  # text in a .gz: times the file's bytes (lists shrink to a tenth); so much in any

# The values of a row (bytes in a CSV, Python's own types in a Parquet file), or why it has none.
RowValues = tuple[Any, ...] | ImageRefusedError


def read_rows(path: str, columns: Mapping[str, str]) -> Iterator[tuple[int, RowValues]]:
    """(number, values of `columns`) of each row; the keys of `columns` are the options that name them.

    The header of a CSV is row 1; rows of Parquet are counted from 0. A CSV row with too many or too few columns is
    refused. UserError if the file is unreadable or lacks a column.
    """
    if not path.lower().endswith(TABLE_SUFFIXES):
        raise UserError(f"{printable(path)!r} is not a table; give a file that ends in {', '.join(TABLE_SUFFIXES)}")
    buckets = Buckets()
    try:
        if path.lower().endswith(".parquet"):
            yield from _parquet_rows(path, columns, buckets)
        else:
            yield from _csv_rows(path, columns, buckets)
    except unreadable() as error:
        raise InvalidDataError(
            f"{printable(path)} cannot be read: {error}; give a whole CSV or Parquet file"
        ) from error


def check_columns(path: str, have: Sequence[str], wanted: Mapping[str, str]) -> None:
    """UserError that lists the file's columns, if a wanted one is missing or occurs twice."""
    for option, column in wanted.items():
        if have.count(column) != 1:
            what = "no column" if column not in have else f"{have.count(column)} columns"
            columns = ", ".join(shown_value(name) for name in have[:_MOST_SHOWN])
            columns += f" and {more} more" if (more := len(have) - _MOST_SHOWN) > 0 else ""
            raise UserError(f"{printable(path)} has {what} {column!r}; it has {columns}; set --source.{option}")


def _parquet_rows(path: str, columns: Mapping[str, str], buckets: Buckets) -> Iterator[tuple[int, RowValues]]:
    from shards.parquet.files import MOST_BATCH_BYTES, ParquetPieces

    wanted = list(columns.values())
    with ParquetPieces(open_found(path, buckets), ours=False, buffer_size=_BLOCK_BYTES) as file:
        check_columns(path, file.schema.names, columns)
        refuse_groups(file, wanted, most_rows=MOST_GROUP_ROWS, most_bytes=MOST_BATCH_BYTES)
        number = 0
        for batch in file.batches(wanted, rows=_BATCH_ROWS):
            for values in zip(*(batch.column(column).to_pylist() for column in wanted), strict=True):
                yield number, values
                number += 1
        if number < file.num_rows:
            raise EOFError(f"it has {number} rows, its footer says {file.num_rows}")


def _csv_rows(path: str, columns: Mapping[str, str], buckets: Buckets) -> Iterator[tuple[int, RowValues]]:
    refused: dict[int, ImageRefusedError] = {}

    def refuse(row: "pc.InvalidRow") -> str:
        message = f"the row has {row.actual_columns} columns, the header has {row.expected_columns}"
        refused[row.number] = ImageRefusedError(message)
        return "skip"

    number = 1
    try:
        _refuse_endless_header(path, buckets)
        _refuse_bomb(path, buckets)
        with _open_csv(path, buckets, None, refuse) as reader:
            check_columns(path, reader.schema.names, columns)
        refused.clear()
        number = 2
        with _open_csv(path, buckets, list(columns.values()), refuse) as reader:
            for batch in _batches(reader, refuse):
                for values in zip(*(batch.column(column).to_pylist() for column in columns.values()), strict=True):
                    while number in refused:
                        yield number, refused.pop(number)
                        number += 1
                    yield number, values
                    number += 1
    except ValueError as error:
        if "straddling" not in str(error):
            raise
        what = f"row {number} or a later one has more than {_BLOCK_BYTES:,} bytes"
        raise InvalidDataError(f"{printable(path)}: {what}, the most allowed; is a quote not closed?") from error
    yield from sorted(refused.items())


def _batches(reader: "pc.CSVStreamingReader", refuse: Any) -> Iterator[Any]:
    while True:
        with _not_printed(refuse):
            batch = next(reader, None)
        if batch is None:
            return
        yield batch


@contextmanager
def _not_printed(refuse: Any) -> Iterator[None]:
    """Arrow cannot show `refuse` a row that is not UTF-8: it prints that this failed, and then raises an error that
    says more."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda failed: None if failed.object is refuse else hook(failed)
    try:
        yield
    finally:
        sys.unraisablehook = hook


def _refuse_endless_header(path: str, buckets: Buckets) -> None:
    """Arrow takes 10 kB of memory for each column, and would call a line without an end an empty file."""
    file, name = _opened(path, buckets)
    with file:
        block = file.read(_BLOCK_BYTES)
    header = block.splitlines()[0] if block else b""
    if len(header) == _BLOCK_BYTES:
        what = f"its first line has no end in {_BLOCK_BYTES:,} bytes; is it a text file with one row per line?"
        raise InvalidDataError(f"{printable(path)} is no table: {what}")
    num_columns = 1 + header.count(_delimiter(name))
    if num_columns > _MOST_COLUMNS:
        raise InvalidDataError(f"{printable(path)} has {num_columns:,} columns; allowed: {_MOST_COLUMNS:,}")


def _refuse_bomb(path: str, buckets: Buckets) -> None:
    """A megabyte of gzip may be a gigabyte of empty lines, which take a minute and say nothing."""
    if not path.lower().endswith(".gz"):
        return
    with open_found(path, buckets) as packed:
        most = max(_SMALL, _MOST_SHRUNK * packed.size())
    file, _ = _opened(path, buckets)
    with file:
        num_bytes = 0
        while block := file.read(_BLOCK_BYTES):
            num_bytes += len(block)
            if num_bytes > most:
                what = f"it unpacks to more than {most:,} bytes; allowed: {_MOST_SHRUNK} times its own size"
                raise InvalidDataError(f"{printable(path)}: {what}; unpack it yourself if it is right")


def _open_csv(path: str, buckets: Buckets, columns: list[str] | None, refuse: Any) -> "pc.CSVStreamingReader":
    import pyarrow as pa
    import pyarrow.csv as pc

    file, name = _opened(path, buckets)
    with _not_printed(refuse):
        return pc.open_csv(
            file,
            # With threads, refused rows would come in no fixed order.
            read_options=pc.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
            parse_options=pc.ParseOptions(
                delimiter=_delimiter(name).decode(), newlines_in_values=True, invalid_row_handler=refuse
            ),
            # Bytes, since paths need not be UTF-8.
            convert_options=pc.ConvertOptions(
                include_columns=columns, column_types={column: pa.binary() for column in columns or ()}
            ),
        )


def _opened(path: str, buckets: Buckets) -> tuple[Any, str]:
    """The text of a CSV file, and the file's name without .gz."""
    import pyarrow as pa

    file, name = open_found(path, buckets), path.lower()
    if name.endswith(".gz"):
        return pa.CompressedInputStream(file, "gzip"), name.removesuffix(".gz")
    return file, name


def _delimiter(name: str) -> bytes:
    return b"\t" if name.endswith(".tsv") else b","
