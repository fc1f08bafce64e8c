"""One live line at the bottom of a terminal; other output appears above it.

The line is drawn with carriage returns and blanks only. No cursor is hidden, so none has to be restored after a kill,
and terminals without escape codes show it too.
"""

import logging
import os
import re
import sys
import textwrap
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TextIO, cast

_ECHO = 2  # columns of the ^C that a terminal echoes behind the line
_COMMAND = re.compile("(^|: ) *patchline ")
_COLUMNS = 80  # of a terminal that does not report its width
_LOG_INDENT = " " * len("12:34:56 ")
# Control characters, Unicode's line ends, changes of direction, bytes of file names that are not UTF-8.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A part of a line: in full in logs and if there is room, else short. The lightest are left out first."""

    full: str
    short: str
    weight: int = 1


def fitted(facts: Sequence[Fact], columns: int) -> str:
    """The facts in at most `columns` columns: all in full, else without those of weight 0, else all short, else without
    the lightest (the last of them first)."""
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


def printable(text: str) -> str:
    """The text with control characters escaped (`\\x1b`), since they could move the cursor or worse."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def printable_name(name: str) -> str:
    """As `printable`, for names of files and classes: line breaks and tabs are escaped too."""
    return printable(name).replace("\t", "\\t").replace("\n", "\\n")


def wrapped(text: str, columns: int, *, indent: str = "") -> str:
    """The text wrapped between words at `columns`, continuation lines indented. Commands stay whole, so that they can
    be copied."""
    lines = []
    for line in text.split("\n"):
        own = line[: len(line) - len(line.lstrip())] + "  " if line[:1] == " " else indent
        is_whole = len(line) <= columns or bool(_COMMAND.search(line))
        wrapper = textwrap.TextWrapper(
            columns, subsequent_indent=own, replace_whitespace=False, break_on_hyphens=False, break_long_words=False
        )
        lines += [line] if is_whole else wrapper.wrap(line)
    return "\n".join(lines)


def columns_of(stream: TextIO) -> int:
    """The width of the terminal behind a stream; 0 if it is not a terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or _COLUMNS if stream.isatty() else 0
    except (OSError, ValueError):
        return _COLUMNS


class LogFormatter(logging.Formatter):
    """`12:34:56 message`, without control characters; further lines of a message are indented, tracebacks are not.

    Ranks above 0 add their number. `terminal`: if this stream is a terminal, lines are wrapped to its width.
    """

    def __init__(self, terminal: TextIO, *, rank: int = 0) -> None:
        self._terminal = terminal
        who = f"rank {rank}: " if rank else ""
        super().__init__(f"%(asctime)s {who}%(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """The text of one record, which may be several lines."""
        text = printable(super().format(record))
        if record.exc_info:
            return text
        text = text.replace("\n", "\n" + _LOG_INDENT)
        columns = columns_of(self._terminal)
        return wrapped(text, columns, indent=_LOG_INDENT) if columns else text


class LiveLine:
    """The live line of one terminal. Any thread may write to the streams `Above` it."""

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal
        self.lock = threading.RLock()
        self.is_open = False  # the terminal's last line holds other output, without a line break
        self._shown = ""

    @property
    def columns(self) -> int:
        """Room for the live line: an echoed ^C must not wrap it."""
        return max(1, columns_of(self.terminal) - 1 - _ECHO)

    def draw(self, line: str) -> None:
        """Replaces the line; an empty one clears it."""
        with self.lock:
            end = "\n" if self.is_open else self._blank()
            self.is_open = False
            self._shown = printable_name(line)[: self.columns]
            self._put(end + self._shown)

    def keep(self) -> None:
        """Leaves the line on the terminal as ordinary output."""
        with self.lock:
            line, shown = self._blank(), self._shown
            self._shown = ""
            self._put(line + shown + "\n" if shown else "")

    @contextmanager
    def out_of_the_way(self) -> Iterator[None]:
        """Clears the line while the block writes to the terminal, then shows it again below."""
        with self.lock:
            self._put(self._blank())
            yield
            if self._shown and not self.is_open:
                self._put(self._shown)

    @property
    def shown(self) -> str:
        """The text of the line."""
        return self._shown

    def _blank(self) -> str:
        width = min(len(self._shown) + _ECHO, self.columns + _ECHO)
        return "\r" + " " * width + "\r" if self._shown and not self.is_open else ""

    def _put(self, text: str) -> None:
        self.terminal.write(text)
        self.terminal.flush()


class Above:
    """A stream whose text appears above the live line of its terminal."""

    def __init__(self, stream: TextIO, line: LiveLine) -> None:
        self.stream, self.line = stream, line

    def write(self, text: str) -> int:
        """Writes at once; the live line is shown again after a line break."""
        if not text:
            return 0
        with self.line.lock, self.line.out_of_the_way():
            self.stream.write(text)
            self.stream.flush()
            self.line.is_open = not text.endswith("\n")
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes the lines in order."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flushes the stream; `write` has done so already."""
        self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)  # fileno, encoding, isatty: those of the stream


@contextmanager
def live_line() -> Iterator[LiveLine | None]:
    """The terminal's live line while this is open: standard output, standard error and the log go above it.

    None if standard error is not a terminal. A nested `live_line` is the same line, which is restored at the end.
    """
    outer = sys.stderr
    if isinstance(outer, Above):
        before = outer.line.shown
        try:
            yield outer.line
        finally:
            outer.line.draw(before)
    elif outer is None or not outer.isatty():
        yield None
    else:
        line = LiveLine(outer)
        with ExitStack() as stack:
            _go_above(line, stack)
            yield line


def _go_above(line: LiveLine, stack: ExitStack) -> None:
    """Puts the streams of this process above the line until the stack is closed."""
    above = cast("TextIO", Above(line.terminal, line))
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is line.terminal:
            handler.setStream(above)
            stack.callback(handler.setStream, line.terminal)
    stack.callback(setattr, sys, "stderr", sys.stderr)
    sys.stderr = above
    if sys.stdout is not None and sys.stdout.isatty():
        stack.callback(setattr, sys, "stdout", sys.stdout)
        sys.stdout = cast("TextIO", Above(sys.stdout, line))
