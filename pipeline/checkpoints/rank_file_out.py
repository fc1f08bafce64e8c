"""Writes one rank's file of a checkpoint, and beside it a small report, from which rank 0's writer makes the manifest.

    rank-00000.safetensors   the file
    rank-00000.json          its size, the checksums of its parts, and where each piece of a tensor begins

Checksums are computed while the file is written. Files are written past the page cache (open(2), O_DIRECT) as far as
the file system allows, since nobody reads a checkpoint soon. On a virtual machine, writing 1 GB took 3.0 s of CPU time
through the page cache (clearing new pages and copying into them), but only 0.7 s past it, mostly for hashing.
"""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, BinaryIO, ClassVar, Protocol

from shards.config_values import Range, shown_value
from shards.files.typed_json import read_record, sealed, unsealed
from shards.store import Store

PART_BYTES = 1 << 20  # the size of a part of a file, which has its own checksum
MOST_REPORT_BYTES = 64 << 20
_SHA256 = re.compile("[0-9a-f]{64}")
Piece = tuple[str, str, int, int, int]  # tensor, slot, byte offset in the file, first element, number of elements
Progress = Callable[[], None]
_MOST_PART_BYTES = 16 << 20  # a reader holds a whole part in memory
_PIECE_BYTES = 8 << 20  # hashed and written at once; a network file system confirms each piece


class DirectFile:
    """Writes to `descriptor`, past the page cache as long as each piece consists of whole pages. From the first piece
    that does not, or that the file system refuses, everything is written through the page cache."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.is_direct = self._switch(on=True)

    def write(self, piece: memoryview) -> None:
        """Writes the whole piece. Raises the OSError of write(2)."""
        while piece:
            if self.is_direct and len(piece) % mmap.PAGESIZE:
                self.is_direct = self._switch(on=False)
            try:
                piece = piece[os.write(self._descriptor, piece) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self.is_direct:
                    raise
                self.is_direct = self._switch(on=False)

    def _switch(self, *, on: bool) -> bool:
        """Switches direct writing on or off. Returns whether the file is now written past the page cache."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        except OSError:
            if not on:
                raise
            return False
        return on


class PartDigests:
    """Computes the sha256 of each part of a file that is written in pieces of any size."""

    def __init__(self, part_bytes: int = PART_BYTES) -> None:
        self.part_bytes, self.num_bytes = part_bytes, 0
        self._done: list[str] = []
        self._digest = hashlib.sha256()

    def update(self, data: memoryview) -> None:
        """Adds the next bytes of the file."""
        begin = 0
        while begin < len(data):
            end = min(len(data), begin + self.part_bytes - self.num_bytes % self.part_bytes)
            self._digest.update(data[begin:end])
            self.num_bytes += end - begin
            begin = end
            if self.num_bytes % self.part_bytes == 0:
                self._done.append(self._digest.hexdigest())
                self._digest = hashlib.sha256()

    def sha256(self) -> tuple[str, ...]:
        """Returns the digests of all parts of the bytes so far."""
        last = [self._digest.hexdigest()] if self.num_bytes % self.part_bytes else []
        return (*self._done, *last)

    def record(self) -> "FileRecord":
        """Returns the record of the file once it is complete."""
        return FileRecord(num_bytes=self.num_bytes, part_bytes=self.part_bytes, sha256=self.sha256())


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """The size of one file of a checkpoint, and the sha256 of each part of `part_bytes`; the last part may be shorter.
    Raises ValueError if a value is out of range or contradicts another one. Ranges are checked here, too, since
    pydantic, which reads manifests, does not know Range."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"strict": True, "extra": "forbid"}

    num_bytes: Annotated[int, Range(8)]
    part_bytes: Annotated[int, Range(1, _MOST_PART_BYTES)]
    sha256: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 8 <= self.num_bytes < 1 << 62 or not 1 <= self.part_bytes <= _MOST_PART_BYTES:
            sizes = f"num_bytes is {self.num_bytes}, part_bytes is {self.part_bytes}"
            raise ValueError(f"{sizes}; allowed: 8 or more, and 1 to {_MOST_PART_BYTES}")
        if not all(map(_SHA256.fullmatch, self.sha256)):
            raise ValueError("a sha256 is not 64 hexadecimal digits in lower case")
        if len(self.sha256) != -(-self.num_bytes // self.part_bytes):
            raise ValueError(f"{len(self.sha256)} checksums for {self.num_bytes} bytes in parts of {self.part_bytes}")


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """A rank's report about its file.

    `save`: the number, within the attempt, of the save that wrote the file; if a step is saved twice, the numbers
    differ. `pieces`: the pieces of tensors in the file.
    """

    save: Annotated[int, Range(1)]
    file: str
    record: FileRecord
    pieces: tuple[Piece, ...]


class RankFileBytes(Protocol):
    """The bytes of a rank file, and the pieces in it."""

    @property
    def pieces(self) -> tuple[Piece, ...]: ...

    def parts(self) -> Iterable[memoryview]:
        """Returns the bytes in order."""
        ...

    def file(self) -> BinaryIO | None:
        """Returns the same bytes as an open file if they already are in one, else None."""
        ...


def file_name(rank: int) -> str:
    """Returns the name of this rank's file in a checkpoint's folder."""
    return f"rank-{rank:05d}.safetensors"


def rank_of(name: str) -> int:
    """Returns the rank whose file has this name."""
    return int(name.removeprefix("rank-").removesuffix(".safetensors"))


def report_name(rank: int) -> str:
    """Returns the name of the report about this rank's file."""
    return f"rank-{rank:05d}.json"


