"""Reads the Parquet tables of a dataset and checks them before anything relies on them.

What a footer declares is bounded before anything is decompressed. Types, nulls and ranges are then checked by column,
and finally the tables are compared with the manifest. All checks are vectorised. Every fault is a ValueError, whatever
Arrow raises; the caller, who knows the file's name, adds it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from shards.images.config import PACKED_FORMATS
from shards.manifest import Manifest, ShardRecord
from shards.parquet_pieces import FOOTER_END_BYTES, Group, ParquetPieces, footer_bytes, read_groups, refuse_pages
from shards.sample_rows import BlockTable, SampleRows
from shards.schema.config_values import Range, shown_value
from shards.storage.objects import StoreFile

# Column, the pattern of its texts, and what is allowed in words.
_OUR_NAMES = (
    ("key", r"^[0-9]{10,}\z", "ten digits or more"),
    ("ext", rf"^({'|'.join(PACKED_FORMATS)})\z", ", ".join(PACKED_FORMATS)),
)
_OTHERS_NAMES = (("key", r"(?s)^.", "a name"), ("ext", r"^[^/\x00-\x1f\x7f]+\z", "a suffix without a path"))
MOST_ROWS = 1 << 26
_BATCH_ROWS = 1 << 16
_MOST_COLUMNS = 64
_MOST_ROW_BYTES = 1 << 20  # of a sample in rows.bin: 131,072 labels with weights
_MOST_GROUPS = 1 << 16
_MOST_VALUES = 1 << 28  # of a column, those inside lists included
_MOST_BYTES = 1 << 30  # of a file's columns, decompressed, and of a column of texts


def refuse_rows(rows: SampleRows, record: ShardRecord, *, num_classes: int) -> None:
    """Refuses a shard's index unless it has as many samples as the manifest says, one behind the other in its tar,
    labels of classes."""
    num_samples = rows.offset.size
    refuse_count(num_samples, record)
    ends = rows.offset + rows.size
    if (row := _first(rows.offset[1:] < ends[:-1])) is not None:
        what = f"row {row + 1} has offset {rows.offset[row + 1]}, inside or before the image of row {row}"
        raise ValueError(f"{what}; allowed: {ends[row]} or more")
    if num_samples and ends[-1] > record.num_bytes:
        raise ValueError(
            f"row {num_samples - 1} ends at byte {ends[-1]}; allowed: 0 to {record.num_bytes}, the tar's end"
        )
    wrong = _first((rows.label_values < 0) | (rows.label_values >= num_classes))
    if wrong is not None:
        row = int(np.searchsorted(rows.label_ends, wrong, side="right")) - 1
        raise ValueError(f"row {row} has label {rows.label_values[wrong]}; allowed: 0 to {num_classes - 1}")


def refuse_places(index: pa.Table, *, shard: int, is_ours: bool) -> None:
    """Checks all columns of a shard's index: its rows are numbered, one weight per label or none, and names as packing
    writes them. Keys and suffixes in tars made by others are their own."""
    rows = np.arange(index.num_rows)
    _refuse_others(numbers(index.column("shard")), np.full(index.num_rows, shard), "shard")
    _refuse_others(numbers(index.column("row")), rows, "row")
    num_labels, num_weights = (list_lengths(index.column(name)) for name in ("labels", "weights"))
    if (row := _first((num_weights != 0) & (num_weights != num_labels))) is not None:
        raise ValueError(f"row {row} has {num_weights[row]} weights; allowed: {num_labels[row]}, or none")
    for name, pattern, allowed in _OUR_NAMES if is_ours else _OTHERS_NAMES:
        column = index.column(name)
        if (row := _first(pc.invert(pc.match_substring_regex(column, pattern)).to_numpy())) is not None:
            raise ValueError(f"row {row} has {name} {shown_value(column[row].as_py())}; allowed: {allowed}")


def refuse_count(num_rows: int, record: ShardRecord) -> None:
    """Refuses a shard's index that does not have one row per sample."""
    if num_rows != record.num_samples:
        raise ValueError(f"it has {num_rows} rows; allowed: {record.num_samples}, as the manifest says")


