"""The Parquet tables of a dataset, and their readers: the index of each shard, blocks, labels and quarantine."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from shards.config_values import Range
from shards.files.typed_json import read_record
from shards.manifest import MOST_CLASSES, MOST_SAMPLES, MOST_SHARD_SAMPLES, MOST_TAR_BYTES
from shards.output.quantities import plural
from shards.sample_rows import NO_WEIGHT, ONE_A_SAMPLE, BlockTable, SampleRows
from shards.tables import (
    MOST_ROWS,
    TableSchema,
    arrow_faults,
    list_lengths,
    numbers,
    read_checked,
    refuse_outside,
    table_bytes,
)

INDEX_SCHEMA = pa.schema(
    [
        ("shard", pa.int32()),
        ("row", pa.int32()),
        ("key", pa.string()),
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("ext", pa.string()),
        ("height", pa.int32()),
        ("width", pa.int32()),
        ("labels", pa.list_(pa.int32())),
        ("crc32", pa.uint32()),
        ("source", pa.string()),
        ("weights", pa.list_(pa.float32())),  # one per label, or none
        ("orientation", pa.int8()),  # as in EXIF: 1 (upright) to 8; height and width are of the stored image
    ]
)

BLOCKS_SCHEMA = pa.schema(
    [
        ("shard", pa.int32()),
        ("first_byte", pa.int64()),
        ("end_byte", pa.int64()),
        ("first_sample_id", pa.int64()),
        ("num_samples", pa.int64()),
    ]
)

# Further columns of the block table in datasets with rows.bin: the offset in that file at which a block's rows end, and
# their checksum.
BLOCK_ROWS_SCHEMA = pa.schema([("rows_end", pa.int64()), ("rows_crc32", pa.uint32())])

KINDS_BY_PLAN = ("duplicate", "evaluation", "split")  # kinds of images that the plan leaves out

KINDS = ("refused", "unlabeled", *KINDS_BY_PLAN)

LABELS_SCHEMA = pa.schema([("label", pa.int32()), ("name", pa.string()), ("num_samples", pa.int64())])

QUARANTINE_SCHEMA = pa.schema(
    [
        ("position", pa.int64()),
        ("source", pa.string()),
        ("phase", pa.string()),  # scan, plan or shards
        ("kind", pa.string()),  # one of KINDS
        ("reason", pa.string()),
        ("match", pa.string()),  # the image that it is a copy of
        ("distance", pa.int32()),  # the bits in which its perceptual hash differs from the match's
    ]
)

_COMMIT_KEY = b"patchline"

_MOST_PIXELS = 1 << 31  # per side; decoding refuses images with too many pixels in total

_INT32, _BYTES = Range(0, (1 << 31) - 1), Range(0, MOST_TAR_BYTES)

INDEX_RULES = TableSchema(
    schema=INDEX_SCHEMA,
    ranges={
        "shard": _INT32,
        "row": _INT32,
        "offset": _BYTES,
        "size": Range(1, (1 << 31) - 1),  # the largest image that packing can be told to accept
        "height": Range(1, _MOST_PIXELS),
        "width": Range(1, _MOST_PIXELS),
        "labels": Range(0, MOST_CLASSES - 1),
        "weights": Range(0),
        "orientation": Range(1, 8),
    },
    may_be_null=frozenset({"labels", "weights"}),  # tables made by others may have no labels or weights
)

BLOCKS_RULES = TableSchema(
    schema=BLOCKS_SCHEMA,
    ranges={
        "shard": _INT32,
        "first_byte": _BYTES,
        "end_byte": _BYTES,
        "first_sample_id": Range(0, MOST_SAMPLES),
        "num_samples": Range(1, MOST_SHARD_SAMPLES),
    },
)

BLOCK_ROWS_RULES = TableSchema(
    schema=pa.unify_schemas([BLOCKS_SCHEMA, BLOCK_ROWS_SCHEMA]), ranges={**BLOCKS_RULES.ranges, "rows_end": _BYTES}
)

LABELS_RULES = TableSchema(
    schema=LABELS_SCHEMA, ranges={"label": Range(0, MOST_CLASSES - 1), "num_samples": Range(0, MOST_SAMPLES)}
)

QUARANTINE_RULES = TableSchema(
    schema=QUARANTINE_SCHEMA,
    ranges={"position": Range(0, MOST_SAMPLES)},
    may_be_null=frozenset({"match", "distance"}),
)

# A reason about a row of a table begins with the row, as in "list.csv row 27: the weight 'x': allowed: numbers".
_ROW = r"(?s)^.*?\.(?:csv|csv\.gz|tsv|tsv\.gz|parquet) row \d+: "

# Details of one image are quoted as by Python's repr. A quote within a word, as in "the source's root", opens nothing.
_QUOTED = r"""(?s)\B'(?:[^'\\]|\\.)*'|\B"(?:[^"\\]|\\.)*\""""

