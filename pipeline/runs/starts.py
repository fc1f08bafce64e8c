"""Reads and writes RUN/starts.jsonl: for each start of a run, what the earlier start left behind, and the time up to
the first step. This module does not load torch.

A killed process cannot record why it ended. The next start can record it: it reads the last heartbeat and the last line
of metrics before it overwrites the heartbeat and shortens the metrics.
"""

import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pipeline.shared_settings import METRICS_FILE
from pipeline.training.watchdog.heartbeat_files import STOP_FILE, Phase, beat_path, is_hanging, read_beat
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
    read_tail,
)
from shards.files.typed_json import record_from

log = logging.getLogger(__name__)
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
_STATE, _BEGAN = 0, 19  # fields of /proc/PID/stat after the name, see proc(5)
_ENDED = ("Z", "X")
_Natural = Annotated[int, Range(0)]
FILE_NAME = "starts.jsonl"
_TAIL_BYTES = 1 << 16
MOST_SECONDS = 1e12
_MOST_WORDS = 400  # characters of an error's text
_BY_ITS_USER = ("SIGINT", "SIGHUP", STOP_FILE)  # Slurm and clouds send the other signals
_Count = Annotated[int, Range(0, 1 << 62)]
_Seconds = Annotated[float, Range(0, MOST_SECONDS)]
StartSpan = Literal["imports", "data", "rendezvous", "checkpoint", "model", "load", "loop", "first_batch", "first_step"]
# The spans of a start. Each ends where the next begins. `imports`: from the start of the process until the job is
# known, including the imports of libraries. `data`: the job is checked against its data, and torch.compile is tried.
# `checkpoint`: the checkpoint is found and verified. `model`: the model is built, with the check of gradients and
# DeepSpeed. `load`: the checkpoint's tensors are loaded, or initial weights are set. `loop`: curves, batches and saves
# are set up. `first_step`: the first step is compiled and launched; on a CPU, it also ends here.
START_SPANS: tuple[StartSpan, ...] = (
    *("imports", "data", "rendezvous", "checkpoint", "model", "load", "loop", "first_batch", "first_step"),
)


@dataclass(frozen=True, kw_only=True)
class ProcessMark:
    """What identifies a process. `kernel`: the boot and the namespace in which `pid` is valid. `began`: when it began,
    in ticks since the boot. Empty values and 0 mean unknown."""

    host: str = ""
    kernel: str = ""
    pid: _Natural = 0
    began: _Natural = 0

    def is_there(self) -> bool | None:
        """Returns whether the process still runs, or None if this host cannot tell."""
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
    """Returns whether this host has a process with this number, even if it is another user's."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def own_mark() -> ProcessMark:
    """Returns the mark of this process."""
    found = _stat(os.getpid())
    return ProcessMark(host=socket.gethostname(), kernel=_kernel(), pid=os.getpid(), began=found[1] if found else 0)


def age_of_process() -> float:
    """Returns the seconds since the kernel started this process, to a hundredth, or 0 if they are unknown."""
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
    """Returns the state of a process, a letter, and when it began, in ticks since the boot. Returns None if they cannot
    be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        values = text.rpartition(")")[2].split()
        return values[_STATE], int(values[_BEGAN])
    except (OSError, ValueError, IndexError):
        return None


@dataclass(frozen=True, kw_only=True)
class Left:
    """What an earlier start left behind: `reached`, the last step in the metrics (0: none), and its last heartbeat.
    `attempt` is empty if there is no heartbeat. `is_hung`: whether one of its ranks has reported a hang. `asked_by`,
    `error` and `is_done` are the heartbeat's."""

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
    """Where a job comes from: the recipe's name or FILE.py:FUNCTION, and the YAML file. Either is empty if it was not
    given. If the job is the record of another run, both are taken from that run."""

    recipe: str = ""
    file: str = ""


NO_ORIGIN = Origin()


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start: when it was recorded, the time ledger at that moment, the step that it resumed from (None: from
    scratch), its ranks, what the earlier start left, where its job comes from, and the process of its first rank.
    `total_seconds` includes `paused_seconds`."""

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
    paused_seconds: _Seconds = 0.0


def left_behind(run_dir: Path) -> Left:
    """Reads what the earlier start left. Call it before this start writes anything. A file that cannot be read counts
    as missing."""
    beat, is_hung, reached = None, False, last_step(run_dir)
    try:
        beat = read_beat(run_dir / beat_path(0))
        is_hung = bool(beat.attempt) and is_hanging(run_dir, beat.attempt)
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


def last_step(run_dir: Path) -> int:
    """Returns the step of the last usable line of the run's metrics; 0 if there is none, or if the file cannot be
    read."""
    try:
        tail = read_tail(run_dir / METRICS_FILE, most_bytes=_TAIL_BYTES)
    except (OSError, InvalidDataError):
        return 0
    line = tail.last(lambda line: is_step(line.get("step"))) if tail else None
    return int(line["step"]) if line else 0


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
    """Appends a start's line to the file. Called on rank 0. `topology`: ranks, ZeRO stage, device. `seconds`: the
    ledger's totals."""
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
        paused_seconds=seconds["paused"],
    )
    append_line(run_dir / FILE_NAME, asdict(start))