def write_rank_file(
    store: Store, folder: str, data: RankFileBytes, *, rank: int, save: int, progress: Progress
) -> Generator[None, None, RankReport]:
    """Writes the file of one rank and then its report, and returns the report. It is a generator that writes (before an
    upload: hashes) one piece of the file per step, so that another thread can take over between two steps. `progress`
    is called after each piece."""
    digests, path = PartDigests(), f"{folder}/{file_name(rank)}"
    is_local = store.local_path(path) is not None
    ready = None if is_local else data.file()
    if ready is None:
        with store.create(path) as file:
            write = DirectFile(file.fileno()).write if is_local else file.write
            for piece in _in_pieces(data.parts()):
                write(piece)
                digests.update(piece)
                progress()
                yield
    else:  # a bucket takes the open file, without a temporary one
        with ready:
            for piece in _in_pieces(data.parts()):
                digests.update(piece)
                progress()
                yield
            store.upload(path, ready, progress=progress)
    progress()
    report = RankReport(save=save, file=file_name(rank), record=digests.record(), pieces=data.pieces)
    store.write(f"{folder}/{report_name(rank)}", report_to_json(report))
    return report


def _in_pieces(parts: Iterable[memoryview]) -> Iterable[memoryview]:
    for part in parts:
        yield from (part[first : first + _PIECE_BYTES] for first in range(0, len(part), _PIECE_BYTES))


def report_to_json(report: RankReport) -> bytes:
    """Returns the report as UTF-8 JSON that contains its own digest."""
    return sealed(json.dumps(asdict(report)).encode())


def read_report(store: Store, folder: str, *, rank: int, save: int) -> RankReport:
    """Returns a rank's report about this save. Raises ValueError if it is damaged or about another rank or save, or
    what the store raises."""
    path = f"{folder}/{report_name(rank)}"
    try:
        report = read_record(RankReport, unsealed(store.read(path, most_bytes=MOST_REPORT_BYTES)))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if (report.file, report.save) != (file_name(rank), save):
        said = f"{shown_value(report.file)} of save {report.save}"
        raise ValueError(f"{path} is about {said}; allowed: {file_name(rank)} of save {save}")
    return report
