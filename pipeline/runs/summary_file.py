"""Keeps a summary of a run's long metrics.jsonl (what `curves.py` reads from it) beside it, in metrics.summary.

The file's first line is the sha256 of everything after it. The second is a JSON object. Arrays follow, as little-endian
int64 and float64. A summary is used only if metrics.jsonl still begins with the bytes that the summary was made from;
the lines after those bytes are then added. Otherwise the summary is made again. A reader that may not write to the
folder reads the whole file each time.
"""

import hashlib
import json
import logging
import os
import sys
from array import array
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

from pipeline.runs.curves import (
    MOST_CURVES,
    MOST_KEPT_BYTES,
    MOST_POINTS,
    MOST_SCORES,
    NO_CURVES,
    Curves,
    Growing,
    Means,
    Reading,
)
from shards.config_values import Range
from shards.errors import InvalidDataError
from shards.files.local_files import is_finite, is_step, object_in, open_local_file, read_local_file, write_whole
from shards.files.typed_json import read_record

log = logging.getLogger(__name__)
NAME = "metrics.summary"
_LEAST_LINES = MOST_POINTS  # shorter files are read as fast as their summary
_FORMAT = 1
_EDGE_BYTES = 1 << 16
_READ_BYTES = 1 << 22
_MOST_ARRAY = 2 * MOST_POINTS
_MOST_BYTES = 16 * _MOST_ARRAY * (MOST_CURVES + 2) + MOST_KEPT_BYTES * 2 * MOST_SCORES
_MOST_INT = (1 << 62) - 1


@dataclass(frozen=True, kw_only=True)
class _OfCurve:
    """A curve in the header. `num_points`: the length of its arrays of steps and values."""

    name: str
    num_points: Annotated[int, Range(0, _MOST_ARRAY)]
    num_not_finite: Annotated[int, Range(0, _MOST_INT)]
    shift: Annotated[int, Range(0, 62)]


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """A line that is kept. `text`: the line itself."""

    why: str
    number: Annotated[int, Range(0, _MOST_INT)]
    text: str


@dataclass(frozen=True, kw_only=True)
class _Header:
    """What a summary says about itself, and about the bytes that it was made from: their number, their crc32, and
    `edges`, the sha256 of the first and the last of them. `inode` and `modified_ns` are those of metrics.jsonl when it
    was read."""

    format: Annotated[int, Range(_FORMAT, _FORMAT)]
    inode: int
    modified_ns: int
    num_bytes: Annotated[int, Range(0, _MOST_INT)]
    crc32: Annotated[int, Range(0, 0xFFFFFFFF)]
    edges: str
    num_lines: Annotated[int, Range(0, _MOST_INT)]
    num_unusable: Annotated[int, Range(0, _MOST_INT)]
    num_repeated: Annotated[int, Range(0, _MOST_INT)]
    last: Annotated[int, Range(-1, _MOST_INT)]
    curves: tuple[_OfCurve, ...]
    num_losses: Annotated[int, Range(0, _MOST_ARRAY)]
    losses_shift: Annotated[int, Range(0, 62)]
    kept: tuple[_Kept, ...]


def read_curves(path: Path) -> Curves:
    """Returns the curves in a run's metrics.jsonl, which another process may be writing; no curves if it is missing.
    Raises OSError if it cannot be read, and InvalidDataError if it is not a regular file.

    If the file is long, its summary is used, and written if the folder allows that."""
    summary = path.with_name(NAME)
    try:
        file = open_local_file(path)
    except FileNotFoundError:
        return NO_CURVES
    with file:
        reading = _from_summary(summary, file) or Reading()
        before = reading.num_lines
        file.seek(reading.num_bytes)
        reading.read(file)
        if reading.num_lines - before >= _LEAST_LINES:
            with suppress(OSError):
                write_whole(summary, _encoded(reading, file))
    return reading.curves()


