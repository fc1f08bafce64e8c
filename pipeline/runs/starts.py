"""RUN/starts.jsonl: for each start of a run, what the start before it left behind, and the time up to its first step.
Loads no torch.

A killed process cannot say why it ended. The next start can: it finds the last heartbeat and the last line of metrics,
before it overwrites the one and cuts the other.
"""

import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pipeline.training.watchdog.heartbeat_files import FOLDER, Beat, Phase
from shards.config_values import Range
from shards.errors import InvalidDataError
from shards.files.local_files import (
    Line,
    Tail,
    append_line,
    append_or_say,
    is_finite,
    is_step,
    read_lines,
    read_local_file,
    read_tail,
)
from shards.files.typed_json import read_record, record_from

log = logging.getLogger(__name__)
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
_STATE, _BEGAN = 0, 19  # fields of /proc/PID/stat behind the name, as in proc(5)
_ENDED = ("Z", "X")
_Natural = Annotated[int, Range(0)]
FILE_NAME = "starts.jsonl"
_MOST_BEAT_BYTES, _TAIL_BYTES = 4096, 1 << 16
MOST_SECONDS = 1e12
_MOST_WORDS = 400  # of an error
_Count = Annotated[int, Range(0, 1 << 62)]
_Seconds = Annotated[float, Range(0, MOST_SECONDS)]
StartSpan = Literal["imports", "data", "rendezvous", "checkpoint", "model", "load", "loop", "first_batch", "first_step"]
# Each ends where the next begins. `imports`: from the kernel's start of the process to the job, with the libraries;
# `data`: the job is checked against its data, and torch.compile is tried; `checkpoint`: found and verified; `model`:
# with the check of gradients and DeepSpeed; `load`: the checkpoint's tensors, or initial weights; `loop`: curves,
# batches and saves; `first_step`: until it is launched, which on a CPU is its end; blocks are compiled there.
START_SPANS: tuple[StartSpan, ...] = (
    *("imports", "data", "rendezvous", "checkpoint", "model", "load", "loop", "first_batch", "first_step"),
)


@dataclass(frozen=True, kw_only=True)
class ProcessMark:
    """What identifies a process. `kernel`: the boot and the namespace of its number. `began`: ticks since the boot.
    Empty and 0 mean unknown."""

    host: str = ""
    kernel: str = ""
    pid: _Natural = 0
    began: _Natural = 0

    def is_there(self) -> bool | None:
        """Whether the process still runs; None if that cannot be told from here."""
        is_known = self.pid and self.began and self.kernel
        if not is_known or (self.host, self.kernel) != (socket.gethostname(), _kernel()):
            return None
        if not has_process(self.pid):
            return False
        found = _stat(self.pid)
        if found is None:
            return None
        state, began = found
        return began == self.began and state not in _ENDED


def has_process(pid: int) -> bool:
    """Whether this host has a process of this number, even another user's."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def own_mark() -> ProcessMark:
    """The mark of this process."""
    found = _stat(os.getpid())
    return ProcessMark(host=socket.gethostname(), kernel=_kernel(), pid=os.getpid(), began=found[1] if found else 0)


def age_of_process() -> float:
    """Seconds since the kernel started this process, to a hundredth; 0 if that cannot be told."""
    found = _stat(os.getpid())
    if found is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - found[1] / os.sysconf("SC_CLK_TCK"))


def _kernel() -> str:
    try:
        return f"{_BOOT.read_text().strip()} {_NAMESPACE.readlink()}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int] | None:
    """The state of a process, a letter, and when it began; None if it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        values = text.rpartition(")")[2].split()
        return values[_STATE], int(values[_BEGAN])
    except (OSError, ValueError, IndexError):
        return None


@dataclass(frozen=True, kw_only=True)
class Left:
    """What an earlier start left: the last step in its metrics (0: none), and its last heartbeat. `attempt` is empty if
    there is none. `is_hung`: a rank of it told that one hangs. `asked_by`, `error` and `is_done`: as in a heartbeat."""

    reached: _Count = 0
    attempt: str = ""
    phase: str = ""
    step: _Count = 0
    is_hung: bool = False
    asked_by: str = ""
    error: str = ""
    is_done: bool = False


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A job's origin: the recipe's name or FILE.py:FUNCTION, and the YAML file, if one was given. Either is empty
    if there is none; of a record of another run, both are those of that run."""

    recipe: str = ""
    file: str = ""


NO_ORIGIN = Origin()


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start: when it was recorded, the time ledger at that moment, the step that it resumed from (None: it began
    from scratch), its ranks, what it found, where its job is from, and the process of its first rank."""

    attempt: str
    unix_time: _Seconds
    startup_seconds: _Seconds
    total_seconds: _Seconds
    resumed_from: _Count | None
    num_ranks: _Count
    zero_stage: _Count
    device: str
    left: Left
    origin: Origin = NO_ORIGIN
    process: ProcessMark = ProcessMark()


def left_behind(run_dir: Path) -> Left:
    """Reads what the earlier start left, before this one writes anything. What cannot be read counts as missing."""
    reached, beat, is_hung = 0, None, False
    try:
        tail = read_tail(run_dir / "metrics.jsonl", most_bytes=_TAIL_BYTES)
        line = tail.last(lambda line: is_step(line.get("step"))) if tail else None
        reached = int(line["step"]) if line else 0
    except (OSError, ValueError, InvalidDataError):
        pass
    try:
        path = run_dir / FOLDER / "rank-00000.json"
        beat = read_record(Beat, read_local_file(path, most_bytes=_MOST_BEAT_BYTES))
        hanging = read_local_file(run_dir / FOLDER / "hanging", most_bytes=_MOST_BEAT_BYTES)
        is_hung = bool(beat.attempt) and hanging == beat.attempt.encode()
    except (OSError, ValueError, InvalidDataError):
        pass
    if beat is None or not beat.attempt:
        return Left(reached=reached)
    return Left(
        reached=reached,
        attempt=beat.attempt,
        phase=beat.phase,
        step=beat.step,
        is_hung=is_hung or beat.has_dumped,
        asked_by=beat.asked_by,
        error=beat.error,
        is_done=beat.is_done,
    )


