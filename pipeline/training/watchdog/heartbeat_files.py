"""Keeps a small file per rank in RUN/heartbeats, which says what the rank is doing now, as its main thread reports it.

All ranks read and write these files in a shared folder. One more file says that a rank hangs. How long a rank has been
silent is the difference between two times of that folder's file system, so the hosts' clocks do not matter.
"""

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

from pipeline.training.settings.job import HangConfig
from shards.config_values import Range
from shards.errors import InvalidDataError, TransientError, UserError, WillNotSucceedError
from shards.files.local_files import read_local_file, write_whole
from shards.files.typed_json import read_record

_TIMES_LONGEST = 3.0
_TIMES_JOINING = 2.0  # once to meet (a missing rank has its own message), and once to connect
FOLDER = "heartbeats"
STOP_FILE = "the file STOP"  # as `asked_by` of a beat
HANGING = f"{FOLDER}/hanging"  # holds the token of the attempt in which a rank hangs
_FULL = (errno.ENOSPC, errno.EDQUOT)
_MOST_ERROR_CHARACTERS = 240  # a character takes at most 12 bytes in JSON, so a beat stays below MOST_BEAT_BYTES
MOST_BEAT_BYTES = 4096
_MOST_UNIX_TIME = 1e12
Result = TypeVar("Result")
_Count = Annotated[int, Range(0)]
_Seconds = Annotated[float, Range(0)]


class Phase(StrEnum):
    """What a rank is doing. The phases of a step are in the order in which they occur."""

    STARTING = "starting"
    JOINING = "joining the other ranks"
    WAITING_FOR_DATA = "waiting for data"
    COMPUTING = "forward and backward"
    EVALUATING = "evaluating"
    SAVING = "saving"
    FINISHING = "finishing"
    ENDED = "ended"


ORDER = tuple(Phase)
_OF_A_STEP = (Phase.WAITING_FOR_DATA, Phase.COMPUTING, Phase.EVALUATING)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place in a run that a rank has reached. `step`: the step, from 1 on. `batch`: the batch of an evaluation,
    from 1 on. For both, 0 means none yet. `is_first`: whether the rank does this for the first time, when it may have
    to compile."""

    phase: Phase
    step: int = 0
    batch: int = 0
    is_first: bool = False

    @property
    def order(self) -> tuple[int, int, int]:
        """The sort key of a place; the lowest place is the furthest behind."""
        return self.step, ORDER.index(self.phase), self.batch

    @property
    def is_repeated(self) -> bool:
        """Whether this is a phase of a step that the rank has been in before. How long the rank stays at such places
        shows how long they usually take."""
        return self.phase in _OF_A_STEP and not self.is_first

    def words(self) -> str:
        """Returns the place as text, such as `step 17, evaluating batch 3`."""
        batch = f" batch {self.batch}" if self.batch else ""
        return f"step {self.step}, {self.phase}{batch}" if self.step else f"{self.phase}{batch}"


class RankProgress:
    """The progress of a rank: its main thread sets it, and other threads read it. `attempt`: the token of the attempt,
    once it is known; a rewind begins another attempt. `compiling_steps`: the steps, from 1 on, that may compile, as the
    first of a start may. `asked_by`: the first signal that asked the run to stop. `is_done`: whether the run has made
    all its steps. `stopped_writer`: returns the process id of the rank's checkpoint writer if that process is stopped,
    else 0."""

    def __init__(self) -> None:
        self.place, self.attempt = Place(phase=Phase.STARTING), ""
        self.asked_by, self.is_done = "", False
        self.stopped_writer: Callable[[], int] = int
        self.compiling_steps = frozenset[int]()
        self._num_evaluations, self._may_compile, self._has_begun = 0, True, False

    def step_begins(self, step: int) -> None:
        """Records that a step begins, with the wait for its data."""
        self._may_compile, self._has_begun = not self._has_begun or step in self.compiling_steps, True
        self.place = Place(phase=Phase.WAITING_FOR_DATA, step=step, is_first=self._may_compile)

    def enters(self, phase: Phase, *, batch: int = 0) -> None:
        """Records that another phase of the same step begins. `batch`: the batch of an evaluation, from 1 on; 0: the
        evaluation begins."""
        if phase is Phase.EVALUATING and not batch:
            self._num_evaluations += 1
        is_first = self._num_evaluations == 1 and batch < 2 if phase is Phase.EVALUATING else self._may_compile
        self.place = Place(phase=phase, step=self.place.step, batch=batch, is_first=is_first)


def limit_seconds(place: Place, config: HangConfig, *, longest_seconds: float) -> float:
    """Returns how long a rank may stay at a place. `longest_seconds`: the longest time that the rank has stayed at a
    repeated place."""
    if place.is_repeated:
        return max(config.step_seconds, _TIMES_LONGEST * longest_seconds)
    if place.phase is Phase.JOINING:
        return _TIMES_JOINING * config.join_seconds
    return max(config.step_seconds, config.other_seconds)


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The content of a rank's heartbeat file. `seconds`: how long the rank has been at its place, where `limit_seconds`
    are allowed. `attempt`: the token of the attempt. `has_dumped`: whether a rank hangs and this one has written its
    stacks; `has_said`: whether it has also written the message. `asked_by`: what asked the run to stop. `error`: the
    error that ended the rank. `is_done`: whether the run has made all its steps. `trouble`: what keeps the rank from
    saving. `todo`: what to do about it. `unix_time`: the time by the rank's clock, since a copy of the file loses the
    file's own time."""

    rank: _Count
    host: str
    pid: _Count
    attempt: str
    phase: str
    step: _Count
    batch: _Count
    seconds: _Seconds
    limit_seconds: _Seconds
    has_dumped: bool = False
    has_said: bool = False
    asked_by: str = ""
    error: str = ""
    is_done: bool = False
    trouble: str = ""
    todo: str = ""
    unix_time: Annotated[float, Range(0, _MOST_UNIX_TIME)]

    @property
    def place(self) -> Place:
        """The place that the rank had reached."""
        return Place(phase=Phase(self.phase), step=self.step, batch=self.batch)


