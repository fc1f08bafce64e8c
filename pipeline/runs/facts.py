"""Reads the facts about a run from its folder, and derives its state. This module does not load torch.

Only the ends of long files are read. Any file may be missing, half-written, damaged or just being written: each fault
becomes a reason beside the other facts. The state is a pure function of the facts (`state_of`):

    done           the DONE marker names at least the recorded number of steps
    running        the process of its first rank exists, or wrote a heartbeat a moment ago, and has not ended
    stopped        it ended with a checkpoint of its last step; the same command continues it
    failed         it ended otherwise, hangs, or has written no heartbeat for longer than a running process ever takes
    never started  the folder has nothing but the run's record

Rank 0 writes everything that a reader needs, because a run ends when any of its ranks ends. On the host of rank 0, the
state depends on whether its process exists; elsewhere, only on what it has written.
"""

import math
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipeline.runs.starts import FILE_NAME as STARTS
from pipeline.runs.starts import NO_ORIGIN, Origin, has_process, is_start, origin_in, start_in
from pipeline.shared_settings import METRICS_FILE, RECORD_FILE
from pipeline.training.reporting.ledger import FILE_NAME as LEDGER
from pipeline.training.reporting.ledger import goodput
from pipeline.training.watchdog.heartbeat_files import (
    FOLDER,
    HANGING,
    MOST_BEAT_BYTES,
    Beat,
    Phase,
    Place,
    beat_path,
    rank_words,
)
from shards.config_values import whole_number
from shards.errors import Finding, InvalidDataError
from shards.files.local_files import Line, Tail, is_finite, is_number, is_step, read_local_file, read_tail
from shards.files.typed_json import parse_json, read_record, unsealed
from shards.output.quantities import duration, short_time

State = Literal["running", "done", "stopped", "failed", "never started"]
STATES: tuple[State, ...] = ("running", "done", "stopped", "failed", "never started")
SILENT_SECONDS = 60.0  # heartbeats come at least every 15 s
GONE_SECONDS = 20.0  # for a process that has vanished from this host
QUIET_SECONDS = 300.0  # the longest time between two lines of metrics, for a run without heartbeats
_FIRST_BEAT_SECONDS = 30.0  # after a start; the first heartbeat comes after at most 15 s
SIGNS_OF_A_RUN = (METRICS_FILE, LEDGER, FOLDER, "DONE")
_TAIL_BYTES, _LONG_TAIL_BYTES = 1 << 16, 1 << 24
_MOST_DONE_BYTES = 16 << 20
_OF_RANKS = (
    *("ranks/own_step", "ranks/own_step_rank", "ranks/own_step_median", "ranks/data_wait", "ranks/data_wait_rank"),
    *("time/communication", "time/step"),
)
_COPIED_SECONDS = 60.0  # if a heartbeat's time and its file's differ by more, the folder is a copy


@dataclass(frozen=True, kw_only=True)
class LastBeat:
    """What rank 0's heartbeat file says, and its age in seconds. `is_gone`: whether the heartbeat is from this host,
    which no longer has the process. `is_hanging`: whether a rank of its attempt has reported a hang. `asked_by` and
    `error` are the file's values. `trouble`: the file's value, and what to do about it."""

    place: Place
    age_seconds: float
    is_gone: bool = False
    is_hanging: bool = False
    asked_by: str = ""
    error: str = ""
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class LastStart:
    """The last recorded start. `age_seconds`: its age. `is_there`: whether the process of its first rank still runs, or
    None if this host cannot tell."""

    attempt: str
    host: str
    age_seconds: float
    is_there: bool | None


@dataclass(frozen=True, kw_only=True)
class Signs:
    """The facts in a run's folder that its state depends on. None means missing or unusable.

    `num_steps`: the job's number of steps. `done_step`: the step in the DONE marker. `saved_step`: the last step in the
    ledger. `told_step`: the last step in the metrics. `quiet_seconds`: the time since the metrics, the ledger or the
    file of starts was written. `has_attempts`: whether the run has begun at least once.
    """

    num_steps: int | None = None
    done_step: int | None = None
    saved_step: int | None = None
    told_step: int | None = None
    quiet_seconds: float | None = None
    beat: LastBeat | None = None
    start: LastStart | None = None
    has_attempts: bool = False


