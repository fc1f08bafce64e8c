"""Follows metrics.jsonl while a run writes it: a thread sends new lines to one service.

Training does not wait for the service, except at the end of a run, for at most 30 seconds. metrics.jsonl is the record
of a run. About once a second, the thread reads the file's new lines. The service says which step it already has, and
gets the lines after that once and in order. So a run that was killed sends no step twice and leaves none out, and lines
that a service missed are sent once it answers again.
"""

import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Protocol

from pipeline.training.reporting.metrics import tag_of
from shards.errors import InvalidDataError
from shards.files.local_files import is_finite, is_step, object_in, open_local_file, read_tail

log = logging.getLogger(__name__)
Settings = Mapping[str, str | int | float]
_STEP = re.compile(rb'\{"step": (\d{1,18})[,}]')  # the start of a line, as Metrics writes it
_TAIL_BYTES, _MOST_AT_ONCE = 1 << 20, 512  # bytes that hold the last line; lines per request
SEND_SECONDS = 1.0  # between two reads of the file
FAILING_SECONDS = 3.0  # longest wait at the end of a run for a service that does not answer
END_SECONDS = {"done": 30.0, "stopped": 10.0, "failed": 10.0}  # longest wait at the end for a service that answers
_SAY_SECONDS = 3.0  # a wait of this length is logged
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds between two tries
_MOST_CHARACTERS = 300  # the most that is shown of a library's error
_PASSWORD = re.compile(r"//[^/@\s]*@")


class StartEnding(Enum):
    """How a start of a run ended: with all steps done, stopped before that, or with an error."""

    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class CurveLine:
    """Values of a step by their names in TensorBoard, and the time when they were read. A second line of the same step
    has only the values that were added to the first."""

    step: int
    values: Mapping[str, float]
    time_ms: int


class Logger(Protocol):
    """One service. Its methods may block and raise: they are called in a separate thread, which repeats a call after an
    error (`write` with the same lines)."""

    title: str

    def open(self) -> int:
        """Begins the run at the service, or continues it there. Returns the last step that the service has, or 0."""

    def place(self) -> str:
        """Returns where the run can be seen, such as a URL. Called after `open`."""

    def show_job(self, text: str, settings: Settings) -> None:
        """Shows the job as YAML, and the settings by which runs are compared."""

    def write(self, lines: Sequence[CurveLine]) -> None:
        """Sends lines, which are in order. Returns once the service has them."""

    def close(self, ending: StartEnding) -> None:
        """Ends the run at the service. No call follows."""


class MetricsReader:
    """Reads the lines of metrics.jsonl after step `has`, which a service does not have yet, while a run writes the
    file.

    The last line is read again each time, since values may be added to it. `known`: the last line when this start
    began; a service that has its step also has its values.
    """

    def __init__(self, path: Path, *, has: int, known: CurveLine | None = None) -> None:
        self._path, self._step = path, has
        self._offset = self._seen = 0  # the last line that was read: its offset and its step
        self._names = set(known.values) if known and known.step == has else None  # None: the service has all of them

    def read(self) -> Iterator[list[CurveLine]]:
        """Yields the lines that are new since the last call, in lists of up to `_MOST_AT_ONCE`. Raises OSError or
        InvalidDataError if the file cannot be read."""
        found: list[CurveLine] = []
        with open_local_file(self._path) as file:
            file.seek(self._offset)
            first = _STEP.match(file.readline())
            if not (first and int(first[1]) == self._seen):  # nothing was read yet, or the file was rewritten
                self._offset = 0
            file.seek(self._offset)
            while (text := file.readline()).endswith(b"\n"):
                quick = _STEP.match(text)
                if quick:
                    self._offset, self._seen = file.tell() - len(text), int(quick[1])
                line = None if quick and self._seen < self._step else self._fresh(text)
                if line:
                    found.append(line)
                if len(found) == _MOST_AT_ONCE:
                    yield found
                    found = []
        if found:
            yield found

    def _fresh(self, text: bytes) -> CurveLine | None:
        """Returns the part of a line that the service does not have; None if it has all of the line."""
        line = _parsed(text)
        if line is None or line.step < self._step:
            return None
        names = (set(line.values) if self._names is None else self._names) if line.step == self._step else set()
        values = {name: value for name, value in line.values.items() if name not in names}
        is_new, self._step, self._names = line.step > self._step, line.step, names | set(values)
        return CurveLine(step=line.step, values=values, time_ms=line.time_ms) if is_new or values else None