# Numbers, or what is allowed, come last: "too large: 70000000 bytes", "a label is a dict; allowed: text".
_DETAIL = r"(?s)(?:[;,] allowed)?: .*"


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """An image of the plan that could not be packed. Its slot in the shard stays empty."""

    position: Annotated[int, Range(0, MOST_SAMPLES)]
    source: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class ShardCommit:
    """The record in the footer of an index file, which commits its shard: size and sha256 of the tar, and the hash of
    the plan.

    `data_end`: the offset at which the last sample ends in the tar, before the end-of-archive marker.
    """

    tar_sha256: str
    tar_bytes: Annotated[int, Range(0, MOST_TAR_BYTES)]
    data_end: Annotated[int, Range(0, MOST_TAR_BYTES)]
    plan_hash: str
    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True, kw_only=True)
class IndexRow:
    """One sample of a shard. `offset` and `size` say where the image's bytes are in the tar."""

    key: str
    offset: int
    size: int
    ext: str
    height: int
    width: int
    labels: tuple[int, ...]
    crc32: int
    source: str
    weights: tuple[float, ...] = ()
    orientation: int = 1


def index_bytes(shard: int, rows: Sequence[IndexRow], commit: ShardCommit) -> bytes:
    """Returns the index file of one shard, with the commit record in its footer."""
    records = [vars(item) for item in rows]
    columns = {name: [record[name] for record in records] for name in INDEX_SCHEMA.names[2:]}
    numbers = {"shard": np.full(len(rows), shard), "row": np.arange(len(rows))}
    table = pa.table({**numbers, **columns}, schema=INDEX_SCHEMA)
    footer = json.dumps(asdict(commit), sort_keys=True).encode()
    return table_bytes(table.replace_schema_metadata({_COMMIT_KEY: footer}))


def read_commit(data: bytes) -> ShardCommit:
    """Returns the commit record of an index file. Raises ValueError if there is none."""
    try:
        with arrow_faults():
            metadata = pq.read_schema(pa.BufferReader(data)).metadata or {}
        return read_record(ShardCommit, metadata.get(_COMMIT_KEY, b"{}"))
    except ValueError as error:
        raise ValueError(f"not an index file of a shard: {error}") from error