class Standing(NamedTuple):
    """A run's state and its explanation, which is empty if the state explains itself. `has_vanished`: whether the
    process is gone or silent and no file says how the run ended."""

    state: State
    why: str = ""
    has_vanished: bool = False


def state_of(signs: Signs) -> Standing:
    """Returns the state of a run and its explanation, according to its folder."""
    if signs.done_step is not None and (signs.num_steps is None or signs.done_step >= signs.num_steps):
        return Standing("done")
    if signs.start and signs.start.is_there is not None:
        return _by_process(signs, is_there=signs.start.is_there)
    if signs.beat and not _began_again(signs, signs.beat):
        return _by_beat(signs, signs.beat)
    has_steps = (signs.told_step, signs.saved_step, signs.done_step) != (None, None, None)
    if not (has_steps or signs.beat or signs.start):
        is_begun = signs.has_attempts
        return Standing("failed", "ended before its first step was reported") if is_begun else Standing("never started")
    if signs.quiet_seconds is not None and signs.quiet_seconds < QUIET_SECONDS:
        return Standing("running", _without_a_beat(signs))
    return _ended(signs, signs.told_step)


def _by_process(signs: Signs, *, is_there: bool) -> Standing:
    """Returns the state on the host of rank 0, according to its process. The heartbeat, if there is one, says how the
    run ended."""
    beat = signs.beat
    if beat and beat.is_hanging:
        return _by_beat(signs, beat)
    if beat and beat.place.phase is Phase.ENDED:
        return _ended(signs, beat.place.step)
    if not is_there:
        if not beat and _ended(signs, signs.told_step).state == "stopped":
            return Standing("stopped")  # the run writes no heartbeats
        where = f"last in {beat.place.words()}" if beat else "before its first heartbeat"
        return Standing("failed", f"its process is gone, {where}; {_saved(signs)}", has_vanished=True)
    if beat and beat.age_seconds > SILENT_SECONDS:
        why = f"no heartbeat for {duration(beat.age_seconds)}: its process is there, perhaps suspended"
        return Standing("running", why)
    return Standing("running")


def _without_a_beat(signs: Signs) -> str:
    """Returns what is known about a start on another host that has not written a heartbeat."""
    start = signs.start
    if start is None or start.age_seconds < _FIRST_BEAT_SECONDS:
        return ""
    where = f" on {start.host}" if start.host else ""
    return f"started{where} {duration(start.age_seconds)} ago, without a heartbeat; last seen as shown"


def _began_again(signs: Signs, beat: LastBeat) -> bool:
    """Returns whether the heartbeat belongs to an earlier start, because the metrics are newer. A start's first
    heartbeat comes seconds after its first steps."""
    is_over = beat.place.phase is Phase.ENDED or beat.age_seconds > SILENT_SECONDS
    return (
        is_over and signs.quiet_seconds is not None and signs.quiet_seconds < min(SILENT_SECONDS, beat.age_seconds - 2)
    )


def _by_beat(signs: Signs, beat: LastBeat) -> Standing:
    if beat.place.phase is Phase.ENDED:
        return _ended(signs, beat.place.step)
    if beat.is_hanging:
        return Standing("failed", f"hung in {beat.place.words()}; the stacks are in stacks/")
    if beat.age_seconds > (GONE_SECONDS if beat.is_gone else SILENT_SECONDS):
        why = "its process is gone" if beat.is_gone else f"no heartbeat for {duration(beat.age_seconds)}"
        return Standing("failed", f"{why}, last in {beat.place.words()}; {_saved(signs)}", has_vanished=True)
    return Standing("running")


