"""Progress of long work: a bar on a terminal, one line every 30 seconds in a log."""

import logging
import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

log = logging.getLogger(__name__)
LINE_INTERVAL_SECONDS = 30.0


class Progress:
    """Counts finished units of one piece of work, e.g. `Progress("scan", 1797, unit="images")`.

    Use as a context manager. `total` 0: nobody knows yet. `start` is where the count begins (a continued run). `note`
    is shown behind the rate. `bar` False writes lines on a terminal too: for work inside work that has a bar already.
    """

    def __init__(self, what: str, total: int, *, unit: str, start: int = 0, bar: bool = True) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.start, self.done, self.note = start, start, ""
        self._began = self._last_line = time.monotonic()
        self._bar = _terminal_bar(unit) if bar and sys.stderr.isatty() else None
        self._task = (
            None if self._bar is None else self._bar.add_task(what, total=total or None, completed=start, rate="")
        )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None and self.done > self.start:
            log.info("%s", self.line())

    def advance(self, count: int = 1, *, note: str = "") -> None:
        """Count `count` more units as done."""
        self.done += count
        self.note = note or self.note
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=count, rate=f"{self.rate():,.1f} {self.unit}/s {self.note}")
        elif time.monotonic() - self._last_line >= LINE_INTERVAL_SECONDS:
            self._last_line = time.monotonic()
            log.info("%s", self.line())

    def rate(self) -> float:
        """Units a second since the start of this process's work."""
        return (self.done - self.start) / max(time.monotonic() - self._began, 1e-9)

    def line(self) -> str:
        """What a log shows: count, share, rate, time left."""
        if not self.total:
            return f"{self.what}: {self.done:,} {self.unit}, {self.rate():,.1f} {self.unit}/s {self.note}".rstrip()
        share = 100.0 * self.done / max(self.total, 1)
        left = (self.total - self.done) / max(self.rate(), 1e-9)
        text = (
            f"{self.what}: {self.done:,}/{self.total:,} {self.unit} ({share:.0f} %), {self.rate():,.1f} {self.unit}/s"
        )
        return f"{text}, {left:,.0f} s left {self.note}".rstrip()


def _terminal_bar(unit: str) -> RichProgress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    times = (TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[rate]}"))
    return RichProgress(*columns, *times, console=Console(stderr=True))
