"""What a run's folder says about the run, read from the ends of its files and nowhere else. Loads no torch.

Any file may be missing, half-written, damaged, or written meanwhile: each fault is a reason beside the other facts.
"""

import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.runs.starts import FILE_NAME as STARTS
from pipeline.runs.starts import NO_ORIGIN, Origin, is_start, origin_in, start_in
from pipeline.runs.state import LastBeat, LastStart, Signs, State, state_of
from pipeline.training.watchdog.heartbeat_files import FOLDER, Beat, rank_words
from pipeline.training.watchdog.rank_progress import Phase, Place
from shards.config_values import whole_number
from shards.errors import InvalidDataError
from shards.files.local_files import Line, Tail, is_finite, is_number, is_step, read_local_file, read_tail
from shards.files.typed_json import parse_json, read_record, unsealed
from shards.output.quantities import short_time

METRICS, LEDGER = "metrics.jsonl", "ledger.jsonl"  # as in metrics.py and ledger.py, which load much more
SIGNS_OF_A_RUN = (METRICS, LEDGER, FOLDER, "DONE")
_TAIL_BYTES, _LONG_TAIL_BYTES = 1 << 16, 1 << 24
_MOST_BEAT_BYTES, _MOST_DONE_BYTES = 4096, 16 << 20
_OF_RANKS = (
    *("ranks/own_step", "ranks/own_step_rank", "ranks/own_step_median", "ranks/data_wait", "ranks/data_wait_rank"),
    *("time/communication", "time/step"),
)
_COPIED_SECONDS = 60.0  # between the time in a heartbeat and its file's: more, and the folder is a copy


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """None: not known. `step`: the last one that was reported or saved. `last_seen`: seconds since 1970. `reasons`: why
    it is in this state, and what in its folder cannot be used. `origin`: where its job is from, if a start tells.
    `ranks`: which of several ranks take the longest, and how much of a step is communication."""

    state: State
    step: int | None
    loss: float | None
    accuracy: float | None
    images_per_second: float | None
    goodput: float | None
    last_seen: float | None
    reasons: tuple[str, ...]
    origin: Origin = NO_ORIGIN
    ranks: str = ""

    def readings(self) -> list[str]:
        """The last loss, accuracy and throughput in words, those that are known."""
        rate = self.images_per_second
        words = (
            "" if self.loss is None else f"loss {self.loss:.4g}",
            "" if self.accuracy is None else f"accuracy {self.accuracy:.3f}",
            "" if rate is None or not math.isfinite(rate) else f"{rate:,.0f} images/s",
        )
        return [word for word in words if word]


class _Reader:
    """Reads the files of one folder, and keeps what was wrong with them."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.reasons: list[str] = []
        self.times: list[float] = []
        self.copied_from: float | None = None  # of a copy: when the run itself was last seen

    @contextmanager
    def judging(self, name: str) -> Iterator[None]:
        """A fault inside is a reason."""
        try:
            yield
        except FileNotFoundError:
            pass
        except OSError as error:
            self.reasons.append(f"{name} cannot be read: {error.strerror or error}")
        except (ValueError, InvalidDataError) as error:
            self.reasons.append(f"{name} is damaged: {str(error).removeprefix(f'{self.run_dir / name} ')}")

    def tail(self, name: str, *, most_bytes: int = _TAIL_BYTES) -> Tail | None:
        """The end of a file of lines."""
        with self.judging(name):
            return read_tail(self.run_dir / name, most_bytes=most_bytes)
        return None

    def last(self, name: str, tail: Tail | None, is_usable: Callable[[Line], bool]) -> Line:
        """The last usable line; empty if there is none."""
        if tail is None:
            return {}
        self.times.append(tail.modified)
        found = tail.last(is_usable)
        if found is None and tail.num_bytes:
            self.reasons.append(f"{name} has no usable line at its end")
        return found or {}

    def small(self, name: str, *, most_bytes: int) -> bytes | None:
        """A whole small file."""
        with self.judging(name):
            path = self.run_dir / name
            data = read_local_file(path, most_bytes=most_bytes)
            self.times.append(path.stat().st_mtime)
            return data
        return None

    def last_seen(self, state: State) -> float | None:
        """The last sign of the run. The files of a copy have the time of the copy, but for a run that began again in
        it."""
        if self.copied_from is not None and state != "running":
            return self.copied_from
        return max(self.times) if self.times else self.recorded()

    def recorded(self) -> float | None:
        """The time at which the run's record, its first file, was written."""
        with self.judging("job.yaml"):
            return (self.run_dir / "job.yaml").stat().st_mtime
        return None

    def has_attempts(self) -> bool:
        """Whether the run has begun; if its checkpoints are in a bucket, this is not known here."""
        with self.judging("checkpoints"):
            return (self.run_dir / "checkpoints" / "attempts").is_dir()
        return False