def _ended(signs: Signs, last_step: int | None) -> Standing:
    """Returns the state of a run that ended by itself. A run that is stopped saves the step that it ends with."""
    if signs.saved_step is not None and last_step is not None and signs.saved_step >= last_step > 0:
        return Standing("stopped")
    where = f"in step {last_step:,}" if last_step else "before its first step"
    error = f": {signs.beat.error}" if signs.beat and signs.beat.error else ""
    return Standing("failed", f"ended {where}; {_saved(signs)}{error}")


def _saved(signs: Signs) -> str:
    return "nothing is saved" if signs.saved_step is None else f"step {signs.saved_step:,} is saved"


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What is known about a run; None means unknown. `step`: the last step that was reported or saved. `last_seen`: the
    time of the last sign of the run, in seconds since 1970. `reasons`: why the run is in this state, and which of its
    files cannot be used. `damaged`: a finding for each file that cannot be used. `has_vanished`: whether no file says
    how the run ended. `origin`: where its job comes from, if a start recorded it. `ranks`: which of several ranks take
    the longest, and the share of a step that is communication."""

    state: State
    step: int | None
    loss: float | None
    accuracy: float | None
    images_per_second: float | None
    goodput: float | None
    last_seen: float | None
    reasons: tuple[str, ...]
    damaged: tuple[Finding, ...] = ()
    has_vanished: bool = False
    origin: Origin = NO_ORIGIN
    ranks: str = ""

    def readings(self) -> list[str]:
        """Returns the last loss, accuracy and throughput as texts, without the values that are not known."""
        rate = self.images_per_second
        words = (
            "" if self.loss is None else f"loss {self.loss:.4g}",
            "" if self.accuracy is None else f"accuracy {self.accuracy:.3f}",
            "" if rate is None or not math.isfinite(rate) else f"{rate:,.0f} images/s",
        )
        return [word for word in words if word]


class Notes:
    """Collects what is missing in a run's folder, and what is wrong with its files."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self.damaged: list[Finding] = []

    def fault(self, name: str, words: str) -> None:
        """Notes that the file `name` cannot be used at all."""
        self.all.append(words)
        self.damaged.append(Finding(found=words, seen=name))


class _Reader(Notes):
    """Reads the files of one folder, and collects their faults and their times."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self.run_dir = run_dir
        self.times: list[float] = []
        self.copied_from: float | None = None  # if the folder is a copy: when the original run was last seen

    @contextmanager
    def judging(self, name: str) -> Iterator[None]:
        """Turns an error inside the block into a reason. A missing file is no reason."""
        try:
            yield
        except FileNotFoundError:
            pass
        except OSError as error:
            self.fault(name, f"{name} cannot be read: {error.strerror or error}")
        except (ValueError, InvalidDataError) as error:
            self.fault(name, f"{name} is damaged: {str(error).removeprefix(f'{self.run_dir / name} ')}")

    def tail(self, name: str, *, most_bytes: int = _TAIL_BYTES) -> Tail | None:
        """Returns the end of a file of lines, or None if it cannot be read."""
        with self.judging(name):
            return read_tail(self.run_dir / name, most_bytes=most_bytes)
        return None

    def last(self, name: str, tail: Tail | None, is_usable: Callable[[Line], bool]) -> Line:
        """Returns the last usable line, or {} if there is none."""
        if tail is None:
            return {}
        with self.judging(name):
            self.times.append((self.run_dir / name).stat().st_mtime)
        found = tail.last(is_usable)
        if found is None and tail.num_bytes:
            self.all.append(f"{name} has no usable line at its end")
        return found or {}

    def small(self, name: str, *, most_bytes: int) -> bytes | None:
        """Returns the contents of a small file, or None if it cannot be read."""
        with self.judging(name):
            path = self.run_dir / name
            data = read_local_file(path, most_bytes=most_bytes)
            self.times.append(path.stat().st_mtime)
            return data
        return None

    def last_seen(self, state: State) -> float | None:
        """Returns the time of the last sign of the run. The files of a copy have the time of copying, so a copy counts
        only if the run continues in it."""
        if self.copied_from is not None and state != "running":
            return self.copied_from
        return max(self.times) if self.times else self.recorded()

    def recorded(self) -> float | None:
        """Returns the time at which the run's record, its first file, was written."""
        with self.judging(RECORD_FILE):
            return (self.run_dir / RECORD_FILE).stat().st_mtime
        return None

    def has_attempts(self) -> bool:
        """Returns whether the run has begun. Returns False if its checkpoints are in a bucket, which is not read
        here."""
        with self.judging("checkpoints"):
            return (self.run_dir / "checkpoints" / "attempts").is_dir()
        return False