def read_index(data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Reads these columns of an index file (None: all). Like all readers here, raises ValueError for impossible
    values."""
    return read_checked(data, INDEX_RULES, columns, most_rows=MOST_SHARD_SAMPLES)


def read_rows(data: bytes) -> list[IndexRow]:
    """Reads all rows of an index file as Python objects."""
    records = read_index(data).select(INDEX_SCHEMA.names[2:]).to_pylist()
    lists = ("labels", "weights")
    return [IndexRow(**record | {name: tuple(record[name] or ()) for name in lists}) for record in records]


def read_sample_rows(data: bytes) -> SampleRows:
    """Reads the columns of an index file that are needed to read samples. It is fast, since it makes no Python
    objects."""
    table = read_index(data, [*ONE_A_SAMPLE, "labels", "weights"])
    labels, weights = (table.column(name).combine_chunks() for name in ("labels", "weights"))
    ends = np.zeros(len(table) + 1, dtype=np.int64)
    np.cumsum(list_lengths(labels), out=ends[1:])
    columns = {name: numbers(table.column(name)) for name in ONE_A_SAMPLE}
    return SampleRows(
        **columns,
        label_ends=ends,
        label_values=numbers(labels.flatten()),
        weight_values=_weights(numbers(weights.flatten()), list_lengths(labels), list_lengths(weights)),
    )


def _weights(
    values: NDArray[np.float32], num_labels: NDArray[np.int64], num_weights: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Returns a weight for each label: NO_WEIGHT in rows without weights, and an empty array if no row has weights.
    Raises ValueError for a row whose numbers of weights and labels differ."""
    if not values.size:
        return values
    if (wrong := (num_weights != 0) & (num_weights != num_labels)).any():
        row = int(wrong.argmax())
        raise ValueError(f"row {row} has {num_weights[row]} weights; allowed: {num_labels[row]}, or none")
    found = np.full(num_labels.sum(), NO_WEIGHT, dtype=np.float32)
    found[np.repeat(num_weights != 0, num_labels)] = values
    return found


def read_sources(data: bytes) -> list[str]:
    """Reads where each sample of an index file came from."""
    names: list[str] = read_index(data, ["source"]).column("source").to_pylist()
    return names


def read_blocks(data: bytes, *, has_rows: bool = False) -> BlockTable:
    """Reads the block table. `has_rows`: whether it has the places of each block's rows in rows.bin."""
    return block_table(read_block_columns(data, has_rows=has_rows))


def read_block_columns(data: bytes, *, has_rows: bool) -> pa.Table:
    """Reads the block table as Arrow columns."""
    return read_checked(data, BLOCK_ROWS_RULES if has_rows else BLOCKS_RULES, most_rows=MOST_ROWS)


def block_table(columns: pa.Table) -> BlockTable:
    """Returns these columns as a block table, without copying them."""
    return BlockTable(**{name: numbers(columns.column(name)) for name in columns.column_names})


def read_block_rows(data: bytes | memoryview, num_samples: int) -> SampleRows:
    """Returns the rows of a block from its bytes in rows.bin."""
    rows = SampleRows.from_bytes(data, num_samples)
    for name in (*ONE_A_SAMPLE, "labels"):
        values = rows.label_values if name == "labels" else getattr(rows, name)
        if name in INDEX_RULES.ranges and values.size:
            refuse_outside(values, name, INDEX_RULES.ranges[name])
    weights = rows.weight_values
    if weights.size and not (np.isfinite(weights) & ((weights >= 0) | (weights == NO_WEIGHT))).all():
        raise ValueError("column weights has a value that is negative or not finite; allowed: 0 or more, or no weight")
    return rows


def read_labels(data: bytes) -> pa.Table:
    """Reads the table of classes."""
    return read_checked(data, LABELS_RULES, most_rows=MOST_CLASSES)


def read_quarantine(data: bytes) -> pa.Table:
    """Reads the table of images that were left out."""
    return read_checked(data, QUARANTINE_RULES, most_rows=MOST_ROWS)


def left_out_words(counts: Mapping[str, int]) -> str:
    """Returns how many images were left out, by kind: `4 refused, 7 duplicates, 64 in the other split`."""
    words = {
        "refused": f"{counts['refused']:,} refused",
        "unlabeled": f"{counts['unlabeled']:,} without a label (--unlabeled keep packs them)",
        "duplicate": plural(counts["duplicate"], "duplicate"),
        "evaluation": f"{counts['evaluation']:,} of evaluation sets",
        "split": f"{counts['split']:,} in the other split",
    }
    return ", ".join(words[kind] for kind in KINDS if counts[kind])


def general_reasons(reasons: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Returns each reason without the details of one image, so that reasons of one kind are equal texts. Null becomes
    an empty string."""
    general = pc.fill_null(reasons, "")
    # Quoted parts are replaced first: they may contain what looks like a row or a detail.
    for pattern, replacement in ((_QUOTED, "…"), (_ROW, ""), (_DETAIL, "")):
        general = pc.replace_substring_regex(general, pattern=pattern, replacement=replacement)
    return general
