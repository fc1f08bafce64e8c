"""What reading needs of a dataset's tables, as arrays: the rows of a shard's index, and the places of all blocks."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NO_WEIGHT = -1.0
MOST_GAP_BYTES = 256 << 10  # that are read and thrown away to save a request


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

    def reads(self) -> NDArray[np.int64]:
        """int64[n]: the first row of each range to read. One range brings all rows that lie together in the tar, and
        those with less than MOST_GAP_BYTES between them."""
        gaps = self.offset[1:] - (self.offset + self.size)[:-1]
        return np.concatenate([[0], np.flatnonzero(gaps > MOST_GAP_BYTES) + 1])


ONE_A_SAMPLE = ("offset", "size", "height", "width", "orientation", "crc32")


@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """Every block's place: bytes first_byte..end_byte-1 of its shard are its samples with their headers. `read_bytes`:
    how many of them are read at most, if not all."""

    shard: NDArray[np.int32]
    first_byte: NDArray[np.int64]
    end_byte: NDArray[np.int64]
    first_sample_id: NDArray[np.int64]
    num_samples: NDArray[np.int64]
    read_bytes: NDArray[np.int64] | None = None

    @property
    def most_bytes(self) -> NDArray[np.int64]:
        """int64[num_blocks]: bytes of each block that are read at most."""
        return self.end_byte - self.first_byte if self.read_bytes is None else self.read_bytes
