"""What one rank reports about the file that it has written: a small object beside it, from which rank 0's writer makes
the manifest.

    rank-00000.safetensors   the file
    rank-00000.json          its size, the checksums of its parts, and where each piece of a tensor begins
"""

import json
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, BinaryIO, Protocol

from pipeline.checkpoints.direct_file import DirectFile
from pipeline.checkpoints.part_digests import PartDigests
from shards.files.seal import sealed, unsealed
from shards.files.typed_json import read_record
from shards.schema.config_values import Range, shown_value
from shards.store import Store

MOST_REPORT_BYTES = 64 << 20
Piece = tuple[str, str, int, int, int]
Progress = Callable[[], None]
_PIECE_BYTES = 8 << 20  # hashed and written at once; a network file system answers each piece


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """The fields of the file's FileRecord."""

    num_bytes: Annotated[int, Range(8)]
    part_bytes: Annotated[int, Range(1)]
    sha256: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """`save`: which of its attempt's saves wrote the file; a step that is saved twice has other numbers.

    `pieces`: (tensor, slot, byte offset in the file, first element, number of elements) of each tensor in it.
    """

    save: Annotated[int, Range(1)]
    file: str
    record: FileFacts
    pieces: tuple[tuple[str, str, int, int, int], ...]


class RankFileBytes(Protocol):
    """The bytes of a rank file, and what is in it."""

    @property
    def pieces(self) -> tuple[Piece, ...]: ...

    def parts(self) -> Iterable[memoryview]:
        """The bytes in order."""
        ...

    def file(self) -> BinaryIO | None:
        """The same bytes as a file, if they are one already."""
        ...


def file_name(rank: int) -> str:
    """The file of this rank in a checkpoint's folder."""
    return f"rank-{rank:05d}.safetensors"


def report_name(rank: int) -> str:
    """Its report, beside it."""
    return f"rank-{rank:05d}.json"


def write_rank_file(
    store: Store, folder: str, data: RankFileBytes, *, rank: int, save: int, progress: Progress
) -> Generator[None, None, RankReport]:
    """Writes the file of one rank and then its report, a piece of the file at each step: whoever takes the steps may
    change in between. `progress` is called again and again meanwhile."""
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
    else:  # a bucket takes it as it is, without a temporary file
        with ready:
            for piece in _in_pieces(data.parts()):
                digests.update(piece)
                progress()
                yield
            store.upload(path, ready, progress=progress)
    progress()
    facts = FileFacts(**{**digests.record(), "sha256": tuple(digests.record()["sha256"])})
    report = RankReport(save=save, file=file_name(rank), record=facts, pieces=data.pieces)
    store.write(f"{folder}/{report_name(rank)}", report_to_json(report))
    return report


def _in_pieces(parts: Iterable[memoryview]) -> Iterable[memoryview]:
    for part in parts:
        yield from (part[first : first + _PIECE_BYTES] for first in range(0, len(part), _PIECE_BYTES))


def report_to_json(report: RankReport) -> bytes:
    """UTF-8 JSON with a digest of itself."""
    return sealed(json.dumps(asdict(report)).encode())


def read_report(store: Store, folder: str, *, rank: int, save: int) -> RankReport:
    """A rank's report of this very save. ValueError if it is damaged, or of another rank or save; else what the store
    raises."""
    path = f"{folder}/{report_name(rank)}"
    try:
        report = read_record(RankReport, unsealed(store.read(path, most_bytes=MOST_REPORT_BYTES)))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if (report.file, report.save) != (file_name(rank), save):
        said = f"{shown_value(report.file)} of save {report.save}"
        raise ValueError(f"{path} is about {said}; allowed: {file_name(rank)} of save {save}")
    return report
