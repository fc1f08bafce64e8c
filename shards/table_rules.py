"""What the tables of a dataset must say, given its manifest: each function raises ValueError for the first value that
cannot be right. All are vectorised; `shards/index.py` has types and ranges of the columns."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shards.images.config import PACKED_FORMATS
from shards.manifest import Manifest, ShardRecord
from shards.sample_rows import BlockTable, SampleRows
from shards.schema.config_values import shown_value

# Column, the pattern of its texts, and what is allowed in words.
_OUR_NAMES = (
    ("key", r"^[0-9]{10,}\z", "ten digits or more"),
    ("ext", rf"^({'|'.join(PACKED_FORMATS)})\z", ", ".join(PACKED_FORMATS)),
)
_OTHERS_NAMES = (("key", r"(?s)^.", "a name"), ("ext", r"^[^/\x00-\x1f\x7f]+\z", "a suffix without a path"))


def refuse_rows(rows: SampleRows, record: ShardRecord, *, num_classes: int) -> None:
    """Of a shard's index: as many samples as the manifest says, one behind the other in its tar, labels of classes."""
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
    """Of all columns of a shard's index: its rows are numbered, one weight per label or none, and names as packing
    writes them. Keys and suffixes in tars made by others are their own."""
    rows = np.arange(index.num_rows)
    _refuse_others(index.column("shard").to_numpy(), np.full(index.num_rows, shard), "shard")
    _refuse_others(index.column("row").to_numpy(), rows, "row")
    num_labels, num_weights = (_lengths(index.column(name)) for name in ("labels", "weights"))
    if (row := _first((num_weights != 0) & (num_weights != num_labels))) is not None:
        raise ValueError(f"row {row} has {num_weights[row]} weights; allowed: {num_labels[row]}, or none")
    for name, pattern, allowed in _OUR_NAMES if is_ours else _OTHERS_NAMES:
        column = index.column(name)
        if (row := _first(pc.invert(pc.match_substring_regex(column, pattern)).to_numpy())) is not None:
            raise ValueError(f"row {row} has {name} {shown_value(column[row].as_py())}; allowed: {allowed}")


def refuse_count(num_rows: int, record: ShardRecord) -> None:
    """Of a shard's index: one row per sample."""
    if num_rows != record.num_samples:
        raise ValueError(f"it has {num_rows} rows; allowed: {record.num_samples}, as the manifest says")


def refuse_blocks(blocks: BlockTable, manifest: Manifest) -> None:
    """Of the block table: it cuts each shard into blocks of `samples_per_block`, one behind the other in the tar."""
    most = manifest.samples_per_block
    num_samples = _column(manifest, "num_samples")
    a_shard = -(-num_samples // most)
    if blocks.shard.size != a_shard.sum():
        raise ValueError(f"it has {blocks.shard.size} blocks; allowed: {a_shard.sum()}, for the manifest's shards")
    shard = np.repeat(np.arange(num_samples.size), a_shard)
    before = (np.arange(shard.size) - np.repeat(np.cumsum(a_shard) - a_shard, a_shard)) * most
    _refuse_others(blocks.shard, shard, "shard")
    _refuse_others(blocks.first_sample_id, _column(manifest, "first_sample_id")[shard] + before, "first_sample_id")
    _refuse_others(blocks.num_samples, np.minimum(num_samples[shard] - before, most), "num_samples")
    most_bytes = _column(manifest, "num_bytes")[shard]
    wrong = (blocks.first_byte >= blocks.end_byte) | (blocks.end_byte > most_bytes)
    wrong[1:] |= (shard[1:] == shard[:-1]) & (blocks.first_byte[1:] < blocks.end_byte[:-1])
    if (place := _first(wrong)) is not None:
        found = f"block {place} is bytes {blocks.first_byte[place]} to {blocks.end_byte[place]} of shard {shard[place]}"
        raise ValueError(f"{found}; allowed: behind the block before it, and up to {most_bytes[place]}")


def refuse_labels(labels: pa.Table, *, num_classes: int) -> None:
    """Of the classes: numbered from 0, as many as the manifest says, each with a name of its own."""
    if labels.num_rows != num_classes:
        raise ValueError(f"it has {labels.num_rows} rows; allowed: {num_classes}, the classes of the manifest")
    _refuse_others(labels.column("label").to_numpy(), np.arange(num_classes), "label")
    names = labels.column("name").to_pylist()
    if len(set(names)) < len(names):
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the class {shown_value(twice)} is there twice; allowed: each name once")


def refuse_block_reads(blocks: BlockTable, rows: SampleRows, first_sample_id: int) -> None:
    """Of rows that begin with `first_sample_id` and are of one block: their bytes lie in it, too. The block table alone
    bounds what a reader holds."""
    block = int(np.searchsorted(blocks.first_sample_id, first_sample_id, side="right")) - 1
    first, end = int(rows.offset[0]), int(rows.offset[-1] + rows.size[-1])
    if first < blocks.first_byte[block] or end > blocks.end_byte[block]:
        allowed = f"{blocks.first_byte[block]} to {blocks.end_byte[block]}, those of their block"
        raise ValueError(f"samples from {first_sample_id} on are bytes {first} to {end}; allowed: {allowed}")


def _lengths(lists: pa.ChunkedArray) -> NDArray[np.int64]:
    found: NDArray[np.int64] = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
    return found


def _column(manifest: Manifest, name: str) -> NDArray[np.int64]:
    return np.array([getattr(shard, name) for shard in manifest.shards], dtype=np.int64)


def _refuse_others(found: NDArray[np.int64] | NDArray[np.int32], expected: NDArray[np.int64], name: str) -> None:
    if (place := _first(found != expected)) is not None:
        raise ValueError(f"row {place} has {name} {found[place]}; allowed: {expected[place]}")


def _first(wrong: NDArray[np.bool_]) -> int | None:
    """The first place that is true."""
    return int(wrong.argmax()) if wrong.any() else None