def refuse_blocks(blocks: BlockTable, manifest: Manifest) -> None:
    """Refuses a block table unless it cuts each shard into blocks of `samples_per_block`, one behind the other in the
    tar."""
    most = manifest.samples_per_block
    num_samples = manifest.shard_column("num_samples")
    a_shard = -(-num_samples // most)
    if blocks.shard.size != a_shard.sum():
        raise ValueError(f"it has {blocks.shard.size} blocks; allowed: {a_shard.sum()}, for the manifest's shards")
    shard = np.repeat(np.arange(num_samples.size), a_shard)
    before = (np.arange(shard.size) - np.repeat(np.cumsum(a_shard) - a_shard, a_shard)) * most
    _refuse_others(blocks.shard, shard, "shard")
    _refuse_others(blocks.first_sample_id, manifest.shard_column("first_sample_id")[shard] + before, "first_sample_id")
    _refuse_others(blocks.num_samples, np.minimum(num_samples[shard] - before, most), "num_samples")
    most_bytes = manifest.shard_column("num_bytes")[shard]
    wrong = (blocks.first_byte >= blocks.end_byte) | (blocks.end_byte > most_bytes)
    wrong[1:] |= (shard[1:] == shard[:-1]) & (blocks.first_byte[1:] < blocks.end_byte[:-1])
    if (place := _first(wrong)) is not None:
        found = f"block {place} is bytes {blocks.first_byte[place]} to {blocks.end_byte[place]} of shard {shard[place]}"
        raise ValueError(f"{found}; allowed: behind the block before it, and up to {most_bytes[place]}")
    if blocks.rows_end is not None:
        _refuse_row_places(blocks.rows_end, blocks.num_samples)


def _refuse_row_places(rows_end: NDArray[np.int64], num_samples: NDArray[np.int64]) -> None:
    """Refuses places in rows.bin by which a block would have no rows, or more bytes of them than rows can have."""
    if not rows_end.size:
        return
    a_sample = np.diff(rows_end, prepend=0) // num_samples
    if (place := _first((a_sample < 1) | (a_sample > _MOST_ROW_BYTES))) is not None:
        begin = rows_end[place - 1] if place else 0
        raise ValueError(
            f"the rows of block {place} are bytes {begin} to {rows_end[place]} of rows.bin; allowed: 1 to "
            f"{_MOST_ROW_BYTES:,} bytes for each of its {num_samples[place]} samples"
        )


def refuse_labels(labels: pa.Table, *, num_classes: int) -> None:
    """Refuses classes unless they are numbered from 0, are as many as the manifest says, and have names of their
    own."""
    if labels.num_rows != num_classes:
        raise ValueError(f"it has {labels.num_rows} rows; allowed: {num_classes}, the classes of the manifest")
    _refuse_others(numbers(labels.column("label")), np.arange(num_classes), "label")
    names = labels.column("name").to_pylist()
    if len(set(names)) < len(names):
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the class {shown_value(twice)} is there twice; allowed: each name once")


def refuse_block_reads(blocks: BlockTable, rows: SampleRows, first_sample_id: int) -> None:
    """Checks rows that begin with `first_sample_id` and are of one block: their bytes lie in it, too. The block table
    alone bounds what a reader holds."""
    block = int(np.searchsorted(blocks.first_sample_id, first_sample_id, side="right")) - 1
    first, end = int(rows.offset[0]), int(rows.offset[-1] + rows.size[-1])
    if first < blocks.first_byte[block] or end > blocks.end_byte[block]:
        allowed = f"{blocks.first_byte[block]} to {blocks.end_byte[block]}, those of their block"
        raise ValueError(f"samples from {first_sample_id} on are bytes {first} to {end}; allowed: {allowed}")


def numbers(column: pa.ChunkedArray | pa.Array) -> NDArray[Any]:
    """A column of numbers without nulls as an array, read-only, with no copy unless it is in several chunks.

    Arrow's own `to_numpy` loads pandas if it is installed: half a second that every rank would wait for.
    """
    if isinstance(column, pa.Array):
        return np.from_dlpack(column)
    # Arrow copies even a single chunk when it combines chunks.
    return np.from_dlpack(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks())


def list_lengths(lists: pa.ChunkedArray | pa.Array) -> NDArray[np.int64]:
    """The number of items in each list; 0 for null."""
    lengths = pc.list_value_length(lists)
    # Our own tables have no null, and a fill value loads pandas, too.
    return numbers(pc.fill_null(lengths, 0) if lengths.null_count else lengths).astype(np.int64)


def _refuse_others(found: NDArray[np.int64] | NDArray[np.int32], expected: NDArray[np.int64], name: str) -> None:
    if (place := _first(found != expected)) is not None:
        raise ValueError(f"row {place} has {name} {found[place]}; allowed: {expected[place]}")


def _first(wrong: NDArray[np.bool_]) -> int | None:
    """The first place that is true."""
    return int(wrong.argmax()) if wrong.any() else None


@dataclass(frozen=True, kw_only=True)
class TableSchema:
    """What a table holds: its columns and their types, the ranges of numbers (of lists: of their items), and the
    columns that may be null."""

    schema: pa.Schema
    ranges: Mapping[str, Range] = field(default_factory=dict)
    may_be_null: frozenset[str] = frozenset()


def read_checked(data: bytes, rules: TableSchema, columns: Sequence[str] | None = None, *, most_rows: int) -> pa.Table:
    """These columns of a Parquet file, or all that the rules name. ValueError if it is not as the rules say."""
    names = list(columns or rules.schema.names)
    num_rows, groups = read_groups(data[-footer_bytes(data[-FOOTER_END_BYTES:], len(data)) - FOOTER_END_BYTES :])
    refuse_groups(num_rows, groups, most_rows=most_rows)
    refuse_pages(data, groups, names)
    kinds = {name: rules.schema.field(name).type for name in names}
    texts = [name for name, kind in kinds.items() if pa.types.is_string(kind) or pa.types.is_binary(kind)]
    with arrow_faults():
        file = pq.ParquetFile(pa.BufferReader(data))
        _refuse_types(file.schema_arrow, rules.schema)
        if texts:  # as dictionaries: a text that a page holds once and names a million times is not copied as often
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
    """The file, if its footer declares nothing too large and every column has its type. Use it in `arrow_faults`."""
    opened = ParquetPieces(file, ours=True)
    refuse_groups(opened.num_rows, opened.groups, most_rows=most_rows)
    _refuse_types(opened.schema, rules.schema)
    return opened


@contextmanager
def arrow_faults() -> Iterator[None]:
    """ValueError for what Arrow raises about the bytes of a file; errors of a disk or a store stay what they are."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        if isinstance(error, OSError) and (error.errno is not None or type(error) is not OSError):
            raise
        text = str(error).partition("\n")[0]
        raise ValueError(f"not a sound Parquet file: {shown_value(text)}") from error


def refuse_values(table: pa.Table, rules: TableSchema) -> None:
    """ValueError for the first column with a null, or with a number outside its range; only columns of the rules are
    looked at."""
    with arrow_faults():
        for name, column in zip(table.column_names, table.columns, strict=True):
            if column.null_count and name not in rules.may_be_null:
                row = column.is_null().to_numpy().argmax()
                raise ValueError(f"column {name} is null in row {row}; allowed: a value in every row")
            if name in rules.ranges:
                _refuse_column_outside(column, name, rules.ranges[name])


def refuse_groups(num_rows: int, groups: Sequence[Group], *, most_rows: int) -> None:
    """ValueError if a footer declares more rows, columns, values or bytes than any of ours."""
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
    """The table with dictionaries of text as text. ValueError if a column would be too large, or is no UTF-8."""
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
    """ValueError if one of a column's values, of which there are some, is not in the range."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError(f"column {name} has {values[~np.isfinite(values)][0]}; allowed: {allowed}")
    for value in (values.min(), values.max()):
        if not allowed.holds(value.item()):
            raise ValueError(f"column {name} has {value.item()}; allowed: {allowed}")
