"""Reads the rank files of one checkpoint. No byte is used before its checksum and its place have been compared.

`verify` reads a whole file, part by part, and keeps what there is room for, since a resumed rank mostly needs its own
file. What is read later is taken from there, or is read and compared again.

A rank's file holds its fragments one after the other, each with all of its slots. A slot, a group of tensors or another
rank needs many short pieces that lie close to each other, while a request costs as much as some megabytes. So a plan
joins them into a few large ranges that read no byte twice. Ranges consist of whole parts, which have the checksums.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.checkpoints.manifest import CheckpointManifest, FragmentLocation
from pipeline.checkpoints.rank_file_out import FileRecord
from pipeline.models.weights.safetensors import LENGTH_BYTES, TensorPlace, header_length, read_header
from pipeline.models.weights.safetensors_head import FLOAT_BYTES
from shards.errors import StorageError
from shards.pool import Pool
from shards.schema.config_values import shown_value
from shards.store import MissingObjectError, Store

_GAP_BYTES = 4 << 20  # between two pieces that one request reads: about what a request to S3 costs


@dataclass(frozen=True, kw_only=True)
class ByteRange:
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


def plan_ranges(pieces: Sequence[ByteRange], part_bytes: Mapping[str, int], *, most_bytes: int) -> Iterator[PartRange]:
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


_READ_BYTES = 64 << 20  # of a file being verified, in one request
_RANGE_BYTES = 16 << 20  # of what is filled, in one request
_NUM_READERS = 8
_MOST_UNDER_WAY_BYTES = 128 << 20
_MOST_HELD_BYTES = 1 << 30  # enough for a share of many ranks' files; few ranks' large files are read twice


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Elements of a fragment, from `first` of its tensor on, to be copied into `target`, flat float32 on any device."""

    location: FragmentLocation
    first: int
    target: torch.Tensor

    @property
    def place(self) -> ByteRange:
        """The bytes of the file that hold them."""
        begin = self.location.offset + (self.first - self.location.start) * FLOAT_BYTES
        return ByteRange(file=self.location.file, begin=begin, end=begin + self.target.numel() * FLOAT_BYTES)

    def take(self, data: bytearray, *, begin: int) -> None:
        """Copies what there is of them in `data`, which begins at byte `begin` of the file."""
        place = self.place
        low, high = max(begin, place.begin), min(begin + len(data), place.end)
        source = torch.frombuffer(data, dtype=torch.uint8, count=high - low, offset=low - begin)
        self.target.view(torch.uint8)[low - place.begin : high - place.begin].copy_(source)


