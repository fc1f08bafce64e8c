"""Sends a run's curves to one service, on a thread of its own: training never waits for it.

The service leads. It says which step it has; the lines of metrics.jsonl after that are sent first, then those of the
steps as they come. So a run that was killed sends no step twice and leaves none out, and what a service missed while it
was away is sent once it is back: a full queue only means that the thread reads the file again.

Reads the lines of some steps out of metrics.jsonl, a few at a time, while a run writes it.
"""

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.training.reporting.metrics import tag_of
from pipeline.training.settings.loggers import Line, Logger, Settings, StartEnding, without_password
from shards.errors import InvalidDataError
from shards.files.local_files import is_finite, is_step, object_in, open_local_file

_STEP = re.compile(rb'\{"step": (\d{1,18})[,}]')  # as Metrics writes it


def lines_between(path: Path, *, after: int, last: int, most_at_once: int) -> Iterator[list[Line]]:
    """The lines of the steps `after` + 1 to `last`, under the names that their values have in TensorBoard."""
    found: list[Line] = []
    with open_local_file(path) as file:
        for text in file:
            quick = _STEP.match(text)
            if quick and not after < int(quick[1]) <= last:
                continue
            line = _line(text)
            if line and after < line.step <= last:
                found.append(line)
            if len(found) == most_at_once:
                yield found
                found = []
    if found:
        yield found


def _is_float(value: object) -> bool:
    """Whether it is a number that a float holds; NaN and infinity are."""
    return is_finite(value) or (isinstance(value, float) and not math.isfinite(value))