@dataclass(frozen=True, kw_only=True)
class Heard:
    """A rank's last beat (None if there is none of this attempt). `silent_seconds`: how much older it is than the
    reader's own beat."""

    rank: int
    beat: Beat | None
    silent_seconds: float


def beat_path(rank: int) -> str:
    """Returns the path of a rank's heartbeat file below its run directory."""
    return f"{FOLDER}/rank-{rank:05d}.json"


def read_beat(path: Path) -> Beat:
    """Reads a rank's heartbeat. Raises OSError, ValueError or InvalidDataError if it is missing or damaged."""
    return read_record(Beat, read_local_file(path, most_bytes=MOST_BEAT_BYTES))


def is_hanging(run_dir: Path, attempt: str) -> bool:
    """Returns whether a rank of this attempt has said that one hangs."""
    try:
        return read_local_file(run_dir / HANGING, most_bytes=MOST_BEAT_BYTES) == attempt.encode()
    except (OSError, InvalidDataError):
        return False


class HeartbeatFiles:
    """The files of one attempt, as one rank sees them. What cannot be written or read counts as silence."""

    def __init__(self, run_dir: Path, *, rank: int, attempt: str) -> None:
        self._run_dir, self._rank, self._attempt = run_dir, rank, attempt

    def write(self, beat: Beat) -> None:
        """Replaces this rank's file. On a full disk, it is overwritten in place, which needs no space. If the folder is
        missing, it is created."""
        path, data = self._path(self._rank), f"{json.dumps(asdict(beat))}\n".encode()
        try:
            write_whole(path, data)
        except OSError as error:
            with suppress(OSError):
                if error.errno in _FULL:
                    _overwrite(path, data)
                elif error.errno == errno.ENOENT:
                    (self._run_dir / FOLDER).mkdir(exist_ok=True)  # fails if the run directory was deleted, too
                    write_whole(path, data)

    def hear(self, rank: int) -> Heard:
        """Returns another rank's last beat."""
        try:
            beat = read_beat(self._path(rank))
            Phase(beat.phase)
            silent = self._path(self._rank).stat().st_mtime - self._path(rank).stat().st_mtime
        except (OSError, ValueError, InvalidDataError):
            return Heard(rank=rank, beat=None, silent_seconds=float("inf"))
        if beat.attempt != self._attempt or beat.rank != rank:
            return Heard(rank=rank, beat=None, silent_seconds=float("inf"))
        return Heard(rank=rank, beat=beat, silent_seconds=max(0.0, silent))

    def say_hanging(self) -> None:
        """Tells the other ranks that one of them hangs."""
        with suppress(OSError):  # written in place: on a file server, a new file is noticed later than a changed one
            (self._run_dir / HANGING).write_text(self._attempt)

    def is_hanging(self) -> bool:
        """Returns whether a rank of this attempt has said that one hangs."""
        return is_hanging(self._run_dir, self._attempt)

    def _path(self, rank: int) -> Path:
        return self._run_dir / beat_path(rank)


