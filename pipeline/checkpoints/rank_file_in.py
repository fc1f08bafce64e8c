"""Reads the rank files of one checkpoint. No byte is used before its checksum and its place have been checked.

`verify` reads a whole file, part by part, and keeps as much of it in memory as there is room for, since a resumed rank
mostly needs its own file. Later reads take bytes from memory, or read and check them again.

A rank's file holds its fragments one after the other, each with all of its slots. Reading one slot, a group of tensors
or another rank's fragments needs many short pieces that lie close to each other, but a request costs as much as reading
some megabytes. So `plan_ranges` joins pieces into a few large ranges, which read no byte twice. Ranges consist of whole
parts, since checksums are per part.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.checkpoints.attempts import FAULTS
from pipeline.checkpoints.manifest import (
    MANIFEST_NAME,
    CheckpointId,
    CheckpointManifest,
    FragmentLocation,
    manifest_from_json,
)
from pipeline.checkpoints.rank_file_out import FileRecord, rank_of
from pipeline.models.weights.safetensors import LENGTH_BYTES, TensorPlace, header_length, read_header
from pipeline.models.weights.safetensors_head import FLOAT_BYTES
from shards.config_values import shown_value
from shards.errors import InvalidDataError, StorageError
from shards.pool import Pool
from shards.store import MissingObjectError, Store

_GAP_BYTES = 4 << 20  # the largest gap between two pieces that one request reads: about what a request to S3 costs
READ_BYTES = 64 << 20  # bytes per request while a file is verified
RANGE_BYTES = 16 << 20  # bytes per request while targets are filled
_NUM_READERS = 8
_MOST_UNDER_WAY_BYTES = 128 << 20
# Enough for a share if there are many ranks; with few ranks, their large files are read twice.
_MOST_HELD_BYTES = 1 << 30
_GROUP_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class FilePieces:
    """Pieces of files: bytes begins..ends-1 of file `files` go to byte `ats` of target `targets`.

    `names`: the names of all files. The other fields are int64[pieces]; `files` and `targets` are numbers of files and
    targets.
    """

    names: Sequence[str]
    files: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    targets: NDArray[np.int64]
    ats: NDArray[np.int64]

    def chosen(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> "FilePieces":
        """Returns these pieces alone."""
        parts = (self.files, self.begins, self.ends, self.targets, self.ats)
        files, begins, ends, targets, ats = (part[which] for part in parts)
        return replace(self, files=files, begins=begins, ends=ends, targets=targets, ats=ats)


@dataclass(frozen=True, kw_only=True)
class PartRange:
    """Parts first..end-1 of a file, and the numbers of the pieces that overlap them."""

    file: str
    first: int
    end: int
    pieces: NDArray[np.int64]


def plan_ranges(pieces: FilePieces, part_bytes: Mapping[str, int], *, most_bytes: int) -> Iterator[PartRange]:
    """Yields the ranges that hold all pieces, file by file. Each has at most `most_bytes`, or is a single part."""
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
    """Yields the ranges of one file. `own`: the numbers of its pieces, in rising order of their first part. `parts`,
    int64[2, pieces]: the first part of each piece, and the part after its last one."""
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


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A request to fill `target`, flat float32 on any device, with the elements of a tensor from number `first` on,
    which lie in the fragments of `location`."""

    location: FragmentLocation
    first: int
    target: torch.Tensor


