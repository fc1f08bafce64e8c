"""Makes histograms over the index of a dataset, shard by shard, in memory that does not grow with the dataset."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

# Bins per octave, and the number of octaves: sides from 1 to 2**20 pixels, 1 to 2**40 bytes, width / height from 1:16
# to 16:1.
SIDE_STEPS, SIDE_OCTAVES = 8, 20
BYTE_STEPS, BYTE_OCTAVES = 16, 40
ASPECT_STEPS, ASPECT_OCTAVES = 16, 8
MOST_LABELS = 64
SIZES_HELD = 1 << 17

TALLY_COLUMNS = ("size", "ext", "height", "width", "labels", "orientation")
_SIDEWAYS = 5  # this and higher EXIF orientations exchange height and width


def _zeros(*shape: int) -> NDArray[np.int64]:
    return np.zeros(shape, np.int64)


class Sizes:
    """Counts of (height, width). If there are more than SIZES_HELD different sizes, the rare ones are forgotten."""

    def __init__(self) -> None:
        self._keys, self._counts = _zeros(0), _zeros(0)
        self._new: list[NDArray[np.int64]] = []
        self._num_new = 0

    def add(self, height: NDArray[np.int64], width: NDArray[np.int64]) -> None:
        """Adds some images. They are counted many at a time, since each count sorts all sizes."""
        self._new.append(height << 32 | width)
        self._num_new += len(height)
        if self._num_new >= 4 * SIZES_HELD:
            self._count()

    def most_common(self, number: int) -> list[tuple[tuple[int, int], int]]:
        """Returns ((height, width), count) of the most common sizes, with the most common first."""
        self._count()
        order = np.argsort(-self._counts, kind="stable")[:number]
        pairs = zip(self._keys[order].tolist(), self._counts[order].tolist(), strict=True)
        return [((key >> 32, key & 0xFFFFFFFF), count) for key, count in pairs]

    def __len__(self) -> int:
        self._count()
        return len(self._keys)

    def _count(self) -> None:
        if not self._new:
            return
        keys, new = np.unique(np.concatenate(self._new), return_counts=True)
        self._new, self._num_new = [], 0
        held, where = np.unique(np.concatenate([self._keys, keys]), return_inverse=True)
        counts = _zeros(len(held))
        np.add.at(counts, where, np.concatenate([self._counts, new]))
        if len(held) > SIZES_HELD:
            kept = np.sort(np.argsort(-counts, kind="stable")[: SIZES_HELD // 2])
            held, counts = held[kept], counts[kept]
        self._keys, self._counts = held, counts


@dataclass(kw_only=True)
class Tally:
    """The counts of the images so far. `top_classes`: the label ids whose co-occurrence is counted.

    `sides[height, width]`: the number of images of this size, in eighths of an octave. It is the size as displayed,
    with the EXIF orientation applied. `together[i, j]`: the number of samples that have both top class i and top class
    j.
    """

    top_classes: NDArray[np.int64]
    num_classes: int
    num_images: int = 0
    num_bytes: int = 0
    bytes_range: tuple[int, int] = (1 << 62, 0)
    sides: NDArray[np.int64] = field(default_factory=lambda: _zeros(*[SIDE_STEPS * SIDE_OCTAVES] * 2))
    byte_sizes: NDArray[np.int64] = field(default_factory=lambda: _zeros(BYTE_STEPS * BYTE_OCTAVES))
    aspects: NDArray[np.int64] = field(default_factory=lambda: _zeros(ASPECT_STEPS * ASPECT_OCTAVES))
    labels_a_sample: NDArray[np.int64] = field(default_factory=lambda: _zeros(MOST_LABELS + 1))
    orientations: NDArray[np.int64] = field(default_factory=lambda: _zeros(9))
    together: NDArray[np.int64] = field(init=False)
    sizes: Sizes = field(default_factory=Sizes)
    exts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.together = _zeros(len(self.top_classes), len(self.top_classes))
        # int64[num_classes]: the place of a label id among the top classes, -1 for the others.
        self._place = np.full(self.num_classes, -1, np.int64)
        self._place[self.top_classes] = np.arange(len(self.top_classes))

    @property
    def is_multi_label(self) -> bool:
        """Whether any sample has more than one label."""
        return bool(self.labels_a_sample[2:].any())

    def add(self, table: pa.Table) -> None:
        """Adds the rows of one index file, with TALLY_COLUMNS."""
        if not table.num_rows:
            return
        self._add_bytes(table.column("size").to_numpy())
        self._add_sides(*self._upright(table))
        self._add_labels(table.column("labels").combine_chunks())
        for item in pc.value_counts(table.column("ext")).to_pylist():
            self.exts[item["values"]] += item["counts"]
        self.num_images += table.num_rows

    def _upright(self, table: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        height, width = (table.column(name).to_numpy().astype(np.int64) for name in ("height", "width"))
        orientation = table.column("orientation").to_numpy().astype(np.int64).clip(1, 8)
        self.orientations += np.bincount(orientation, minlength=9)
        is_sideways = orientation >= _SIDEWAYS
        return np.where(is_sideways, width, height), np.where(is_sideways, height, width)

    def _add_bytes(self, size: NDArray[np.int64]) -> None:
        self.num_bytes += int(size.sum())
        self.bytes_range = min(self.bytes_range[0], int(size.min())), max(self.bytes_range[1], int(size.max()))
        self.byte_sizes += np.bincount(_bins(size, BYTE_STEPS, BYTE_OCTAVES), minlength=len(self.byte_sizes))

    def _add_sides(self, height: NDArray[np.int64], width: NDArray[np.int64]) -> None:
        side_bins = len(self.sides)
        rows, columns = (_bins(side, SIDE_STEPS, SIDE_OCTAVES) for side in (height, width))
        self.sides += np.bincount(rows * side_bins + columns, minlength=side_bins**2).reshape(side_bins, side_bins)
        # shifted by half a bin, so that square images are in the middle of a bin
        ratio = np.maximum(width, 1) / np.maximum(height, 1) * 2 ** (ASPECT_OCTAVES // 2 + 0.5 / ASPECT_STEPS)
        self.aspects += np.bincount(_bins(ratio, ASPECT_STEPS, ASPECT_OCTAVES), minlength=len(self.aspects))
        self.sizes.add(height, width)

    def _add_labels(self, labels: pa.ListArray) -> None:
        num_labels = pc.list_value_length(labels).fill_null(0).to_numpy(zero_copy_only=False)
        self.labels_a_sample += np.bincount(num_labels.clip(0, MOST_LABELS), minlength=MOST_LABELS + 1)
        values = labels.flatten().to_numpy(zero_copy_only=False)
        rows = np.repeat(np.arange(len(num_labels)), num_labels)
        is_known = (values >= 0) & (values < self.num_classes)
        rows, place = rows[is_known], self._place[values[is_known]]
        has_label = np.zeros((len(num_labels), len(self.top_classes)), np.bool_)
        has_label[rows[place >= 0], place[place >= 0]] = True
        for label in range(len(self.top_classes)):
            self.together[label] += has_label[has_label[:, label]].sum(axis=0)


def first_labels(labels: pa.ListArray) -> NDArray[np.int64]:
    """Returns the first label of each row; -1 if it has none."""
    num_labels = pc.list_value_length(labels).fill_null(0).to_numpy(zero_copy_only=False)
    values = labels.flatten().to_numpy(zero_copy_only=False)
    first = np.full(len(num_labels), -1, np.int64)
    starts = np.cumsum(num_labels) - num_labels
    first[num_labels > 0] = values[starts[num_labels > 0]]
    return first


def quantile(counts: NDArray[np.int64], share: float) -> float:
    """Returns the place in the histogram (in bins, with a fraction) below which this share of the values lies."""
    total = np.cumsum(counts)
    wanted = share * total[-1]
    place = int(np.searchsorted(total, wanted))
    before = int(total[place] - counts[place])
    return float(place + (wanted - before) / max(int(counts[place]), 1))


def _bins(values: NDArray[np.int64] | NDArray[np.float64], steps: int, octaves: int) -> NDArray[np.int64]:
    place: NDArray[np.float64] = np.floor(np.log2(np.maximum(values, 1)) * steps + 1e-9)
    return place.astype(np.int64).clip(0, steps * octaves - 1)
