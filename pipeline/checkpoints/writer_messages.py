"""The messages between a trainer and its checkpoint writer: one JSON object per line, checked on both sides.

trainer -> writer    BufferFit   map the shared buffer: a rank file of this size and these pieces is in it
                     Write       write the buffer's file and its report
                     Hurry       the trainer waits for this save from now on
                     CommitOrder (rank 0) make the checkpoint of all ranks' files
writer -> trainer    SaveResult  the result of a save; `progress` and `said` may come before it
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
    """Says that the buffer holds a rank file of `num_bytes` with these pieces."""

    num_bytes: Annotated[int, Range(8)]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Write:
    """Asks for the file of this rank to be written into `folder` of the store `url`, if the record of its attempt,
    `record`, still exists. `failed`: the folder of a failed save, if any, from which this rank's file is deleted first,
    since the store may be full."""

    save: Annotated[int, Range(1)]
    url: str
    folder: str
    record: str
    rank: Annotated[int, Range(0)]
    failed: str = ""


@dataclass(frozen=True, kw_only=True)
class Hurry:
    """Says that the trainer waits for this save, so that it no longer has low priority."""

    save: Annotated[int, Range(1)]


@dataclass(frozen=True, kw_only=True)
class CommitOrder:
    """Asks for the checkpoint of this save to be committed, and then for the deletion of checkpoints that retention
    does not keep. `draft`: the manifest as JSON, without files and the places of tensors. `attempt`: the record of the
    attempt as JSON. The reports of all ranks must have the number `save`."""

    save: Annotated[int, Range(1)]
    url: str
    draft: str
    attempt: str
    num_ranks: Annotated[int, Range(1)]
    run_dir: str
    retention: Retention


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """The result of a save, or news of it. `message`: why it failed, or a line for the log."""

    save: Annotated[int, Range(0)]
    what: What
    message: str = ""


Command = BufferFit | Write | Hurry | CommitOrder

_KINDS: tuple[type[Command | SaveResult], ...] = (BufferFit, Write, Hurry, CommitOrder, SaveResult)


def to_line(message: Command | SaveResult) -> bytes:
    """Returns the message as one line of JSON. Raises ValueError if the line is too long."""
    line = json.dumps({_KIND: type(message).__name__, **asdict(message)}).encode() + b"\n"
    if len(line) > MOST_LINE_BYTES:
        raise ValueError(f"a {type(message).__name__} of {len(line):,} bytes; allowed: {MOST_LINE_BYTES:,}")
    return line


def from_line(line: bytes) -> Any:
    """Returns the message in a line. Raises ValueError if the line is not a message."""
    values = parse_json(line)
    name = values.pop(_KIND, None) if isinstance(values, dict) else None
    for kind in _KINDS:
        if kind.__name__ == name:
            return record_from(kind, values)
    raise ValueError(f"a message of kind {name!r}; allowed: {', '.join(kind.__name__ for kind in _KINDS)}")


class LineSplitter:
    """Cuts what arrives into lines. Raises ValueError if an unfinished line is longer than any message."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def take(self, data: bytes) -> list[bytes]:
        """Adds data, and returns the lines that are now complete."""
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