def add_start(
    run_dir: Path,
    *,
    attempt: str,
    resumed_from: int | None,
    seconds: Mapping[str, float],
    topology: tuple[int, int, str],
    left: Left,
    origin: Origin = NO_ORIGIN,
) -> None:
    """Appends a line; on rank 0. `topology`: ranks, ZeRO stage, device. `seconds`: the ledger's record."""
    num_ranks, zero_stage, device = topology
    start = Start(
        attempt=attempt,
        unix_time=round(time.time(), 3),
        startup_seconds=seconds["startup"],
        total_seconds=seconds["total"],
        resumed_from=resumed_from,
        num_ranks=num_ranks,
        zero_stage=zero_stage,
        device=device,
        left=left,
        origin=origin,
        process=own_mark(),
    )
    append_line(run_dir / FILE_NAME, asdict(start))


def read_starts(run_dir: Path) -> list[Start]:
    """The recorded starts, in order. Unusable lines are left out."""
    return [start_in(line) for line in read_lines(run_dir / FILE_NAME, is_usable=is_start).objects]


def last_origin(run_dir: Path) -> Origin:
    """The origin of the run's latest job, as far as the end of its starts file tells."""
    try:
        tail = read_tail(run_dir / FILE_NAME, most_bytes=_TAIL_BYTES)
    except (OSError, InvalidDataError):
        return NO_ORIGIN
    return origin_in(tail) if tail else NO_ORIGIN


def origin_in(tail: Tail) -> Origin:
    """The origin of the latest job, from the end of the file."""
    found = tail.last(lambda line: is_start(line) and start_in(line).origin != NO_ORIGIN)
    return start_in(found).origin if found else NO_ORIGIN


def start_in(line: Line) -> Start:
    """The start of a line that `is_start`. ValueError for any other line."""
    return record_from(Start, line)


def is_start(line: Line) -> bool:
    """Whether a line records a start."""
    try:
        start_in(line)
    except ValueError:
        return False
    return True


class StartTimes:
    """A stopwatch of one start, made when the imports have ended. Rank 0 writes what it shows once the first step is
    launched, as a line of its own: the line of the start itself is written earlier, so that a start that is killed is
    on record, too. Spans that a start does not have take no time."""

    def __init__(self) -> None:
        self.seconds: dict[StartSpan, float] = {"imports": age_of_process()}
        self.decided: list[dict[str, str | int]] = []  # each with its setting, value and reason
        self._until, self._is_over = time.monotonic(), False

    def ends(self, span: StartSpan) -> None:
        """A span ends now; it began when the one before it ended."""
        began, self._until = self._until, time.monotonic()
        self.seconds[span] = self.seconds.get(span, 0.0) + self._until - began

    def step_launched(self, run_dir: Path, *, attempt: str) -> None:
        """A step has been launched: after the first, appends a line to RUN/starts.jsonl."""
        if self._is_over:
            return
        self._is_over = True
        self.ends("first_step")
        seconds = {span: round(self.seconds.get(span, 0.0), 3) for span in START_SPANS}
        line = {"attempt": attempt, "unix_time": round(time.time(), 3), "parts": seconds, "decided": self.decided}
        append_or_say(run_dir / FILE_NAME, line, what="how long this start took")


def read_start_times(run_dir: Path) -> list[Line]:
    """The lines of RUN/starts.jsonl with the spans of a start: `attempt`, `unix_time` of its first step, `parts` in
    seconds."""
    return read_lines(run_dir / FILE_NAME, is_usable=_has_spans).objects


def _has_spans(line: Line) -> bool:
    spans = line.get("parts")
    return (
        isinstance(line.get("attempt"), str)
        and is_finite(line.get("unix_time"))
        and isinstance(spans, dict)
        and all(is_finite(spans.get(span)) and spans[span] >= 0 for span in START_SPANS)
    )


def cause_of(left: Left, *, resumed_from: int | None, attempt_before: str) -> str:
    """Why the start before ended, in words. `attempt_before`: its token."""
    if left.attempt != attempt_before:
        return f"killed or crashed after step {left.reached:,}" if left.reached else "killed or crashed before a step"
    where = f"in step {left.step:,} ({left.phase})" if left.step else "while starting"
    if left.is_hung:
        return f"hung {where}"
    if left.phase != Phase.ENDED:
        return f"ended at once after {left.asked_by}, {where}" if left.asked_by else f"killed or crashed {where}"
    if left.error:
        return f"ended by an error {_in_step(left)}: {left.error[:_MOST_WORDS]}"
    if left.is_done:
        return f"done with step {left.step:,}, and extended"
    by = f" by {left.asked_by}" if left.asked_by else ""
    if resumed_from is not None and resumed_from >= left.step:
        return f"stopped{by} with step {resumed_from:,} saved"
    return f"stopped{by} {_in_step(left)}, which was not saved" if by else f"ended by an error {_in_step(left)}"


def _in_step(left: Left) -> str:
    return f"in step {left.step:,}" if left.step else "before the first step"
