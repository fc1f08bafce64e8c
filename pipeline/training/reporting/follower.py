"""Follows metrics.jsonl as a run writes it: a thread sends new lines to one service, and training never waits for it.

metrics.jsonl is the record of a run. About once a second, the thread reads what is new in it. The service says which
step it has already, and gets the lines after that once and in order. So a run that was killed sends no step twice and
leaves none out, and what a service missed while it was away is sent once it is back.
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
_STEP = re.compile(rb'\{"step": (\d{1,18})[,}]')  # as Metrics writes it
_TAIL_BYTES, _MOST_AT_ONCE = 1 << 20, 512  # lines
SEND_SECONDS = 1.0  # between two looks at the file
FAILING_SECONDS = 3.0  # most that the end of a run waits for a service that does not answer; for one that does:
END_SECONDS = {"done": 30.0, "stopped": 10.0, "failed": 10.0}
_SAY_SECONDS = 3.0  # of waiting, before a line says so
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds between two attempts
_MOST_CHARACTERS = 300  # of a library's error
_PASSWORD = re.compile(r"//[^/@\s]*@")


class StartEnding(Enum):
    """How a start of a run ended: with all steps, to be continued, or with an error."""

    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class CurveLine:
    """Values of a step by their names in TensorBoard, and when they were read. A second line of the same step has the
    values that were added to it."""

    step: int
    values: Mapping[str, float]
    time_ms: int


class Logger(Protocol):
    """One service. Its methods may block and raise: a thread of its own calls them, and repeats a call after an error
    (`write` with the same lines)."""

    title: str

    def open(self) -> int:
        """Begins the run at the service, or continues it there. Returns the last step that the service has, or 0."""

    def place(self) -> str:
        """The address at which the run can be seen; known after `open`."""

    def show_job(self, text: str, settings: Settings) -> None:
        """The job as YAML, and the settings by which runs are compared."""

    def write(self, lines: Sequence[CurveLine]) -> None:
        """Returns once the service has the lines, which are in order."""

    def close(self, ending: StartEnding) -> None:
        """The last call."""


class MetricsReader:
    """Reads the lines of metrics.jsonl that a service lacks, while a run writes the file: those after step `has`.

    The last line is read again each time, since values may be added to it. `known`: the last line when this start
    began; if the service has its step, it has these values, too.
    """

    def __init__(self, path: Path, *, has: int, known: CurveLine | None = None) -> None:
        self._path, self._step = path, has
        self._offset = self._seen = 0  # the last line that was read: where it begins, and its step
        self._names = set(known.values) if known and known.step == has else None  # None: all that the line has

    def read(self) -> Iterator[list[CurveLine]]:
        """The lines that came since the last call, some at a time. Raises OSError and InvalidDataError."""
        found: list[CurveLine] = []
        with open_local_file(self._path) as file:
            file.seek(self._offset)
            first = _STEP.match(file.readline())
            if not (first and int(first[1]) == self._seen):  # nothing is read yet, or the file was written anew
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
        """What the service lacks of a line, if anything."""
        line = _parsed(text)
        if line is None or line.step < self._step:
            return None
        names = (set(line.values) if self._names is None else self._names) if line.step == self._step else set()
        values = {name: value for name, value in line.values.items() if name not in names}
        is_new, self._step, self._names = line.step > self._step, line.step, names | set(values)
        return CurveLine(step=line.step, values=values, time_ms=line.time_ms) if is_new or values else None


def _parsed(text: bytes) -> CurveLine | None:
    """A line of metrics.jsonl; None if it is damaged."""
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
    """The run has ended, and waits no longer."""


class Follower:
    """A thread that feeds `logger` with the lines of `path`. `job`: the job as YAML, and its settings."""

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
        """Whether the thread still runs: it may be left behind in a call that hangs."""
        return self._thread.is_alive()

    def end(self, ending: StartEnding) -> None:
        """Tells the thread that the file is complete. Returns at once."""
        self._ending = ending
        self._ended.set()

    def join(self, *, began: float) -> None:
        """Waits, after `end`, until the service has everything, for a bounded time since `began` (monotonic); then says
        what it lacks."""
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
        """A service that does not take the settings still gets all lines."""
        text, settings = self._job
        plain = {name: without_password(value) if isinstance(value, str) else value for name, value in settings.items()}
        try:
            self.logger.show_job(without_password(text), plain)
        except Exception as error:
            log.warning("%s did not take the settings: %s", self.logger.title, _words(error))

    def _send(self, reader: MetricsReader) -> None:
        """Sends what the file has now. A file that cannot be read is read again later."""
        with suppress(OSError, InvalidDataError):
            for lines in reader.read():
                self._insist(partial(self.logger.write, lines))
                self._sent = lines[-1].step

    def _insist(self, call: Callable[[], None]) -> None:
        """Calls until there is no error; once the run has ended, one more time. _LeftError if nobody waits for it any
        more."""
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
    """A library's error in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return without_password(text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}...")


def without_password(text: str) -> str:
    """The text without the user and the password of any URL in it."""
    return _PASSWORD.sub("//***@", text)


def end_all(followers: Sequence[Follower], ending: StartEnding) -> None:
    """Waits for all services at once, for a bounded time."""
    began = time.monotonic()
    for follower in followers:
        follower.end(ending)
    for follower in followers:
        follower.join(began=began)
