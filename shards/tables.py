"""Reads the Parquet tables of a dataset, and checks them before they are used.

Before anything is decompressed, the numbers and sizes that the footer declares are compared with limits. Then types,
nulls and ranges are checked column by column. All checks are vectorised. Every fault, including an error raised by
Arrow, becomes a ValueError; the caller adds the file's name.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from shards.config_values import Range, shown_value
from shards.parquet_pieces import FOOTER_END_BYTES, Group, ParquetPieces, footer_bytes, read_groups, refuse_pages
from shards.storage.objects import StoreFile

MOST_ROWS = 1 << 26
_BATCH_ROWS = 1 << 16
_MOST_COLUMNS = 64
_MOST_GROUPS = 1 << 16
_MOST_VALUES = 1 << 28  # in one column, including values inside lists
_MOST_BYTES = 1 << 30  # for a file's decompressed columns, and for a column of texts


@dataclass(frozen=True, kw_only=True)
class TableSchema:
    """What a table must have: columns and their types, the ranges of numbers (for lists, of their items), and the
    columns that may be null."""

    schema: pa.Schema
    ranges: Mapping[str, Range] = field(default_factory=dict)
    may_be_null: frozenset[str] = frozenset()


def read_checked(data: bytes, rules: TableSchema, columns: Sequence[str] | None = None, *, most_rows: int) -> pa.Table:
    """Reads these columns of a Parquet file, or all that the rules name. Raises ValueError if the file does not follow
    the rules."""
    names = list(columns or rules.schema.names)
    num_rows, groups = read_groups(data[-footer_bytes(data[-FOOTER_END_BYTES:], len(data)) - FOOTER_END_BYTES :])
    refuse_groups(num_rows, groups, most_rows=most_rows)
    refuse_pages(data, groups, names)
    kinds = {name: rules.schema.field(name).type for name in names}
    texts = [name for name, kind in kinds.items() if pa.types.is_string(kind) or pa.types.is_binary(kind)]
    with arrow_faults():
        file = pq.ParquetFile(pa.BufferReader(data))
        _refuse_types(file.schema_arrow, rules.schema)
        if texts:  # read as dictionaries: a repeated text is copied once
            file = pq.ParquetFile(pa.BufferReader(data), metadata=file.metadata, read_dictionary=texts)
        if pa.list_(pa.string()) in kinds.values():
            table = ParquetPieces(pa.BufferReader(data), ours=True).read(names, rows=_BATCH_ROWS)
            table.validate(full=True)
        else:
            table = _with_texts(file.read(columns=names, use_threads=False), texts, rules.schema)
        if table.num_rows != num_rows:
            raise ValueError(f"it has {table.num_rows} rows, but declares {num_rows}")
    refuse_values(table, rules)
    return table


def open_checked(file: StoreFile, rules: TableSchema, *, most_rows: int = MOST_ROWS) -> ParquetPieces:
    """Opens the file. Raises ValueError if its footer declares too much or a column has a wrong type. Call it inside
    `arrow_faults`."""
    opened = ParquetPieces(file, ours=True)
    refuse_groups(opened.num_rows, opened.groups, most_rows=most_rows)
    _refuse_types(opened.schema, rules.schema)
    return opened


@contextmanager
def arrow_faults() -> Iterator[None]:
    """Turns an error that Arrow raises about the bytes of a file into a ValueError. Errors of a disk or a store are
    passed on."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        if isinstance(error, OSError) and (error.errno is not None or type(error) is not OSError):
            raise
        text = str(error).partition("\n")[0]
        raise ValueError(f"not a sound Parquet file: {shown_value(text)}") from error


def refuse_values(table: pa.Table, rules: TableSchema) -> None:
    """Raises ValueError for the first column with a null, or with a number outside its range. Nulls are refused in
    every column for which the rules do not allow them; values are compared with a range only in columns that have
    one."""
    with arrow_faults():
        for name, column in zip(table.column_names, table.columns, strict=True):
            if column.null_count and name not in rules.may_be_null:
                row = column.is_null().to_numpy().argmax()
                raise ValueError(f"column {name} is null in row {row}; allowed: a value in every row")
            if name in rules.ranges:
                _refuse_column_outside(column, name, rules.ranges[name])