def pieces_of(wanted: Sequence[Wanted], names: Sequence[str]) -> FilePieces:
    """Returns the pieces that are wanted, one for each file of a location. `names`: all files, in the order of their
    ranks."""
    numbers = {name: number for number, name in enumerate(names)}
    rows = []
    for number, each in enumerate(wanted):
        if num_elements := each.target.numel():
            place, low = each.location, each.first - each.location.start
            rows.append((number, numbers[place.file], place.offset, place.length, low, num_elements))
    targets, files, offsets, lengths, lows, counts = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    firsts = lows // lengths  # the number of the first file, among those of the location
    num_pieces = -(-(lows + counts) // lengths) - firsts
    row = np.repeat(np.arange(len(rows)), num_pieces)
    number = firsts[row] + np.arange(row.size) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    first = np.maximum(lows[row], number * lengths[row])
    end = np.minimum((lows + counts)[row], (number + 1) * lengths[row])
    begins = offsets[row] + (first - number * lengths[row]) * FLOAT_BYTES
    return FilePieces(
        names=names,
        files=files[row] + number,
        begins=begins,
        ends=begins + (end - first) * FLOAT_BYTES,
        targets=targets[row],
        ats=(first - lows[row]) * FLOAT_BYTES,
    )


class Targets:
    """Flat tensors, all on one device, seen as bytes to which pieces are copied."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        views = [tensor.view(torch.uint8) for tensor in tensors]
        self._is_on_cpu = all(view.device.type == "cpu" for view in views)
        self._views: Sequence[Any] = [view.numpy() for view in views] if self._is_on_cpu else views  # 10 times faster

    def take(self, pieces: FilePieces, data: bytearray, *, begin: int) -> None:
        """Copies the parts of these pieces that are in `data`, which begins at byte `begin` of their file."""
        lows, highs = np.maximum(pieces.begins, begin), np.minimum(pieces.ends, begin + len(data))
        ats = pieces.ats + lows - pieces.begins
        self.put(
            torch.frombuffer(data, dtype=torch.uint8), pieces.targets, ats=ats, lows=lows - begin, sizes=highs - lows
        )

    def put(
        self,
        source: torch.Tensor,
        targets: NDArray[np.int64],
        *,
        ats: NDArray[np.int64],
        lows: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> None:
        """For each target number in `targets`, copies bytes of `source` (uint8): `sizes` bytes from byte `lows` on, to
        byte `ats` of the target."""
        data: Any = source.cpu().numpy() if self._is_on_cpu else source
        rows = zip(targets.tolist(), ats.tolist(), lows.tolist(), sizes.tolist(), strict=True)
        for number, at, low, size in rows:
            self._views[number][at : at + size] = data[low : low + size]


class RankFiles:
    """The files of the checkpoint with this manifest. `names`: the names of all files, in the order of their ranks.
    `most_held_bytes`: how much of what was verified may be kept in memory for later reads; never less than 1 GiB."""

    def __init__(self, store: Store, manifest: CheckpointManifest, *, most_held_bytes: int = 0) -> None:
        self._store, self._manifest = store, manifest
        self._most_held_bytes = max(_MOST_HELD_BYTES, most_held_bytes)
        self._held: dict[tuple[str, int], bytes] = {}  # verified parts, the oldest first
        self._held_bytes = 0
        self._expected = _Expected(manifest)
        self.names = tuple(sorted(manifest.files, key=rank_of))

    def verify(self, name: str) -> None:
        """Raises ValueError, or what the store raises, unless the file has the bytes and the tensors that the manifest
        says."""
        self.verify_parts(name, 0, len(self._manifest.files[name].sha256))

    def verify_parts(self, name: str, first: int, end: int) -> None:
        """Verifies parts first..end-1 of the file. With the first part, it also verifies the file's size and its
        header."""
        record = self._manifest.files[name]
        if first == 0 and self._store.size(self._path(name)) != record.num_bytes:
            raise ValueError(self._changed(name))
        self._verify_range(name, first, end)
        if first == 0:
            self._refuse_other_tensors(name, record, verified=end)

    def _verify_range(self, name: str, first: int, end: int) -> None:
        parts_at_once = max(1, READ_BYTES // self._manifest.files[name].part_bytes)
        for begin in range(first, end, parts_at_once):
            for number, part in self._checked(name, begin, min(begin + parts_at_once, end)).items():
                self._hold(name, number, part, replace=False)

    def read(self, name: str, begin: int, end: int, *, hold: bool = True) -> bytearray:
        """Returns the verified bytes begin..end-1 of a file. Raises StorageError if they have changed since the file
        was verified. `hold`: whether to keep the parts that are read in memory."""
        record = self._manifest.files[name]
        size = record.part_bytes
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
        """Returns a whole logical tensor, float32, in its own shape."""
        return self.tensors([name], slot=slot)[name]

    def tensors(self, names: Sequence[str], *, slot: str) -> dict[str, torch.Tensor]:
        """Returns whole logical tensors, float32, in their own shapes."""
        shapes = {name: torch.Size(self._manifest.tensors[name].shape) for name in names}
        flat = {name: torch.empty(shape.numel()) for name, shape in shapes.items()}
        self.fill(
            Wanted(
                location=location, first=location.start, target=flat[name][location.start :][: location.num_elements]
            )
            for name in names
            for location in self._manifest.tensors[name].locations(slot)
        )
        return {name: flat[name].reshape(shape) for name, shape in shapes.items()}

    def fill(self, wanted: Iterable[Wanted]) -> None:
        """Copies all that is wanted. Neighbouring pieces share a request, and several requests run at a time. Raises
        StorageError if a file has changed since it was verified."""
        wanted = list(wanted)
        self.copy(pieces_of(wanted, self.names), Targets(each.target for each in wanted))

    def copy(self, pieces: FilePieces, targets: Targets) -> None:
        """Copies these pieces to the targets, as `fill` does."""
        for begin, data, numbers in self._ranges(pieces):
            targets.take(pieces.chosen(numbers), data, begin=begin)

    def _ranges(self, pieces: FilePieces) -> Iterator[tuple[int, bytearray, NDArray[np.int64]]]:
        """Yields the ranges that hold these pieces, as (first byte, verified bytes, numbers of the pieces in it). At
        most _MOST_UNDER_WAY_BYTES, or one range, are in memory."""
        files = self._manifest.files
        sizes = {name: record.part_bytes for name, record in files.items()}
        waiting: deque[tuple[PartRange, Future[bytearray]]] = deque()
        most = max(1, _MOST_UNDER_WAY_BYTES // max([RANGE_BYTES, *sizes.values()]))
        with closing(Pool(_NUM_READERS, name="checkpoint")) as pool:
            for each in plan_ranges(pieces, sizes, most_bytes=RANGE_BYTES):
                begin, end = (number * sizes[each.file] for number in (each.first, each.end))
                end = min(end, files[each.file].num_bytes)
                waiting.append((each, pool.submit(partial(self.read, each.file, begin, end, hold=False))))
                if len(waiting) >= most:
                    yield _arrived(*waiting.popleft(), sizes)
            while waiting:
                yield _arrived(*waiting.popleft(), sizes)

    def _checked(self, name: str, first: int, end: int) -> dict[int, memoryview]:
        """Reads the parts first..end-1 of a file, and returns them by number. Raises ValueError if a checksum
        differs."""
        record = self._manifest.files[name]
        begin, size = first * record.part_bytes, record.part_bytes
        data = memoryview(self._store.read_range(self._path(name), begin, min(end * size, record.num_bytes)))
        parts = {number: data[number * size - begin : (number + 1) * size - begin] for number in range(first, end)}
        for number, part in parts.items():
            if hashlib.sha256(part).hexdigest() != record.sha256[number]:
                raise ValueError(self._changed(name))
        return parts

    def _hold(self, name: str, number: int, part: memoryview, *, replace: bool) -> None:
        """Keeps a part in memory if there is room. `replace`: whether it may replace the oldest parts."""
        while replace and self._held and self._held_bytes + len(part) > self._most_held_bytes:
            self._held_bytes -= len(self._held.pop(next(iter(self._held))))
        if self._held_bytes + len(part) <= self._most_held_bytes and (name, number) not in self._held:
            self._held[name, number] = bytes(part)
            self._held_bytes += len(part)

    def _refuse_other_tensors(self, name: str, record: FileRecord, *, verified: int) -> None:
        """Raises ValueError unless the file's header lists exactly the fragments that the manifest has for it.
        `verified`: how many parts of the file have been verified; the header may reach beyond them."""
        path, expected = self._path(name), self._expected.in_file(name)
        try:
            length = header_length(bytes(self.read(name, 0, LENGTH_BYTES)), num_bytes=record.num_bytes)
            self._verify_range(
                name, verified, min(-(-(LENGTH_BYTES + length) // record.part_bytes), len(record.sha256))
            )
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


def _arrived(
    each: PartRange, data: Future[bytearray], sizes: Mapping[str, int]
) -> tuple[int, bytearray, NDArray[np.int64]]:
    return each.first * sizes[each.file], data.result(), each.pieces


class _Expected:
    """The fragments in each file, by the names that they have in its header. Raises ValueError if a file holds two with
    the same name."""

    def __init__(self, manifest: CheckpointManifest) -> None:
        self._runs: dict[tuple[int, int], list[tuple[str, FragmentLocation]]] = {}  # by (first rank, number of files)
        for name, tensor in manifest.tensors.items():
            for slot, locations in tensor.slots.items():
                key, end = f"{slot}:{name}", 0
                for first, location in sorted(((rank_of(each.file), each) for each in locations), key=itemgetter(0)):
                    if first < end:
                        raise ValueError(f"{location.file} holds two fragments of {shown_value(key)}")
                    end = first + location.num_files
                    self._runs.setdefault((first, location.num_files), []).append((key, location))

    def in_file(self, name: str) -> dict[str, FragmentLocation]:
        """Returns the fragments in one file, by name."""
        rank = rank_of(name)
        here = (each for (first, number), each in self._runs.items() if first <= rank < first + number)
        return {key: location for runs in here for key, location in runs}


def tensors_in_order(files: RankFiles, manifest: CheckpointManifest, *, slot: str) -> Callable[[str], torch.Tensor]:
    """Returns a function from a name to its tensor, float32, in its own shape.

    The function is fast if it is called for each name once, in the manifest's order, as when a weights file is written.
    Under ZeRO-3, 512 ranks hold 184,000 fragments of ViT-H/14. So tensors are read in groups, with one request for all
    the pieces of a group in one file. That takes at most groups x files requests, with one group in memory.
    """
    names, held = list(manifest.tensors), dict[str, torch.Tensor]()

    def tensor(name: str) -> torch.Tensor:
        if name not in held:
            held.clear()
            held.update(files.tensors(_group(manifest, names[names.index(name) :]), slot=slot))
        return held.pop(name)

    return tensor


def _group(manifest: CheckpointManifest, names: list[str]) -> list[str]:
    """Returns the first names whose tensors have at most _GROUP_BYTES together, but at least one name."""
    num_bytes = 0
    for number, name in enumerate(names):
        num_bytes += torch.Size(manifest.tensors[name].shape).numel() * FLOAT_BYTES
        if number and num_bytes > _GROUP_BYTES:
            return names[:number]
    return names


class RetiredError(Exception):
    """A checkpoint was deleted while it was read."""


def open_checkpoint(store: Store, checkpoint: CheckpointId) -> tuple[CheckpointManifest, RankFiles]:
    """Returns the manifest and the files of a checkpoint, after it has verified all of them.

    Raises InvalidDataError if the manifest is damaged or a file does not match it, and RetiredError if the checkpoint
    was deleted.
    """
    try:
        manifest = manifest_from_json(store.read(f"{checkpoint.folder}/{MANIFEST_NAME}"))
        if manifest.id != checkpoint:
            raise ValueError(f"its manifest is that of {manifest.id.folder}")
        files = RankFiles(store, manifest)
        for name in sorted(manifest.files):
            files.verify(name)
    except FAULTS as error:
        refuse_retired(store, checkpoint)
        raise InvalidDataError(str(error)) from error
    return manifest, files


def refuse_retired(store: Store, checkpoint: CheckpointId) -> None:
    """Raises RetiredError if a checkpoint's manifest is missing. Manifests are deleted before the other files."""
    if not store.exists(f"{checkpoint.folder}/{MANIFEST_NAME}"):
        raise RetiredError(f"checkpoint {checkpoint.folder} was deleted while it was read")