def _parsed(text: bytes) -> CurveLine | None:
    """Parses a line of metrics.jsonl. Returns None if it is damaged."""
    values = object_in(text)
    if values is None or not is_step(values.get("step")):
        return None
    step: int = values.pop("step")
    numbers = {
        tag_of(name): float(value)
        for name, value in values.items()
        if is_finite(value) or (isinstance(value, float) and not math.isfinite(value))
    }
    return CurveLine(step=step, values=numbers, time_ms=time.time_ns() // 1_000_000)


def _last_line(path: Path) -> CurveLine | None:
    try:
        tail = read_tail(path, most_bytes=_TAIL_BYTES)
    except (OSError, InvalidDataError):
        return None
    line = tail.last(lambda line: is_step(line.get("step"))) if tail else None
    return _parsed(json.dumps(line).encode()) if line else None


class _LeftError(Exception):
    """The run has ended and no longer waits for the service."""


class Follower:
    """A thread that sends the lines of `path` to `logger`. `job`: the job as YAML, and its settings."""

    def __init__(self, logger: Logger, path: Path, *, job: tuple[str, Settings]) -> None:
        self.logger = logger
        self._path, self._job, self._known = path, job, _last_line(path)
        self._sent = 0  # the last step that the service has
        self._ended, self._ending = threading.Event(), StartEnding.FAILED
        self._fault, self._has_warned, self._is_left = "", False, False
        self._thread = threading.Thread(target=self._run, name=f"logger-{logger.title}", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread still runs. It is left behind if a call hangs."""
        return self._thread.is_alive()

    def end(self, ending: StartEnding) -> None:
        """Tells the thread that the file is complete. Returns at once."""
        self._ending = ending
        self._ended.set()

    def join(self, *, began: float) -> None:
        """Waits, after `end`, until the service has everything, but only for a bounded time since `began` (monotonic).
        Then logs how many lines the service does not have."""
        has_said = False
        while self.is_alive:
            most, waited = FAILING_SECONDS if self._fault else END_SECONDS[self._ending.value], time.monotonic() - began
            if waited > most:
                break
            if waited > _SAY_SECONDS and not has_said:
                log.info("waiting for %s, %.0f s at most", self.logger.title, most)
                has_said = True
            self._thread.join(0.05)
        self._is_left = True
        self._say_missing()

    def _say_missing(self) -> None:
        try:
            missing = sum(map(len, MetricsReader(self._path, has=self._sent).read()))
        except (OSError, InvalidDataError):
            return
        if missing:
            log.warning(
                "%s has not taken the last %d lines of the run%s; %s has them, and the same command sends them if "
                "there is more to train",
                *(self.logger.title, missing, f" ({self._fault})" if self._fault else "", self._path),
            )

    def _run(self) -> None:
        try:
            self._insist(self._open)
            self._show_job()
            reader, is_last = MetricsReader(self._path, has=self._sent, known=self._known), False
            while not is_last:
                is_last = self._ended.wait(SEND_SECONDS)
                self._send(reader)
            self._insist(lambda: self.logger.close(self._ending))
        except _LeftError:
            pass

    def _open(self) -> None:
        self._sent = self.logger.open()
        continues = f" (continues after step {self._sent})" if self._sent else ""
        log.info("%s: %s%s", self.logger.title, without_password(self.logger.place()), continues)

    def _show_job(self) -> None:
        """Sends the job and its settings. If the service refuses them, it still gets all lines."""
        text, settings = self._job
        plain = {name: without_password(value) if isinstance(value, str) else value for name, value in settings.items()}
        try:
            self.logger.show_job(without_password(text), plain)
        except Exception as error:
            log.warning("%s did not take the settings: %s", self.logger.title, _words(error))

    def _send(self, reader: MetricsReader) -> None:
        """Sends the new lines of the file. If it cannot be read, they are sent later."""
        with suppress(OSError, InvalidDataError):
            for lines in reader.read():
                self._insist(partial(self.logger.write, lines))
                self._sent = lines[-1].step

    def _insist(self, call: Callable[[], None]) -> None:
        """Repeats a call until it succeeds. Once the run has ended, tries only once more. Raises _LeftError if that
        fails, or if the run no longer waits."""
        pause = _FIRST_PAUSE
        while not self._is_left:
            is_last = self._ended.is_set()
            try:
                call()
            except Exception as error:
                self._failed(error)
            else:
                if self._fault:
                    log.info("%s answers", self.logger.title)
                self._fault = ""
                return
            if is_last:
                break
            self._ended.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise _LeftError

    def _failed(self, error: Exception) -> None:
        self._fault = _words(error)
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s does not answer: %s; training continues, and what it misses is sent once it answers",
                *(self.logger.title, self._fault),
            )


def _words(error: Exception) -> str:
    """Returns a library's error in one line, shortened and without passwords."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return without_password(text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}...")


def without_password(text: str) -> str:
    """Returns the text without the users and passwords of URLs in it."""
    return _PASSWORD.sub("//***@", text)


def end_all(followers: Sequence[Follower], ending: StartEnding) -> None:
    """Ends all followers, and waits for their services together, for a bounded time."""
    began = time.monotonic()
    for follower in followers:
        follower.end(ending)
    for follower in followers:
        follower.join(began=began)