def refuse_groups(num_rows: int, groups: Sequence[Group], *, most_rows: int) -> None:
    """Raises ValueError if a footer declares more rows, columns, values or bytes than a table of Patchline may have."""
    chunks = [chunk for group in groups for chunk in group.chunks]
    counts = (
        ("rows", num_rows, most_rows),
        ("row groups", len(groups), _MOST_GROUPS),
        ("columns", max((len(group.chunks) for group in groups), default=0), _MOST_COLUMNS),
        ("decompressed bytes", sum(chunk.num_bytes for chunk in chunks), _MOST_BYTES),
    )
    for what, found, most in counts:
        if not 0 <= found <= most:
            raise ValueError(f"it declares {found} {what}; allowed: 0 to {most:,}")
    for chunk in chunks:
        if not 0 <= chunk.num_values <= _MOST_VALUES or chunk.num_bytes < 0:
            what = f"{chunk.num_values} values and {chunk.num_bytes} bytes in column {shown_value(chunk.column)}"
            raise ValueError(f"it declares {what}; allowed: 0 to {_MOST_VALUES:,} values")
    if sum(group.num_rows for group in groups) != num_rows or any(group.num_rows < 0 for group in groups):
        raise ValueError(f"it declares {num_rows} rows, but its row groups do not have as many")


def _refuse_types(found: pa.Schema, wanted: pa.Schema) -> None:
    names = found.names
    for name, kind in zip(wanted.names, wanted.types, strict=True):
        if names.count(name) != 1:
            raise ValueError(f"column {name} is {'there twice' if name in names else 'missing'}; allowed: one {kind}")
        if found.field(name).type != kind:
            raise ValueError(f"column {name} is of type {shown_value(str(found.field(name).type))}; allowed: {kind}")


def _with_texts(table: pa.Table, names: Sequence[str], schema: pa.Schema) -> pa.Table:
    """Returns the table with the dictionary columns `names` as plain text. Raises ValueError if a column would be too
    large, or is not UTF-8."""
    for name in names:
        column = table.column(name)
        lengths = (pc.sum(pc.binary_length(one.dictionary).take(one.indices)).as_py() or 0 for one in column.chunks)
        if (num_bytes := sum(lengths)) > _MOST_BYTES:
            raise ValueError(f"column {name} has {num_bytes} bytes of text; allowed: 0 to {_MOST_BYTES:,}")
        texts = column.cast(schema.field(name).type)
        texts.validate(full=True)
        table = table.set_column(table.column_names.index(name), name, texts)
    return table


def _refuse_column_outside(column: pa.ChunkedArray, name: str, allowed: Range) -> None:
    for chunk in column.chunks:
        values = chunk
        if pa.types.is_list(column.type):
            values = chunk.flatten()
            if values.null_count:
                raise ValueError(f"column {name} has a null in a list; allowed: {allowed}")
        found = numbers(values.drop_null())
        if found.size:
            refuse_outside(found, name, allowed)


def refuse_outside(values: NDArray[Any], name: str, allowed: Range) -> None:
    """Raises ValueError if one of a column's values is outside the range. `values` must not be empty."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError(f"column {name} has {values[~np.isfinite(values)][0]}; allowed: {allowed}")
    for value in (values.min(), values.max()):
        if not allowed.holds(value.item()):
            raise ValueError(f"column {name} has {value.item()}; allowed: {allowed}")


def table_bytes(table: pa.Table, *, row_group_size: int | None = None) -> bytes:
    """Returns `table` as one Parquet file."""
    file = io.BytesIO()
    pq.write_table(table, file, compression="zstd", row_group_size=row_group_size, write_page_checksum=True)
    return file.getvalue()


def numbers(column: pa.ChunkedArray | pa.Array) -> NDArray[Any]:
    """Returns a column of numbers without nulls as a read-only array, without a copy unless the column has several
    chunks.

    Arrow's own `to_numpy` is not used: where pandas is installed, that method loads it, which takes half a second on
    every rank.
    """
    if isinstance(column, pa.Array):
        return np.from_dlpack(column)
    # Arrow copies even a single chunk when it combines chunks.
    return np.from_dlpack(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks())


def list_lengths(lists: pa.ChunkedArray | pa.Array) -> NDArray[np.int64]:
    """Returns the number of items of each list; 0 for null."""
    lengths = pc.list_value_length(lists)
    # Our own tables have no nulls, and `fill_null` would load pandas, too.
    return numbers(pc.fill_null(lengths, 0) if lengths.null_count else lengths).astype(np.int64)
