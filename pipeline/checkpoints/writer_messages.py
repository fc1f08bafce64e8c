"""What a trainer and its checkpoint writer say to each other: one JSON object a line, checked on both sides.

trainer -> writer    BufferFit   map the shared buffer: a rank file of this size and these pieces is in it
                     Write       write the buffer's file and its report
                     Hurry       the trainer waits for it from now on
                     CommitOrder (rank 0) make the checkpoint of all ranks' files
writer -> trainer    SaveResult  what became of it; `progress` and `said` come in between
"""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pipeline.checkpoints.config import Retention
from pipeline.checkpoints.rank_file_out import Piece
from shards.config_values import Range
from shards.files.typed_json import parse_json, record_from

MOST_LINE_BYTES = 64 << 20

What = Literal["written", "failed", "overtaken", "committed", "retired", "progress", "said"]

_KIND = "kind"


@dataclass(frozen=True, kw_only=True)
class BufferFit:
    """The buffer holds a rank file of `num_bytes` with these pieces."""

    num_bytes: Annotated[int, Range(8)]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Write:
    """Write the file of this rank into `folder` of the store `url`, if `record`, the attempt's own, is still there.
    First delete this rank's file in `failed`, the folder of a save that has failed, if any: the store may be full."""

    save: Annotated[int, Range(1)]
    url: str
    folder: str
    record: str
    rank: Annotated[int, Range(0)]
    failed: str = ""


@dataclass(frozen=True, kw_only=True)
class Hurry:
    """The trainer waits for this save: it is no longer work for idle processors alone."""

    save: Annotated[int, Range(1)]


@dataclass(frozen=True, kw_only=True)
class CommitOrder:
    """Commit the checkpoint of this save, then delete what retention does not keep. `draft`: the manifest without files
    and tensors' places, as JSON; `attempt`: the record of the attempt, as JSON. The reports of all ranks must have the
    number `save`."""

    save: Annotated[int, Range(1)]
    url: str
    draft: str
    attempt: str
    num_ranks: Annotated[int, Range(1)]
    run_dir: str
    retention: Retention


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """What became of a save. `message`: why it failed, or a line for the log."""

    save: Annotated[int, Range(0)]
    what: What
    message: str = ""


Command = BufferFit | Write | Hurry | CommitOrder

_KINDS: tuple[type[Command | SaveResult], ...] = (BufferFit, Write, Hurry, CommitOrder, SaveResult)


def to_line(message: Command | SaveResult) -> bytes:
    """One line of JSON. ValueError if it is too long."""
    line = json.dumps({_KIND: type(message).__name__, **asdict(message)}).encode() + b"\n"
    if len(line) > MOST_LINE_BYTES:
        raise ValueError(f"a {type(message).__name__} of {len(line):,} bytes; allowed: {MOST_LINE_BYTES:,}")
    return line


def from_line(line: bytes) -> Any:
    """The message in a line. ValueError if it is none."""
    values = parse_json(line)
    name = values.pop(_KIND, None) if isinstance(values, dict) else None
    for kind in _KINDS:
        if kind.__name__ == name:
            return record_from(kind, values)
    raise ValueError(f"a message of kind {name!r}; allowed: {', '.join(kind.__name__ for kind in _KINDS)}")


class LineSplitter:
    """Cuts what arrives into lines. ValueError for a line that is longer than any message."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def take(self, data: bytes) -> list[bytes]:
        """The lines that are complete now."""
        *whole, rest = data.split(b"\n")
        found = []
        for line in whole:
            found.append(b"".join([*self._parts, line]))
            self._parts, self._num_bytes = [], 0
        self._parts.append(rest)
        self._num_bytes += len(rest)
        if self._num_bytes > MOST_LINE_BYTES:
            raise ValueError(f"a message of more than {MOST_LINE_BYTES:,} bytes")
        return found