def _line(text: bytes) -> Line | None:
    """Parses a line; None if it is no line of metrics, such as one that is being written."""
    values = object_in(text) if text.endswith(b"\n") else None
    if values is None or not is_step(values.get("step")):
        return None
    step: int = values.pop("step")
    tagged = {tag_of(name): float(value) for name, value in values.items() if _is_float(value)}
    return Line(step=step, values=tagged, time_ms=time.time_ns() // 1_000_000)


log = logging.getLogger(__name__)
MOST_WAITING = 4096  # lines in memory; those after them are read from the file
SEND_SECONDS = 1.0  # between two requests, which carry what has come meanwhile
END_SECONDS = {
    StartEnding.DONE: 30.0,
    StartEnding.STOPPED: 10.0,
    StartEnding.FAILED: 10.0,
}  # most that the end of a run waits
FAILING_SECONDS = 3.0  # the same if the service does not answer
_SAY_SECONDS = 3.0  # of waiting, before a line says so
_MOST_AT_ONCE = 512  # lines
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds between two attempts
_MOST_CHARACTERS = 300  # of a library's error


class _LeftError(Exception):
    """The run has ended, and waits no longer."""


class LoggerThread:
    """Feeds `logger` with the lines of `path` up to `step`, where this start of the run begins, and then with what is
    written. All methods return at once, but `join`."""

    def __init__(self, logger: Logger, path: Path, *, step: int) -> None:
        self.logger = logger
        self._path, self._newest = path, step
        self._changed = threading.Condition()
        self._waiting: list[Line] = []
        self._is_behind = True  # until the file has been compared with what the service has
        self._shown: tuple[str, Settings] | None = None
        self._ending: StartEnding | None = None
        self._sent = 0  # the last step that the service has
        self._last: Line | None = None  # that was sent
        self._fault = ""
        self._has_warned = self._is_left = False
        self._thread = threading.Thread(target=self._run, name=f"logger-{logger.title}", daemon=True)
        self._thread.start()

    def show_job(self, text: str, settings: Settings) -> None:
        """The job of this start."""
        plain = {name: without_password(value) if isinstance(value, str) else value for name, value in settings.items()}
        with self._changed:
            self._shown = without_password(text), plain
            self._changed.notify()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """A line that metrics.jsonl has now."""
        self._put(step, values, is_added=False)

    def amend(self, step: int, values: dict[str, float]) -> None:
        """More values of the last line, which metrics.jsonl has now."""
        self._put(step, values, is_added=True)

    def _put(self, step: int, values: Mapping[str, float], *, is_added: bool) -> None:
        tagged = {tag_of(name): value for name, value in values.items()}
        line = Line(step=step, values=tagged, time_ms=time.time_ns() // 1_000_000, is_added=is_added)
        with self._changed:
            self._newest = step
            if len(self._waiting) < MOST_WAITING:
                self._waiting.append(line)
            else:
                self._is_behind = True
            self._changed.notify()

    def end(self, ending: StartEnding) -> None:
        """Nothing more comes."""
        with self._changed:
            self._ending = ending
            self._changed.notify()

    def join(self, ending: StartEnding, *, began: float | None = None) -> None:
        """Waits, after `end`, until the service has everything, for a bounded time; then says what it has not. `began`:
        the monotonic time of `end`, if other services have been waited for since."""
        began, has_said = time.monotonic() if began is None else began, False
        while self._thread.is_alive():
            most = FAILING_SECONDS if self._fault else END_SECONDS[ending]
            waited = time.monotonic() - began
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
            found = lines_between(self._path, after=self._sent, last=self._newest, most_at_once=_MOST_AT_ONCE)
            missing = sum(map(len, found))
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
            while self._round():
                pass
            self._insist(lambda: self.logger.close(self._ending or StartEnding.FAILED))
        except _LeftError:
            pass

    def _open(self) -> None:
        self._sent = self.logger.open()
        continues = f" (continues after step {self._sent})" if self._sent else ""
        log.info("%s: %s%s", self.logger.title, without_password(self.logger.place()), continues)

    def _round(self) -> bool:
        """Sends what there is, or waits for something; False once all is sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_behind or self._shown or self._ending)
            shown, self._shown = self._shown, None
            if not (self._waiting or self._is_behind or shown):
                return False
        if shown:
            self._show(*shown)
        with self._changed:
            self._changed.wait_for(lambda: self._ending, timeout=SEND_SECONDS)
            lines, self._waiting = self._waiting, []
            is_behind, self._is_behind = self._is_behind, False
            newest = self._newest
        if is_behind and self._sent < newest:
            try:
                for some in lines_between(self._path, after=self._sent, last=newest, most_at_once=_MOST_AT_ONCE):
                    self._send(some)
            except (OSError, InvalidDataError) as error:  # of metrics.jsonl
                return self._is_to_read_again(error)
        for first in range(0, len(lines), _MOST_AT_ONCE):
            self._send(lines[first : first + _MOST_AT_ONCE])
        return True

    def _is_to_read_again(self, error: Exception) -> bool:
        """After a pause; False once the run has ended."""
        log.info("%s waits for lines of %s: %s", self.logger.title, self._path, _words(error))
        with self._changed:
            self._is_behind = True
            return not self._changed.wait_for(lambda: self._ending, timeout=_LONGEST_PAUSE)

    def _show(self, text: str, settings: Settings) -> None:
        """Settings that a service does not take keep no line from it."""
        try:
            self.logger.show_job(text, settings)
        except Exception as error:
            log.warning("%s did not take the settings: %s", self.logger.title, _words(error))

    def _send(self, lines: Sequence[Line]) -> None:
        fresh = self._fresh(lines)
        if fresh:
            self._insist(lambda: self.logger.write(fresh))
            self._last = fresh[-1]
            self._sent = max(self._sent, self._last.step)

    def _fresh(self, lines: Sequence[Line]) -> list[Line]:
        """What the service does not have yet. A line from the file may have the values already that are added to it
        here."""
        fresh: list[Line] = []
        sent, last = self._sent, self._last
        for line in lines:
            one = line
            if line.is_added:
                has = last.values if last and last.step == line.step else {}
                one = replace(line, values={name: value for name, value in line.values.items() if name not in has})
            elif line.step <= sent:
                continue
            if one.values:
                fresh.append(one)
                sent, last = max(sent, one.step), one
        return fresh

    def _insist(self, call: Callable[[], None]) -> None:
        """Calls until there is no error; once the run has ended, one more time. _LeftError if nobody waits for it any
        more."""
        pause = _FIRST_PAUSE
        while not self._is_left:
            is_last = self._ending is not None
            try:
                call()
            except Exception as error:
                self._failed(error)
            else:
                self._worked()
                return
            if is_last:
                break
            with self._changed:
                self._changed.wait_for(lambda: self._ending, timeout=pause)
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

    def _worked(self) -> None:
        if self._fault:
            log.info("%s answers", self.logger.title)
        self._fault = ""


def _words(error: Exception) -> str:
    """The error of a library in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return without_password(text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}...")