class DiskWork:
    """Does work on files in a separate thread, so that a disk that does not answer does not hold up the caller.

    `tick`: called about every `tick_seconds` while the caller waits.
    """

    def __init__(self, *, tick: Callable[[], None] = lambda: None, tick_seconds: float = 1.0) -> None:
        self._tick, self._tick_seconds = tick, tick_seconds
        self._thread: threading.Thread | None = None

    def ask(self, work: Callable[[], Result], *, otherwise: Result, seconds: float) -> Result:
        """Returns the result of `work()`, or `otherwise` if `work()` takes longer than `seconds`. While earlier work
        has not returned, returns `otherwise` at once. `work` must not raise."""
        if self._thread and self._thread.is_alive():
            return otherwise
        answers: list[Result] = []
        self._thread = threading.Thread(target=lambda: answers.append(work()), name="disk work", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            self._thread.join(min(left, self._tick_seconds))
            self._tick()
        return answers[0] if answers else otherwise


def rank_words(run_dir: Path, rank: int) -> str:
    """Returns the rank as text, with its host if a heartbeat names it."""
    try:
        host = read_beat(run_dir / beat_path(rank)).host
    except (OSError, ValueError, InvalidDataError):
        return f"rank {rank}"
    return f"rank {rank} on host {host}"


def error_words(error: BaseException) -> str:
    """Returns an error as one line that is short enough for a beat."""
    line = str(error).strip().partition("\n")[0]
    named = f"{type(error).__name__}: {line}" if line else type(error).__name__
    words = line if isinstance(error, UserError | TransientError | WillNotSucceedError) and line else named
    return words if len(words) <= _MOST_ERROR_CHARACTERS else f"{words[: _MOST_ERROR_CHARACTERS - 1]}…"


def _overwrite(path: Path, data: bytes) -> None:
    """Overwrites a JSON file in place, so that its disk space stays allocated. The rest of the old file is filled with
    spaces."""
    with path.open("r+b") as file:
        num_bytes = min(file.seek(0, os.SEEK_END), MOST_BEAT_BYTES)
        file.seek(0)
        file.write(data.rstrip(b"\n").ljust(num_bytes - 1) + b"\n")


class BeatWriter:
    """Writes beats in its own thread, so that storage that does not answer holds up no other thread. If several beats
    come during a write, only the latest is written."""

    def __init__(self, files: HeartbeatFiles) -> None:
        self._files, self._changed = files, threading.Condition()
        self._next: Beat | None = None
        self._is_writing = self._is_closed = False
        self._began = 0.0  # when the running write began
        threading.Thread(target=self._run, name="heartbeat files", daemon=True).start()

    def put(self, beat: Beat) -> None:
        """Sets the beat to write next."""
        with self._changed:
            self._next = beat
            self._changed.notify_all()

    @property
    def stuck_seconds(self) -> float:
        """How long the running write has taken; 0 if none is running."""
        with self._changed:
            return time.monotonic() - self._began if self._is_writing else 0.0

    def flush(self, *, seconds: float) -> None:
        """Waits until everything is written, for at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._next is None and not self._is_writing, seconds)

    def close(self, *, seconds: float) -> None:
        """Flushes, and writes nothing afterwards."""
        self.flush(seconds=seconds)
        with self._changed:
            self._next, self._is_closed = None, True
            self._changed.notify_all()

    def _run(self) -> None:
        while beat := self._taken():
            self._files.write(beat)

    def _taken(self) -> Beat | None:
        """Waits for the next beat and returns it; None once the writer is closed."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._next is not None or self._is_closed)
            beat, self._next = self._next, None
            self._is_writing, self._began = beat is not None, time.monotonic()
            return beat