def read_facts(
    run_dir: Path, *, num_steps: int | None, is_scored: bool, score: str = "test_accuracy", now: float | None = None
) -> RunFacts:
    """Returns what is known about the run. Raises no error for any contents of the folder.

    `num_steps`: the job's number of steps. `is_scored`: whether the run is evaluated while it trains, so that the last
    score may be many lines back. `score`: the name of the accuracy in the metrics.
    """
    reader, now = _Reader(run_dir), time.time() if now is None else now
    tail = reader.tail(METRICS_FILE)
    told, saved = reader.last(METRICS_FILE, tail, _has_step), reader.last(LEDGER, reader.tail(LEDGER), _is_of_ledger)
    starts = reader.tail(STARTS)
    started = reader.last(STARTS, starts, is_start)
    quiet_seconds = now - max(reader.times) if reader.times else None
    done_step, start = _done_step(reader), _start(started, now)
    beat = _beat(reader, now, attempt=start.attempt if start else "")
    signs = Signs(
        num_steps=num_steps,
        done_step=done_step,
        saved_step=saved.get("step"),
        told_step=told.get("step"),
        quiet_seconds=quiet_seconds,
        beat=beat,
        start=start,
        has_attempts=reader.has_attempts(),
    )
    state, why, has_vanished = state_of(signs)
    trouble = beat.trouble if beat and state == "running" else ""
    steps = [step for step in (signs.told_step, signs.saved_step, done_step) if step is not None]
    rate = told.get("images_per_second")
    return RunFacts(
        state=state,
        step=max(steps) if steps else None,
        loss=_number(told.get("loss")),
        accuracy=_accuracy(reader, tail, score, is_scored=is_scored),
        images_per_second=_number(rate) if is_finite(rate) else None,
        goodput=_goodput(saved),
        last_seen=reader.last_seen(state),
        reasons=(*filter(None, (why, trouble)), *reader.all),
        damaged=tuple(reader.damaged),
        has_vanished=has_vanished,
        origin=origin_in(starts) if starts else NO_ORIGIN,
        ranks=_ranks(run_dir, tail.last(_has_ranks, containing=b'"ranks/own_step"') or {} if tail else {}),
    )


def _has_ranks(line: Line) -> bool:
    return all(is_finite(line.get(name)) and line[name] >= 0 for name in _OF_RANKS)


def _ranks(run_dir: Path, line: Line) -> str:
    """Returns a text that names the ranks that take the longest, according to a line of metrics. Returns "" if there is
    no such line, as with a single rank."""
    if not line:
        return ""
    own, median, wait = (line[f"ranks/{name}"] for name in ("own_step", "own_step_median", "data_wait"))
    slowest, waiting = (rank_words(run_dir, int(line[f"ranks/{name}_rank"])) for name in ("own_step", "data_wait"))
    times = f" ({own / median:.1f} x median)" if median else ""
    communication = line["time/communication"] / max(line["time/step"], 1e-9)
    return (
        f"communication {min(communication, 1):.0%}, slowest {slowest}: {short_time(own)} a step{times}, longest data "
        f"wait {short_time(wait)}: {waiting}"
    )


def _has_step(line: Line) -> bool:
    return is_step(line.get("step"))


