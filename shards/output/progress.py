"""Shows the progress of long work: a live line on a terminal, which vanishes at the end, or a line every 30 seconds in
a log."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from shards.output.quantities import clock, duration
from shards.output.terminal import LiveLine, live_line

log = logging.getLogger(__name__)
LINE_INTERVAL_SECONDS = 30.0
_DRAW_INTERVAL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A part of a line. Logs and live lines with enough room show all facts in full. `as_live_line` says what a
    narrower line leaves out."""

    full: str
    short: str
    weight: int = 1


def as_live_line(facts: Sequence[Fact], columns: int) -> str:
    """Returns the facts in at most `columns` columns. If they do not fit in full, leaves out those of weight 0; if that
    is not enough, shortens all facts, and then drops the lightest, one by one from the last."""
    heavy = [fact.full for fact in facts if fact.weight]
    for texts in ([fact.full for fact in facts], heavy):
        if len(line := _joined(texts)) <= columns:
            return line
    kept = list(facts)
    while len(line := _joined([fact.short for fact in kept])) > columns and len(kept) > 1:
        lightest = min(fact.weight for fact in kept)
        kept.pop(max(number for number, fact in enumerate(kept) if fact.weight == lightest))
    return line[:columns]


def _joined(texts: Iterable[str]) -> str:
    return "  ".join(text for text in texts if text)


def as_log_line(facts: Sequence[Fact]) -> str:
    """Returns all facts in full, for a log."""
    return ", ".join(fact.full for fact in facts if fact.full)


class Ticker:
    """Shows progress at a readable rate: in the live line of a terminal, or as a line every 30 s in a log.

    Use as a context manager. If the work fails, the last line stays on the terminal.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._line: LiveLine | None = None
        self._last_line = self._last_draw = time.monotonic() - _DRAW_INTERVAL_SECONDS

    def __enter__(self) -> Self:
        self._line = self._stack.enter_context(live_line())
        self._last_line = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line is not None:
            if kind is not None:
                self._line.keep()
            self._line.draw("")
        self._stack.close()

    @property
    def is_live(self) -> bool:
        """Whether the progress is shown by a live line on a terminal."""
        return self._line is not None

    def tick(self, facts: Callable[[], Sequence[Fact]]) -> None:
        """Shows the facts if enough time has passed since the last time."""
        now = time.monotonic()
        if self._line is None:
            if now - self._last_line >= LINE_INTERVAL_SECONDS:
                self._last_line = now
                log.info("%s", as_log_line(facts()))
        elif now - self._last_draw >= _DRAW_INTERVAL_SECONDS:
            self._last_draw = now
            self._line.draw(as_live_line(facts(), self._line.columns))


class Progress:
    """Counts finished units of one piece of work, such as `Progress("scan", 1797, unit="images")`. Use as a context
    manager.

    `total` is 0 as long as it is not known. The last line of a log is left out if the work took less than 0.05 s or
    finished no unit. It is also left out if `says_end` is False, for callers that log the result themselves.
    """

    def __init__(self, what: str, total: int, *, unit: str, says_end: bool = True) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done, self.note = 0, ""
        self._says_end = says_end
        self._began = time.monotonic()
        self._ticker = Ticker()

    def __enter__(self) -> Self:
        self._ticker.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ticker.__exit__(kind, error, trace)
        if kind is None and self._says_end and not self._ticker.is_live and self.done:
            spent = duration(time.monotonic() - self._began)
            note = f", {self.note}" if self.note else ""
            if spent == duration(0):  # short phases would fill the log
                return
            log.info("%s: %s %s in %s%s", self.what, f"{self.done:,}", self.unit, spent, note)

    def advance(self, count: int = 1, *, note: str = "") -> None:
        """Counts `count` more units as done. `note` is shown at the end of the line."""
        self.done += count
        self.note = note or self.note
        self._ticker.tick(self.facts)

    def rate(self) -> float:
        """Returns the units per second since this process began the work."""
        return self.done / max(time.monotonic() - self._began, 1e-9)

    def facts(self) -> list[Fact]:
        """Returns the count, share, rate and time left, and the note."""
        rate = self.rate()
        speed = Fact(full=f"{rate:,.1f} {self.unit}/s", short=f"{rate:,.0f}/s")
        note = Fact(full=self.note, short=self.note, weight=0)
        if not self.total:
            count = f"{self.what}: {self.done:,} {self.unit}"
            return [Fact(full=count, short=count, weight=2), speed, note]
        share = 100.0 * self.done / self.total
        count = f"{self.what}: {self.done:,}/{self.total:,}"
        left = max(0, self.total - self.done) / max(rate, 1e-9)
        return [
            Fact(full=f"{count} {self.unit} ({share:.0f} %)", short=f"{count} {self.unit}", weight=2),
            speed,
            Fact(full=f"{clock(left)} left", short=f"{clock(left)} left"),
            note,
        ]
