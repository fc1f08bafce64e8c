"""What a sharded checkpoint says about itself, and which checkpoints of a run count. Pure.

    step-00000120/attempt-0003-5f1c2a9e/rank-00000.safetensors   fragments of logical tensors
    step-00000120/attempt-0003-5f1c2a9e/MANIFEST.json            written last: the checkpoint exists from then on
    attempts/0003-5f1c2a9e.json                                  which checkpoint this attempt (start) resumed from

The fence against zombies is on the reading side and needs nothing from the store: attempts are numbered, each says what
it resumed from, and a manifest is ignored if a later attempt exists that did not resume from it or from its descendant.

Format 1 held the position as `data_state`, without the step, and the saved job as a part of `record`.
"""

import json
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipeline.data.position import StreamPosition
from pipeline.training.saved_job import SavedJob, position_of_format_1, saved_job_of_format_1

FORMAT = 2
_FIRST_FORMAT = 1  # is still read
MANIFEST_NAME = "MANIFEST.json"
ATTEMPTS = "attempts"


@dataclass(frozen=True, kw_only=True)
class FragmentLocation:
    """Elements `start` .. `start + length - 1` of a flattened tensor, at byte `offset` of `file`, float32."""

    file: str
    offset: int
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class LogicalTensor:
    """A parameter as the model knows it, and the locations of the fragments of its master and moments."""

    shape: tuple[int, ...]
    dtype: str
    slots: dict[str, tuple[FragmentLocation, ...]]


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Checksum and size of one file of the checkpoint."""

    sha256: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class CheckpointId:
    """Identifies a checkpoint: its step and the attempt that wrote it."""

    step: int
    attempt: str

    @property
    def folder(self) -> str:
        """Path below the checkpoints' root."""
        return f"step-{self.step:08d}/attempt-{self.attempt}"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the run: its token sorts by number; `resumed_from` is None for a start from scratch."""

    token: str
    resumed_from: CheckpointId | None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that a run needs to continue. `position`: of the stream of batches. `job`: which jobs may continue the
    run. `record` is for people and reports: nothing is decided by it."""

    format: int
    id: CheckpointId
    tensors: dict[str, LogicalTensor]
    files: dict[str, FileRecord]
    moments: tuple[str, ...]
    num_updates: int
    num_samples: int
    position: StreamPosition
    job: SavedJob
    record: dict[str, Any]

    def __post_init__(self) -> None:
        if self.position.next_step != self.id.step:
            raise ValueError(f"the checkpoint is of step {self.id.step}, its position of {self.position.next_step}")


@dataclass(frozen=True, kw_only=True)
class _Format:
    """The first thing read of a manifest."""

    format: int


_MANIFEST = TypeAdapter(Manifest)
_FORMAT = TypeAdapter(_Format)
_ATTEMPT = TypeAdapter(Attempt)


def manifest_to_json(manifest: Manifest) -> bytes:
    """UTF-8 JSON of a manifest."""
    return _MANIFEST.dump_json(manifest, indent=1) + b"\n"


def manifest_from_json(data: bytes) -> Manifest:
    """The manifest. ValueError if the JSON is broken or of a format that this version does not know."""
    try:
        found = _FORMAT.validate_json(data).format
        if found not in (_FIRST_FORMAT, FORMAT):
            raise ValueError(f"manifest format {found}, this version reads {_FIRST_FORMAT} and {FORMAT}")
        return _MANIFEST.validate_json(data if found == FORMAT else _from_format_1(data))
    except ValidationError as error:
        first = error.errors()[0]
        at = f"{'.'.join(map(str, first['loc']))}: " if first["loc"] else ""
        raise ValueError(f"not a manifest: {at}{first['msg']}") from error


def _from_format_1(data: bytes) -> str:
    """A manifest of the first format as JSON of this one. ValueError if it is none."""
    values = json.loads(data)
    try:
        record = values["record"]
        values["position"] = position_of_format_1(record, values.pop("data_state"), step=values["id"]["step"])
        values["job"] = saved_job_of_format_1(record)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a manifest: {type(error).__name__} {error}") from error
    return json.dumps(values | {"format": FORMAT})


def attempt_to_json(attempt: Attempt) -> bytes:
    """UTF-8 JSON of an attempt's record."""
    return _ATTEMPT.dump_json(attempt) + b"\n"


def attempt_from_json(data: bytes) -> Attempt:
    """The attempt. ValueError if the JSON is broken."""
    return _ATTEMPT.validate_json(data)


def id_from_path(path: str) -> CheckpointId | None:
    """The checkpoint whose manifest is at `path` (relative to the checkpoints' root), or None for any other file."""
    parts = path.split("/")
    if len(parts) != 3 or parts[2] != MANIFEST_NAME:
        return None
    step, attempt = parts[0].removeprefix("step-"), parts[1].removeprefix("attempt-")
    return CheckpointId(step=int(step), attempt=attempt) if step.isdigit() else None


def is_checkpoint_file(path: str) -> bool:
    """True for a file of a checkpoint, committed or not: step-N/attempt-TOKEN/NAME."""
    parts = path.split("/")
    return len(parts) == 3 and parts[0].startswith("step-") and parts[1].startswith("attempt-")


def token_order(token: str) -> tuple[int, str]:
    """Sort key of an attempt's token: its number, then the nonce."""
    number, _, nonce = token.partition("-")
    return int(number), nonce


def next_token(attempts: list[Attempt], *, nonce: str) -> str:
    """Token of a new attempt: a number above all others, and a nonce in case two start at once."""
    numbers = [token_order(attempt.token)[0] for attempt in attempts]
    return f"{max(numbers, default=0) + 1:04d}-{nonce}"


def standing_checkpoints(committed: list[CheckpointId], attempts: list[Attempt]) -> list[CheckpointId]:
    """Committed checkpoints that the fence lets through, newest first.

    Walk back from the latest attempt along what each resumed from. Of an attempt on this line, the checkpoints up to
    the one that its successor resumed from stand. Everything else was written by an attempt that was overtaken.
    """
    by_token = {attempt.token: attempt for attempt in attempts}
    standing: list[CheckpointId] = []
    token = max(by_token, key=token_order, default=None)
    limit = None  # the latest attempt's own checkpoints stand without limit
    while token is not None:
        own = [c for c in committed if c.attempt == token and (limit is None or c.step <= limit)]
        standing += own
        attempt = by_token.get(token)
        origin = attempt.resumed_from if attempt else None
        token, limit = (origin.attempt, origin.step) if origin else (None, None)
    return sorted(standing, key=lambda c: (c.step, c.attempt), reverse=True)


def overlapping(
    locations: tuple[FragmentLocation, ...], *, start: int, length: int
) -> list[tuple[FragmentLocation, int, int]]:
    """Where the elements [start, start + length) lie: (location, first element, number of elements) each."""
    end = start + length
    found = []
    for location in locations:
        low, high = max(start, location.start), min(end, location.start + location.length)
        if low < high:
            found.append((location, low, high - low))
    return sorted(found, key=lambda item: item[1])
