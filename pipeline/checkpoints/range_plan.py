"""Which ranges of which files to read for many pieces of tensors: few and large, and no byte twice. Pure.

A rank's file holds its fragments one after the other, each with all of its slots. What a slot, a group of tensors or
another rank needs of a file are many short pieces close to each other, while a request costs as much as some megabytes.
Ranges consist of whole parts of their file, since each part has a checksum.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_GAP_BYTES = 4 << 20  # between two pieces that one request reads: about what a request to S3 costs


@dataclass(frozen=True, kw_only=True)
class Place:
    """Bytes begin..end-1 of a file."""

    file: str
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class PartRange:
    """Parts first..end-1 of a file, and the numbers of the pieces that lie in them, wholly or with an end."""

    file: str
    first: int
    end: int
    pieces: NDArray[np.int64]


def plan_ranges(pieces: Sequence[Place], part_bytes: Mapping[str, int], *, most_bytes: int) -> Iterator[PartRange]:
    """The ranges that hold all pieces, file by file. Each has at most `most_bytes`, or a single part."""
    names = sorted({piece.file for piece in pieces})
    numbers = {name: number for number, name in enumerate(names)}
    files = np.fromiter((numbers[piece.file] for piece in pieces), dtype=np.int64, count=len(pieces))
    begins = np.fromiter((piece.begin for piece in pieces), dtype=np.int64, count=len(pieces))
    ends = np.fromiter((piece.end for piece in pieces), dtype=np.int64, count=len(pieces))
    order = np.lexsort((begins, files))
    bounds = np.searchsorted(files[order], np.arange(len(names) + 1))
    for name, low, high in zip(names, bounds[:-1], bounds[1:], strict=True):
        own, size = order[low:high], part_bytes[name]
        own = own[ends[own] > begins[own]]  # an empty tensor has no bytes
        if own.size:
            most_parts = max(1, most_bytes // size)
            parts = np.stack([begins[own] // size, -(-ends[own] // size)])
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