def _from_summary(path: Path, file: BufferedReader) -> Reading | None:
    """Returns what the summary says; None if it is missing, damaged, or was not made from the beginning of this
    file."""
    try:
        header, reading = _decoded(read_local_file(path, most_bytes=_MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, InvalidDataError) as error:
        log.info("%s is made again: %s", path, error)
        return None
    status = os.fstat(file.fileno())
    is_alike = status.st_size >= header.num_bytes and _edges(file, header.num_bytes) == header.edges
    has_only_grown = status.st_size > header.num_bytes or status.st_mtime_ns == header.modified_ns
    is_same = status.st_ino == header.inode and has_only_grown
    if is_alike and (is_same or _checksum(file, header.num_bytes) == header.crc32):
        return reading
    log.info("%s is made again: it is of other metrics", path)
    return None


def _edges(file: BufferedReader, num_bytes: int) -> str:
    """Returns the sha256 of the first and the last 64 KiB of the first `num_bytes` of a file."""
    file.seek(0)
    digest = hashlib.sha256(file.read(min(num_bytes, _EDGE_BYTES)))
    file.seek(max(0, num_bytes - _EDGE_BYTES))
    digest.update(file.read(min(num_bytes, _EDGE_BYTES)))
    return digest.hexdigest()


def _checksum(file: BufferedReader, num_bytes: int) -> int:
    from isal.isal_zlib import crc32  # noqa: PLC0415 - needed only if the file was replaced

    found = 0
    file.seek(0)
    while num_bytes and (data := file.read(min(num_bytes, _READ_BYTES))):
        found = crc32(data, found)
        num_bytes -= len(data)
    return found


def _encoded(reading: Reading, file: BufferedReader) -> bytes:
    """Returns the summary of a file that was read."""
    status = os.fstat(file.fileno())
    losses, curves = reading.losses, reading.grown
    header = {
        "format": _FORMAT,
        "inode": status.st_ino,
        "modified_ns": status.st_mtime_ns,
        "num_bytes": reading.num_bytes,
        "crc32": reading.crc32,
        "edges": _edges(file, reading.num_bytes),
        **{name: getattr(reading, name) for name in ("num_lines", "num_unusable", "num_repeated", "last")},
        "curves": [
            {
                "name": name,
                "num_points": len(one.steps),
                "num_not_finite": one.num_not_finite,
                "shift": one.shift,
            }
            for name, one in curves.items()
        ],
        "num_losses": len(losses.steps),
        "losses_shift": losses.shift,
        "kept": [{"why": why, "number": at, "text": json.dumps(line)} for why, (at, line) in reading.kept.items()],
    }
    arrays: list[array[Any]] = [losses.steps, losses.sums, losses.counts]
    for one in curves.values():
        arrays += [one.steps, one.values]
    body = json.dumps(header).encode() + b"\n" + b"".join(_little(each).tobytes() for each in arrays)
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _little(values: "array[Any]") -> "array[Any]":
    """Converts values from the machine's byte order to little-endian, or back: on a big-endian machine, swaps their
    bytes."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values


def _decoded(data: bytes) -> tuple[_Header, Reading]:
    """Returns the header and the content of a summary. Raises ValueError if anything in it is wrong."""
    digest, _, body = data.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise ValueError("its digest does not fit")
    first, _, rest = body.partition(b"\n")
    header = read_record(_Header, first)
    arrays = _Arrays(rest)
    losses = Means(
        steps=arrays.ints(header.num_losses),
        sums=arrays.floats(header.num_losses),
        counts=arrays.ints(header.num_losses),
        shift=header.losses_shift,
    )
    grown = {}
    for one in header.curves:
        steps, values = arrays.ints(one.num_points), arrays.floats(one.num_points)
        if any(before >= after for before, after in pairwise(steps)):
            raise ValueError(f"the steps of {one.name!r} do not ascend")
        grown[one.name] = Growing(steps=steps, values=values, num_not_finite=one.num_not_finite, shift=one.shift)
    arrays.end()
    if min(losses.counts, default=1) < 1 or len(grown) > MOST_CURVES or len(grown) != len(header.curves):
        raise ValueError("its counts or its curves cannot be right")
    kept = {}
    for each in header.kept:
        line = object_in(each.text.encode())
        if line is None or not is_step(line.get("step")):
            raise ValueError(f"line {each.number} is no line of metrics")
        kind, _, score = each.why.partition(" ")
        if kind == "best" and not is_finite(line.get(score)):
            raise ValueError(f"line {each.number} is kept for {score!r}, which it does not have")
        kept[each.why] = each.number, line
    names = ("num_lines", "num_unusable", "num_repeated", "last", "num_bytes", "crc32")
    return header, Reading(grown=grown, losses=losses, kept=kept, **{name: getattr(header, name) for name in names})


class _Arrays:
    """Takes one array after another from the bytes after the header. Raises ValueError for values that no summary
    has."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = memoryview(data), 0

    def ints(self, number: int) -> "array[int]":
        """Returns the next int64 values, all of which are steps or counts."""
        values = self._next("q", number)
        if number and not (min(values) >= 0 and max(values) <= _MOST_INT):
            raise ValueError("a step or a count is out of range")
        return values

    def floats(self, number: int) -> "array[float]":
        """Returns the next float64 values, all of which are finite."""
        values = self._next("d", number)
        if not all(map(isfinite, values)):
            raise ValueError("a value is not finite")
        return values

    def end(self) -> None:
        """Raises ValueError if bytes are left."""
        if self._at != len(self._data):
            raise ValueError("it does not end with its last array")

    def _next(self, kind: str, number: int) -> "array[Any]":
        values: array[Any] = array(kind)
        part = self._data[self._at : self._at + 8 * number]
        if len(part) != 8 * number:
            raise ValueError("it is too short")
        values.frombytes(part)
        self._at += len(part)
        return _little(values)
