"""The rows of a shard's index and the places of all blocks, as arrays for reading.

The `refuse_` functions compare these arrays, and other columns of a dataset's tables, with the manifest. They are
vectorised and raise ValueError; the caller adds the file's name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shards.config_values import shown_value
from shards.images.config import PACKED_FORMATS
from shards.manifest import Manifest, ShardRecord
from shards.tables import list_lengths, numbers

NO_WEIGHT = -1.0
MOST_GAP_BYTES = 256 << 10  # gaps up to this size are read too, to save a request
ONE_A_SAMPLE = ("offset", "size", "height", "width", "orientation", "crc32")
# The types of these columns in rows.bin. An image has less than 2 GiB.
_STORED = {"offset": "<i8", "size": "<u4", "height": "<i4", "width": "<i4", "crc32": "<u4", "orientation": "i1"}
_STORED_NUMBER, _STORED_WEIGHT = "<i4", "<f4"
# A column, the pattern of its texts, and what is allowed, in words.
_OUR_NAMES = (
    ("key", r"^[0-9]{10,}\z", "ten digits or more"),
    ("ext", rf"^({'|'.join(PACKED_FORMATS)})\z", ", ".join(PACKED_FORMATS)),
)
_OTHERS_NAMES = (("key", r"(?s)^.", "a name"), ("ext", r"^[^/\x00-\x1f\x7f]+\z", "a suffix without a path"))
_MOST_ROW_BYTES = 1 << 20  # per sample in rows.bin: 131,072 labels with weights


@dataclass(frozen=True, kw_only=True)
class SampleRows:
    """The columns of a shard's index that reading samples needs, as arrays, one element per sample.

    The labels of row r are label_values[label_ends[r] : label_ends[r + 1]]. `weight_values` has their weights in the
    same places: NO_WEIGHT for a label without one. It is empty if no row has weights.
    """

    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    height: NDArray[np.int32]
    width: NDArray[np.int32]
    orientation: NDArray[np.int8]
    crc32: NDArray[np.uint32]
    label_ends: NDArray[np.int64]
    label_values: NDArray[np.int32]
    weight_values: NDArray[np.float32]

    @property
    def num_bytes(self) -> int:
        """The bytes of memory that the arrays take."""
        return sum(array.nbytes for array in vars(self).values())

    def labels_of(self, row: int) -> tuple[int, ...]:
        """Returns the labels of a sample."""
        return tuple(self.label_values[self.label_ends[row] : self.label_ends[row + 1]].tolist())

    def weights_of(self, row: int) -> tuple[float, ...]:
        """Returns the weights of a sample's labels, one per label; empty if it has none."""
        own: list[float] = self.weight_values[self.label_ends[row] : self.label_ends[row + 1]].tolist()
        return () if NO_WEIGHT in own[:1] else tuple(own)

    def slice(self, first: int, end: int) -> "SampleRows":
        """Returns copies of rows first..end-1, so that the other rows can be freed."""
        ends = self.label_ends[first : end + 1]
        values = self.label_values[ends[0] : ends[-1]].copy()
        weights = self.weight_values[ends[0] : ends[-1]].copy()
        columns = {name: getattr(self, name)[first:end].copy() for name in ONE_A_SAMPLE}
        return SampleRows(**columns, label_ends=ends - ends[0], label_values=values, weight_values=weights)

    def take(self, rows: NDArray[np.int64]) -> "SampleRows":
        """Returns copies of these rows."""
        nums = np.diff(self.label_ends)[rows]
        ends = np.concatenate([[0], np.cumsum(nums)])
        labels = np.repeat(self.label_ends[rows] - ends[:-1], nums) + np.arange(ends[-1])
        return SampleRows(
            **{name: getattr(self, name)[rows] for name in ONE_A_SAMPLE},
            label_ends=ends,
            label_values=self.label_values[labels],
            weight_values=self.weight_values[labels] if self.weight_values.size else self.weight_values,
        )

    def to_bytes(self) -> bytes:
        """Returns the rows in the form of rows.bin: column by column, then the labels and, if there are any, their
        weights."""
        columns = [getattr(self, name).astype(kind) for name, kind in _STORED.items()]
        columns += [np.diff(self.label_ends).astype(_STORED_NUMBER), self.label_values.astype(_STORED_NUMBER)]
        return b"".join(column.tobytes() for column in (*columns, self.weight_values.astype(_STORED_WEIGHT)))

    @staticmethod
    def from_bytes(data: bytes | memoryview, num_samples: int) -> "SampleRows":
        """Reads what `to_bytes` wrote. Raises ValueError if the bytes are not those of `num_samples` rows; values are
        not checked."""
        columns, begin = dict[str, NDArray[Any]](), 0
        for name, kind in (_STORED | {"num_labels": _STORED_NUMBER}).items():
            end = begin + num_samples * np.dtype(kind).itemsize
            columns[name], begin = np.frombuffer(data[begin:end], dtype=kind), end
        num_labels = columns.pop("num_labels")
        ends = np.zeros(num_samples + 1, dtype=np.int64)
        if num_labels.size == num_samples and not (num_labels < 0).any():
            np.cumsum(num_labels, out=ends[1:], dtype=np.int64)
        of_labels = 4 * int(ends[-1])
        if num_labels.size != num_samples or len(data) - begin not in (of_labels, 2 * of_labels):
            raise ValueError(f"{len(data)} bytes are not those of {num_samples} samples")
        return SampleRows(
            **columns | {"size": columns["size"].astype(np.int64)},
            label_ends=ends,
            label_values=np.frombuffer(data[begin : begin + of_labels], dtype=_STORED_NUMBER),
            weight_values=np.frombuffer(data[begin + of_labels :], dtype=_STORED_WEIGHT),
        )

    @staticmethod
    def joined(parts: Sequence["SampleRows"]) -> "SampleRows":
        """Returns the rows of all parts, one part after another."""
        if len(parts) == 1:
            return parts[0]
        has_weights = any(part.weight_values.size for part in parts)
        none = [np.full(part.label_values.size, NO_WEIGHT, np.float32) for part in parts]
        weights = [part.weight_values if part.weight_values.size else no for part, no in zip(parts, none, strict=True)]
        ends = np.cumsum(np.concatenate([[0], *(np.diff(part.label_ends) for part in parts)]), dtype=np.int64)
        return SampleRows(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in ONE_A_SAMPLE},
            label_ends=ends,
            label_values=np.concatenate([part.label_values for part in parts]),
            weight_values=np.concatenate(weights) if has_weights else parts[0].weight_values,
        )

    def reads(self) -> NDArray[np.int64]:
        """Returns the first row of each range to read: int64[n]. A range covers rows that are next to each other in the
        tar, or have gaps of at most MOST_GAP_BYTES between them."""
        gaps = self.offset[1:] - (self.offset + self.size)[:-1]
        return np.concatenate([[0], np.flatnonzero(gaps > MOST_GAP_BYTES) + 1])