def read_starts(run_dir: Path) -> list[Start]:
    """Returns the recorded starts, in order. Unusable lines are left out."""
    return [start_in(line) for line in read_lines(run_dir / FILE_NAME, is_usable=is_start).objects]


def last_origin(run_dir: Path) -> Origin:
    """Returns the origin of the run's latest job, or NO_ORIGIN if the end of the file does not name one."""
    tail = _tail(run_dir)
    return origin_in(tail) if tail else NO_ORIGIN


def last_start(run_dir: Path) -> Start | None:
    """Returns the run's latest start, or None if the end of the file does not record one."""
    tail = _tail(run_dir)
    found = tail.last(is_start) if tail else None
    return start_in(found) if found else None


def _tail(run_dir: Path) -> Tail | None:
    try:
        return read_tail(run_dir / FILE_NAME, most_bytes=_TAIL_BYTES)
    except (OSError, InvalidDataError):
        return None


def origin_in(tail: Tail) -> Origin:
    """Returns the origin of the latest job in the end of a file."""
    found = tail.last(lambda line: is_start(line) and start_in(line).origin != NO_ORIGIN)
    return start_in(found).origin if found else NO_ORIGIN


def start_in(line: Line) -> Start:
    """Returns the start in a line. Raises ValueError if the line does not record one."""
    return record_from(Start, line)


def is_start(line: Line) -> bool:
    """Returns whether a line records a start."""
    try:
        start_in(line)
    except ValueError:
        return False
    return True


class StartTimes:
    """A stopwatch for one start, created when the imports have ended. Rank 0 writes the times in a separate line when
    the first step is launched. The line of the start itself is written earlier, so that a killed start is recorded,
    too. Spans that a start does not have count as 0."""

    def __init__(self) -> None:
        self.seconds: dict[StartSpan, float] = {"imports": age_of_process()}
        self.decided: list[dict[str, str | int]] = []  # settings that were decided, each with its value and reason
        self._until, self._is_over = time.monotonic(), False

    def ends(self, span: StartSpan) -> None:
        """Records that a span ends now. It began when the span before it ended."""
        began, self._until = self._until, time.monotonic()
        self.seconds[span] = self.seconds.get(span, 0.0) + self._until - began

    def step_launched(self, run_dir: Path, *, attempt: str) -> None:
        """Called when a step has been launched. The first call appends a line to RUN/starts.jsonl."""
        if self._is_over:
            return
        self._is_over = True
        self.ends("first_step")
        seconds = {span: round(self.seconds.get(span, 0.0), 3) for span in START_SPANS}
        line = {"attempt": attempt, "unix_time": round(time.time(), 3), "parts": seconds, "decided": self.decided}
        append_or_say(run_dir / FILE_NAME, line, what="how long this start took")


def read_start_times(run_dir: Path) -> list[Line]:
    """Returns the lines of RUN/starts.jsonl with the spans of a start: `attempt`, `unix_time` of the first step, and
    `parts` in seconds."""
    return read_lines(run_dir / FILE_NAME, is_usable=_has_spans).objects


def _has_spans(line: Line) -> bool:
    spans = line.get("parts")
    return (
        isinstance(line.get("attempt"), str)
        and is_finite(line.get("unix_time"))
        and isinstance(spans, dict)
        and all(is_finite(spans.get(span)) and spans[span] >= 0 for span in START_SPANS)
    )


@dataclass(frozen=True)
class Cause:
    """Why a start ended. `kind` is the same for all starts that ended for the same reason; `words` also name the step.
    `is_pause`: whether the run was paused until the next start: its last step was saved, and its user had stopped it,
    or it was done and has been extended."""

    kind: str
    words: str
    is_pause: bool = False


def cause_of(left: Left, *, resumed_from: int | None, attempt_before: str) -> Cause:
    """Returns why the earlier start ended. `attempt_before`: that start's attempt."""
    crash, error, by = "killed or crashed", "ended by an error", f" by {left.asked_by}" if left.asked_by else ""
    if left.attempt != attempt_before:
        return Cause(crash, f"{crash} after step {left.reached:,}" if left.reached else f"{crash} before a step")
    where = f"in step {left.step:,} ({left.phase})" if left.step else "while starting"
    if left.is_hung:
        return Cause("hung", f"hung {where}")
    if left.phase != Phase.ENDED:
        at_once = f"ended at once after {left.asked_by}"
        return Cause(at_once, f"{at_once}, {where}") if by else Cause(crash, f"{crash} {where}")
    if left.error:
        said = left.error[:_MOST_WORDS]
        return Cause(f"{error}: {said}", f"{error} {_in_step(left)}: {said}")
    if left.is_done:
        return Cause("done, and extended", f"done with step {left.step:,}, and extended", is_pause=True)
    if resumed_from is not None and resumed_from >= left.step:
        is_pause = left.asked_by in _BY_ITS_USER
        return Cause(f"stopped{by}", f"stopped{by} with step {resumed_from:,} saved", is_pause=is_pause)
    if by:
        return Cause(f"stopped{by}, not saved", f"stopped{by} {_in_step(left)}, which was not saved")
    return Cause(error, f"{error} {_in_step(left)}")


def _in_step(left: Left) -> str:
    return f"in step {left.step:,}" if left.step else "before the first step"
