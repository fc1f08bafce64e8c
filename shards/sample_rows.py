"""What reading needs of a dataset's tables, as arrays: the rows of a shard's index, and the places of all blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NO_WEIGHT = -1.0
MOST_GAP_BYTES = 256 << 10  # that are read and thrown away to save a request
ONE_A_SAMPLE = ("offset", "size", "height", "width", "orientation", "crc32")
# How rows.bin has these columns. An image has less than 2 GiB.
_STORED = {"offset": "<i8", "size": "<u4", "height": "<i4", "width": "<i4", "crc32": "<u4", "orientation": "i1"}
_STORED_NUMBER, _STORED_WEIGHT = "<i4", "<f4"


@dataclass(frozen=True, kw_only=True)
class SampleRows:
    """The columns of a shard's index that reading samples needs, as arrays, one element per sample.

    The labels of row r are label_values[label_ends[r] : label_ends[r + 1]]. `weight_values` has their weights in the
    same places, NO_WEIGHT for a label without one; it is empty if no row has weights.
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
        """Memory of the arrays."""
        return sum(array.nbytes for array in vars(self).values())

    def labels_of(self, row: int) -> tuple[int, ...]:
        """The labels of a sample."""
        return tuple(self.label_values[self.label_ends[row] : self.label_ends[row + 1]].tolist())

    def weights_of(self, row: int) -> tuple[float, ...]:
        """The weights of a sample's labels, one per label; empty if it has none."""
        own: list[float] = self.weight_values[self.label_ends[row] : self.label_ends[row + 1]].tolist()
        return () if NO_WEIGHT in own[:1] else tuple(own)

    def slice(self, first: int, end: int) -> "SampleRows":
        """Copies of rows first..end-1, which keep nothing of the others in memory."""
        ends = self.label_ends[first : end + 1]
        values = self.label_values[ends[0] : ends[-1]].copy()
        weights = self.weight_values[ends[0] : ends[-1]].copy()
        columns = {name: getattr(self, name)[first:end].copy() for name in ONE_A_SAMPLE}
        return SampleRows(**columns, label_ends=ends - ends[0], label_values=values, weight_values=weights)

    def take(self, rows: NDArray[np.int64]) -> "SampleRows":
        """Copies of these rows."""
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
        """The rows as rows.bin has them: column by column, then the labels and, if there are any, their weights."""
        columns = [getattr(self, name).astype(kind) for name, kind in _STORED.items()]
        columns += [np.diff(self.label_ends).astype(_STORED_NUMBER), self.label_values.astype(_STORED_NUMBER)]
        return b"".join(column.tobytes() for column in (*columns, self.weight_values.astype(_STORED_WEIGHT)))

    @staticmethod
    def from_bytes(data: bytes | memoryview, num_samples: int) -> "SampleRows":
        """What `to_bytes` wrote. ValueError if the bytes are not those of as many rows; values are not checked."""
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
        """The rows of all parts, one behind the other."""
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
        """int64[n]: the first row of each range to read. One range brings all rows that lie together in the tar, and
        those with less than MOST_GAP_BYTES between them."""
        gaps = self.offset[1:] - (self.offset + self.size)[:-1]
        return np.concatenate([[0], np.flatnonzero(gaps > MOST_GAP_BYTES) + 1])


@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """Every block's place: bytes first_byte..end_byte-1 of its shard are its samples with their headers. `read_bytes`:
    how many of them are read at most, if not all.

    `rows_end` and `rows_crc32` are of the block's rows in rows.bin, which begin where those of the block before end;
    None in a dataset without that file.
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
        """int64[num_blocks]: bytes of each block that are read at most."""
        return self.end_byte - self.first_byte if self.read_bytes is None else self.read_bytes