@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """The place of every block: bytes first_byte..end_byte-1 of its shard are its samples with their tar headers.

    `read_bytes`: how many bytes of each block are read, if not all. `rows_end`, `rows_crc32`: the end of a block's rows
    in rows.bin, where those of the next block begin, and their checksum; None in a dataset without that file.
    """

    shard: NDArray[np.int32]
    first_byte: NDArray[np.int64]
    end_byte: NDArray[np.int64]
    first_sample_id: NDArray[np.int64]
    num_samples: NDArray[np.int64]
    read_bytes: NDArray[np.int64] | None = None
    rows_end: NDArray[np.int64] | None = None
    rows_crc32: NDArray[np.uint32] | None = None

    @property
    def most_bytes(self) -> NDArray[np.int64]:
        """int64[num_blocks]: the most bytes of each block that are read."""
        return self.end_byte - self.first_byte if self.read_bytes is None else self.read_bytes


def refuse_rows(rows: SampleRows, record: ShardRecord, *, num_classes: int) -> None:
    """Raises ValueError unless a shard's index has as many samples as the manifest says, in rising order within the
    tar, with labels below `num_classes`."""
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
    """Checks the other columns of a shard's index. Raises ValueError unless rows are numbered, weights are one per
    label or missing, and names have the form that packing writes (`is_ours`) or a form that tars made by others may
    have."""
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
    """Raises ValueError unless a shard's index has one row per sample."""
    if num_rows != record.num_samples:
        raise ValueError(f"it has {num_rows} rows; allowed: {record.num_samples}, as the manifest says")


def refuse_blocks(blocks: BlockTable, manifest: Manifest) -> None:
    """Raises ValueError unless a block table divides each shard into blocks of `samples_per_block`, one after another
    in the tar."""
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
        raise ValueError(f"{found}; allowed: after the block before it, and up to {most_bytes[place]}")
    if blocks.rows_end is not None:
        _refuse_row_places(blocks.rows_end, blocks.num_samples)


def _refuse_row_places(rows_end: NDArray[np.int64], num_samples: NDArray[np.int64]) -> None:
    """Raises ValueError if a block would have no bytes in rows.bin, or more than its rows can have."""
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
    """Raises ValueError unless the table of classes has as many classes as the manifest says, numbered from 0, with
    different names."""
    if labels.num_rows != num_classes:
        raise ValueError(f"it has {labels.num_rows} rows; allowed: {num_classes}, the classes of the manifest")
    _refuse_others(numbers(labels.column("label")), np.arange(num_classes), "label")
    names = labels.column("name").to_pylist()
    if len(set(names)) < len(names):
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the class {shown_value(twice)} is there twice; allowed: each name once")


def refuse_block_reads(blocks: BlockTable, rows: SampleRows, first_sample_id: int) -> None:
    """Raises ValueError unless the bytes of these rows, which are of one block and begin at `first_sample_id`, are
    inside the block. Readers limit their memory by the block table alone."""
    block = int(np.searchsorted(blocks.first_sample_id, first_sample_id, side="right")) - 1
    first, end = int(rows.offset[0]), int(rows.offset[-1] + rows.size[-1])
    if first < blocks.first_byte[block] or end > blocks.end_byte[block]:
        allowed = f"{blocks.first_byte[block]} to {blocks.end_byte[block]}, those of their block"
        raise ValueError(f"samples from {first_sample_id} on are bytes {first} to {end}; allowed: {allowed}")


def _refuse_others(found: NDArray[np.int64] | NDArray[np.int32], expected: NDArray[np.int64], name: str) -> None:
    if (place := _first(found != expected)) is not None:
        raise ValueError(f"row {place} has {name} {found[place]}; allowed: {expected[place]}")


def _first(wrong: NDArray[np.bool_]) -> int | None:
    """Returns the first index whose value is true; None if there is none."""
    return int(wrong.argmax()) if wrong.any() else None
