"""Plans how to read many short pieces of rank files in few requests. Pure.

A rank's file holds its fragments one after the other, each with all of its slots. A slot, a group of tensors or another
rank needs many short pieces that lie close to each other, while a request costs as much as some megabytes. So a plan
joins them into a few large ranges that read no byte twice. Ranges consist of whole parts, which have the checksums.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_GAP_BYTES = 4 << 20  # between two pieces that one request reads: about what a request to S3 costs


@dataclass(frozen=True, kw_only=True)
class FilePieces:
    """Bytes begins..ends-1 of files, and where they go: to byte `ats` of the target with the number `targets`.

    `names`: all files, of which `files` are the numbers. All others are int64[pieces].
    """

    names: Sequence[str]
    files: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    targets: NDArray[np.int64]
    ats: NDArray[np.int64]

    def chosen(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> "FilePieces":
        """These of the pieces."""
        parts = (self.files, self.begins, self.ends, self.targets, self.ats)
        files, begins, ends, targets, ats = (part[which] for part in parts)
        return replace(self, files=files, begins=begins, ends=ends, targets=targets, ats=ats)


@dataclass(frozen=True, kw_only=True)
class PartRange:
    """Parts first..end-1 of a file, and the numbers of the pieces that lie in them, wholly or with an end."""

    file: str
    first: int
    end: int
    pieces: NDArray[np.int64]


def plan_ranges(pieces: FilePieces, part_bytes: Mapping[str, int], *, most_bytes: int) -> Iterator[PartRange]:
    """The ranges that hold all pieces, file by file. Each has at most `most_bytes`, or a single part."""
    order = np.lexsort((pieces.begins, pieces.files))
    order = order[pieces.ends[order] > pieces.begins[order]]  # an empty tensor has no bytes
    numbers, lows = np.unique(pieces.files[order], return_index=True)
    for number, (low, high) in zip(numbers.tolist(), pairwise([*lows.tolist(), order.size]), strict=True):
        own, name = order[low:high], pieces.names[number]
        size = part_bytes[name]
        most_parts = max(1, most_bytes // size)
        parts = np.stack([pieces.begins[own] // size, -(-pieces.ends[own] // size)])
        yield from _ranges_of(name, own, parts, most_parts, _GAP_BYTES // size)


def _ranges_of(
    name: str, own: NDArray[np.int64], parts: NDArray[np.int64], most_parts: int, gap: int
) -> Iterator[PartRange]:
    """The ranges of one file. `own`: its pieces, in rising order of their first part. `parts` int64[2, pieces]: the
    first part of each, and the one after its last."""
    firsts, ends = parts
    reached = np.maximum.accumulate(ends)
    breaks = np.flatnonzero(firsts[1:] > reached[:-1] + gap) + 1
    for low, high in zip([0, *breaks.tolist()], [*breaks.tolist(), own.size], strict=True):
        last = int(reached[high - 1])
        for first in range(int(firsts[low]), last, most_parts):
            end = min(first + most_parts, last)
            is_inside = (firsts[low:high] < end) & (ends[low:high] > first)
            if is_inside.any():
                yield PartRange(file=name, first=first, end=end, pieces=own[low:high][is_inside])