def read_facts(
    run_dir: Path, *, num_steps: int | None, is_scored: bool, score: str = "test_accuracy", now: float | None = None
) -> RunFacts:
    """What is known of the run. Raises nothing, whatever is in the folder.

    `num_steps`: of its job; `is_scored`: whether it is evaluated as it trains, so that a score may stand further back;
    `score`: what the metrics call the share that is its accuracy.
    """
    reader, now = _Reader(run_dir), time.time() if now is None else now
    tail = reader.tail(METRICS)
    told, saved = reader.last(METRICS, tail, _has_step), reader.last(LEDGER, reader.tail(LEDGER), _is_of_ledger)
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
    state, why = state_of(signs)
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
        reasons=(*filter(None, (why, trouble)), *reader.reasons),
        origin=origin_in(starts) if starts else NO_ORIGIN,
        ranks=_ranks(run_dir, tail.last(_has_ranks, containing=b'"ranks/own_step"') or {} if tail else {}),
    )


def _has_ranks(line: Line) -> bool:
    return all(is_finite(line.get(name)) and line[name] >= 0 for name in _OF_RANKS)


def _ranks(run_dir: Path, line: Line) -> str:
    """The ranks that take the longest, in a line of metrics; empty for a rank that is alone."""
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
    """A number of a line; a loss may be NaN."""
    if type(value) is float:
        return value
    return float(value) if is_finite(value) else None


def _accuracy(reader: _Reader, tail: Tail | None, name: str, *, is_scored: bool) -> float | None:
    """The last score; evaluations may be many lines apart."""

    def is_score(line: Line) -> bool:
        value = line.get(name)
        return is_number(value) and 0 <= value <= 1  # type: ignore[operator]

    mark = f'"{name}"'.encode()
    found = tail.last(is_score, containing=mark) if tail else None
    if found is None and tail and is_scored and len(tail.data) < tail.num_bytes:
        long = reader.tail(METRICS, most_bytes=_LONG_TAIL_BYTES)
        found = long.last(is_score, containing=mark) if long else None
    return _number(found[name]) if found else None


def _goodput(saved: Line) -> float | None:
    """The share of compute in all seconds, in the ledger's last line."""
    seconds = saved.get("seconds", {})
    compute, total = seconds.get("compute"), seconds.get("total")
    if not (is_finite(compute) and is_finite(total)) or not 0 <= compute <= total or not total:
        return None
    return float(compute / total)


def _done_step(reader: _Reader) -> int | None:
    """The step of the DONE marker, if the marker is whole and the weights are there."""
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
            reader.reasons.append("DONE is there, weights/model.safetensors is not; the same command writes it again")
            return None
        return int(found["step"])
    return None


def _start(line: Line, now: float) -> LastStart | None:
    """The last start on record, and whether its process is still there."""
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
    """Rank 0's last heartbeat; None if it is of an earlier start than `attempt`, if that is known."""
    name = f"{FOLDER}/rank-00000.json"
    data = reader.small(name, most_bytes=_MOST_BEAT_BYTES)
    if data is None:
        return None
    written = reader.times[-1]
    age = max(0.0, now - written)
    with reader.judging(name):
        beat = read_record(Beat, data)
        if attempt and beat.attempt != attempt and _number_of(beat.attempt) <= _number_of(attempt):
            return None  # a later one is the same start's, which the guard has rewound
        if abs(written - beat.unix_time) > _COPIED_SECONDS:
            reader.copied_from = beat.unix_time
        place = Place(phase=Phase(beat.phase), step=beat.step, batch=beat.batch)
        hanging = reader.small(f"{FOLDER}/hanging", most_bytes=_MOST_BEAT_BYTES)
        is_hanging = beat.has_dumped or hanging == beat.attempt.encode()
        is_gone = beat.host == socket.gethostname() and not _is_here(beat.pid)
        return LastBeat(
            place=place,
            age_seconds=age,
            is_gone=is_gone,
            is_hanging=is_hanging,
            asked_by=beat.asked_by,
            error=beat.error,
            trouble=beat.trouble,
        )
    return None


def _number_of(attempt: str) -> int:
    return whole_number(attempt.partition("-")[0]) or 0


def _is_here(pid: int) -> bool:
    """Whether this host has such a process, be it another user's."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True