class RankFiles:
    """The files of the checkpoint with this manifest."""

    def __init__(self, store: Store, manifest: CheckpointManifest) -> None:
        self._store, self._manifest = store, manifest
        self._held: dict[tuple[str, int], bytes] = {}  # verified parts, the oldest first
        self._held_bytes = 0
        self._expected = _by_file(manifest)

    def verify(self, name: str) -> None:
        """ValueError, or what the store raises, unless the file has the bytes and the tensors of the manifest."""
        record = self._manifest.files[name]
        if self._store.size(self._path(name)) != record.num_bytes:
            raise ValueError(self._changed(name))
        if record.part_bytes > _MOST_HELD_BYTES:
            self._verify_whole(name, record)
        else:
            parts_at_once = max(1, _READ_BYTES // record.part_bytes)
            for first in range(0, len(record.sha256), parts_at_once):
                for number, part in self._checked(name, first, min(first + parts_at_once, len(record.sha256))).items():
                    self._hold(name, number, part, replace=False)
        self._refuse_other_tensors(name, record)

    def read(self, name: str, begin: int, end: int, *, hold: bool = True) -> bytearray:
        """Verified bytes begin..end-1 of a file. StorageError if they have changed since it was verified. `hold`: keep
        the parts that were read for the next time."""
        record = self._manifest.files[name]
        size = record.part_bytes
        if size > _MOST_HELD_BYTES:  # format 1 or 2 with one checksum for all of it
            return bytearray(self._store.read_range(self._path(name), begin, end))
        numbers = range(begin // size, -(-end // size))
        parts = {number: memoryview(self._held[name, number]) for number in numbers if (name, number) in self._held}
        missing = [number for number in numbers if number not in parts]
        if missing:
            try:
                read = self._checked(name, missing[0], missing[-1] + 1)
            except (ValueError, EOFError, MissingObjectError) as error:
                raise StorageError(f"{error}; it changed after it was verified") from error
            parts |= read
            for number, part in read.items() if hold else ():
                self._hold(name, number, part, replace=True)
        data = bytearray()
        for number in numbers:
            data += parts[number][max(0, begin - number * size) : end - number * size]
        return data

    def tensor(self, name: str, *, slot: str) -> torch.Tensor:
        """One whole logical tensor, float32, in its own shape."""
        return self.tensors([name], slot=slot)[name]

    def tensors(self, names: Sequence[str], *, slot: str) -> dict[str, torch.Tensor]:
        """Whole logical tensors, float32, in their own shapes."""
        shapes = {name: torch.Size(self._manifest.tensors[name].shape) for name in names}
        flat = {name: torch.empty(shape.numel()) for name, shape in shapes.items()}
        self.fill(
            Wanted(location=location, first=location.start, target=flat[name][location.start :][: location.length])
            for name in names
            for location in self._manifest.tensors[name].locations(slot)
        )
        return {name: flat[name].reshape(shape) for name, shape in shapes.items()}

    def fill(self, wanted: Iterable[Wanted]) -> None:
        """Copies all that is wanted: neighbouring pieces in one request, and some requests at a time. StorageError if a
        file has changed since it was verified."""
        pieces = list(wanted)
        for begin, data, numbers in self._ranges([piece.place for piece in pieces]):
            for number in numbers:
                pieces[number].take(data, begin=begin)

    def _ranges(self, places: Sequence[ByteRange]) -> Iterator[tuple[int, bytearray, list[int]]]:
        """Ranges with all of these places: the first byte of each, its verified bytes, and the places that lie in it.
        At most _MOST_UNDER_WAY_BYTES, or one range, are in memory."""
        files = self._manifest.files
        sizes = {n: _READ_BYTES if f.part_bytes > _MOST_HELD_BYTES else f.part_bytes for n, f in files.items()}
        waiting: deque[tuple[PartRange, Future[bytearray]]] = deque()
        most = max(1, _MOST_UNDER_WAY_BYTES // max([_RANGE_BYTES, *sizes.values()]))
        with closing(Pool(_NUM_READERS, name="checkpoint")) as pool:
            for each in plan_ranges(places, sizes, most_bytes=_RANGE_BYTES):
                begin, end = (number * sizes[each.file] for number in (each.first, each.end))
                end = min(end, files[each.file].num_bytes)
                waiting.append((each, pool.submit(partial(self.read, each.file, begin, end, hold=False))))
                if len(waiting) >= most:
                    yield _arrived(*waiting.popleft(), sizes)
            while waiting:
                yield _arrived(*waiting.popleft(), sizes)

    def _checked(self, name: str, first: int, end: int) -> dict[int, memoryview]:
        """The parts first..end-1 of a file, each compared with its checksum."""
        record = self._manifest.files[name]
        begin, size = first * record.part_bytes, record.part_bytes
        data = memoryview(self._store.read_range(self._path(name), begin, min(end * size, record.num_bytes)))
        parts = {number: data[number * size - begin : (number + 1) * size - begin] for number in range(first, end)}
        for number, part in parts.items():
            if hashlib.sha256(part).hexdigest() != record.sha256[number]:
                raise ValueError(self._changed(name))
        return parts

    def _verify_whole(self, name: str, record: FileRecord) -> None:
        """Compares a large file of format 1 or 2, which has one checksum, without keeping it."""
        digest = hashlib.sha256()
        for begin in range(0, record.num_bytes, _READ_BYTES):
            digest.update(self._store.read_range(self._path(name), begin, min(begin + _READ_BYTES, record.num_bytes)))
        if [digest.hexdigest()] != list(record.sha256):
            raise ValueError(self._changed(name))

    def _hold(self, name: str, number: int, part: memoryview, *, replace: bool) -> None:
        """Keeps a part if there is room, or in place of the oldest ones."""
        while replace and self._held and self._held_bytes + len(part) > _MOST_HELD_BYTES:
            self._held_bytes -= len(self._held.pop(next(iter(self._held))))
        if self._held_bytes + len(part) <= _MOST_HELD_BYTES and (name, number) not in self._held:
            self._held[name, number] = bytes(part)
            self._held_bytes += len(part)

    def _refuse_other_tensors(self, name: str, record: FileRecord) -> None:
        """ValueError unless the file's own header has the fragments of the manifest, and nothing else."""
        path, expected = self._path(name), self._expected[name]
        try:
            length = header_length(bytes(self.read(name, 0, LENGTH_BYTES)), num_bytes=record.num_bytes)
            header = bytes(self.read(name, LENGTH_BYTES, LENGTH_BYTES + length))
            found, _ = read_header(header, num_bytes=record.num_bytes)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if others := sorted(found.keys() ^ expected.keys()):
            where = "its header" if others[0] in found else "the manifest"
            raise ValueError(f"{path}: only {where} has {shown_value(others[0])}")
        for key, location in expected.items():
            end = location.offset + location.length * FLOAT_BYTES
            wanted = TensorPlace(dtype=torch.float32, shape=(location.length,), first=location.offset, end=end)
            if found[key] != wanted:
                raise ValueError(f"{path}: {shown_value(key)} is {found[key]}; in the manifest: {wanted}")

    def _path(self, name: str) -> str:
        return f"{self._manifest.id.folder}/{name}"

    def _changed(self, name: str) -> str:
        return f"{self._path(name)} does not have the bytes its manifest promises"


def _arrived(each: PartRange, data: Future[bytearray], sizes: Mapping[str, int]) -> tuple[int, bytearray, list[int]]:
    return each.first * sizes[each.file], data.result(), each.pieces.tolist()


def _by_file(manifest: CheckpointManifest) -> dict[str, dict[str, FragmentLocation]]:
    """The fragments in each file, by the names that its header has for them. ValueError for two of the same name."""
    found: dict[str, dict[str, FragmentLocation]] = {name: {} for name in manifest.files}
    for name, tensor in manifest.tensors.items():
        for slot, locations in tensor.slots.items():
            key = f"{slot}:{name}"
            for location in locations:
                if found[location.file].setdefault(key, location) is not location:
                    raise ValueError(f"{location.file} holds two fragments of {shown_value(key)}")
    return found