def _is_of_ledger(line: Line) -> bool:
    return is_step(line.get("step")) and isinstance(line.get("seconds"), dict)


def _number(value: Any) -> float | None:
    """Returns the value as a float, or None if it is not a number. A float may be NaN, as a loss may."""
    if type(value) is float:
        return value
    return float(value) if is_finite(value) else None


def _accuracy(reader: _Reader, tail: Tail | None, name: str, *, is_scored: bool) -> float | None:
    """Returns the last score. Reads further back if needed, because evaluations may be many lines apart."""

    def is_score(line: Line) -> bool:
        value = line.get(name)
        return is_number(value) and 0 <= value <= 1  # type: ignore[operator]

    mark = f'"{name}"'.encode()
    found = tail.last(is_score, containing=mark) if tail else None
    if found is None and tail and is_scored and len(tail.data) < tail.num_bytes:
        long = reader.tail(METRICS_FILE, most_bytes=_LONG_TAIL_BYTES)
        found = long.last(is_score, containing=mark) if long else None
    return _number(found[name]) if found else None


def _goodput(saved: Line) -> float | None:
    """Returns the share of all seconds but pauses that is compute, from the ledger's last line."""
    seconds = saved.get("seconds", {})
    compute, total, paused = (seconds.get(name) for name in ("compute", "total", "paused"))
    if not (is_finite(compute) and is_finite(total) and is_finite(paused)):
        return None
    running = total - paused
    return goodput(compute, running) if 0 <= compute <= running and running else None


def _done_step(reader: _Reader) -> int | None:
    """Returns the step in the DONE marker, or None unless the marker is complete and the weights exist."""
    data = reader.small("DONE", most_bytes=_MOST_DONE_BYTES)
    if data is None:
        return None
    with reader.judging("DONE"):
        found = parse_json(data)
        if not isinstance(found, dict) or not is_step(found.get("step")):
            raise ValueError("it names no step")
        if "digest" in found:
            unsealed(data)
        if not (reader.run_dir / "weights" / "model.safetensors").is_file():
            reader.all.append("DONE is there, weights/model.safetensors is not; the same command writes it again")
            return None
        return int(found["step"])
    return None


def _start(line: Line, now: float) -> LastStart | None:
    """Returns the last recorded start, and whether its process still exists."""
    if not line:
        return None
    start = start_in(line)
    return LastStart(
        attempt=start.attempt,
        host=start.process.host,
        age_seconds=max(0.0, now - start.unix_time),
        is_there=start.process.is_there(),
    )


def _beat(reader: _Reader, now: float, *, attempt: str) -> LastBeat | None:
    """Returns rank 0's last heartbeat. Returns None if `attempt` is known and the heartbeat belongs to an earlier
    start."""
    name = beat_path(0)
    data = reader.small(name, most_bytes=MOST_BEAT_BYTES)
    if data is None:
        return None
    written = reader.times[-1]
    age = max(0.0, now - written)
    with reader.judging(name):
        beat = read_record(Beat, data)
        if attempt and beat.attempt != attempt and _number_of(beat.attempt) <= _number_of(attempt):
            return None  # a later attempt belongs to the same start, after a rewind by the guard
        if abs(written - beat.unix_time) > _COPIED_SECONDS:
            reader.copied_from = beat.unix_time
        place = Place(phase=Phase(beat.phase), step=beat.step, batch=beat.batch)
        hanging = reader.small(HANGING, most_bytes=MOST_BEAT_BYTES)
        is_hanging = beat.has_dumped or hanging == beat.attempt.encode()
        is_gone = beat.host == socket.gethostname() and not has_process(beat.pid)
        return LastBeat(
            place=place,
            age_seconds=age,
            is_gone=is_gone,
            is_hanging=is_hanging,
            asked_by=beat.asked_by,
            error=beat.error,
            trouble="; ".join(filter(None, (beat.trouble, beat.todo))),
        )
    return None


def _number_of(attempt: str) -> int:
    return whole_number(attempt.partition("-")[0]) or 0
