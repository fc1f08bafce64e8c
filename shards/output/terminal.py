"""Writes the output of a command and its worker processes to a terminal or a log: all text escaped, and one live line
below it.

Names come from data, which may be hostile. All output passes through `Escaped`, so it contains no control characters.
Messages also pass through `message_text`, so that no line of a message can look like another message. This covers the
Python output of other libraries, too. Libraries in C write to the file descriptors directly; see
`pipeline/data/decode.py` for the one that repeated names from data.

The live line is drawn only with carriage returns and blanks. The cursor is not hidden, so it need not be restored after
a kill, and terminals without escape codes show the line, too.
"""

import logging
import os
import re
import shlex
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO, cast

from shards.output.url_secrets import without_secrets

_ECHO = 2  # columns of the ^C that a terminal echoes after the line
_COMMAND = re.compile("(^|: ) *(patchline|hf download|rm -rf) ")
_COLUMNS = 80  # assumed for a terminal that does not report its width
_LOG_INDENT = " " * len("12:34:56 ")
_INDENT = "  "
_MOST_IN_A_LINE, _MOST_IN_A_MESSAGE = 4_000, 40_000  # characters; a name may have millions
# Control characters, Unicode line ends, changes of writing direction, and bytes of file names that are not UTF-8.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb\ud800-\udfff]"
)
_NO_JSON_ESCAPE = "\x7f"  # JSON may contain this control character unescaped, but would be invalid with \x7f
_FLAG_INDENT = " " * 4
log = logging.getLogger(__name__)
_NOISY = ("botocore", "boto3", "urllib3", "s3transfer")
# These warn of each failed attempt with a traceback, which may quote a credential process. Storage says what failed.
_UNSAFE = ("botocore.credentials", "botocore.tokens")


def printable(text: str) -> str:
    """Returns the text with control characters escaped (`\\x1b`), because they could move the cursor or do worse."""
    return _CONTROLS.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    if found[0] == _NO_JSON_ESCAPE:
        return "\\u007f"
    return found[0].encode("unicode_escape", "surrogatepass").decode()


def printable_name(name: str) -> str:
    """Escapes the name of a file or a class: like `printable`, and line breaks and tabs too."""
    return printable(name).replace("\t", "\\t").replace("\n", "\\n")


def wrapped_text(text: str, columns: int, *, indent: str = "") -> str:
    """Returns the text wrapped between words at `columns`, with continuation lines indented. Lines with a command stay
    whole, so that they can be copied."""
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
    """Returns the width of the terminal that a stream writes to, or 0 if it is not a terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or _COLUMNS if stream.isatty() else 0
    except (OSError, ValueError):
        return _COLUMNS


def message_text(text: str, *, columns: int = 0, indent: str = _INDENT) -> str:
    """Returns a message as it is written: without secrets of URLs, escaped, with the middle cut out if it is long, and
    wrapped at `columns` (0: not wrapped). All lines after the first are indented, so that none can look like another
    message."""
    whole = printable(without_secrets(text.rstrip("\n")))
    lines = [_cut(line, _MOST_IN_A_LINE) for line in whole.split("\n")]
    text = _cut(f"\n{indent}".join(lines), _MOST_IN_A_MESSAGE)
    return wrapped_text(text, columns, indent=indent) if columns else text


def _cut(text: str, most: int) -> str:
    """Returns the text or, if it is too long, its first and last characters and its length."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} [... {len(text):,} characters in all ...] {text[-(most // 4) :]}"


class LogFormatter(logging.Formatter):
    """Formats records as `12:34:56 message`, using `message_text`. Ranks above 0 add their number.

    If the stream `terminal` is a terminal, lines are wrapped to its width, except those of tracebacks.
    """

    def __init__(self, terminal: TextIO, *, rank: int = 0) -> None:
        self._terminal = terminal
        who = f"rank {rank}: " if rank else ""
        super().__init__(f"%(asctime)s {who}%(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Returns the text of one record, which may have several lines."""
        columns = 0 if record.exc_info else columns_of(self._terminal)
        return message_text(super().format(record), columns=columns, indent=_LOG_INDENT)


class LiveLine:
    """The live line of one terminal. Any thread may write to the streams above it (`Above`)."""

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal
        self.lock = threading.RLock()
        self.is_open = False  # whether the terminal's last line holds other output, without a line break
        self._shown = ""

    @property
    def columns(self) -> int:
        """The width of the live line. It is narrower than the terminal, so that an echoed ^C does not wrap it."""
        return max(1, columns_of(self.terminal) - 1 - _ECHO)

    def draw(self, line: str) -> None:
        """Replaces the line. An empty `line` clears it."""
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


class Escaped:
    """A stream that escapes the text written to it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Writes the text with its control characters escaped, except tabs and line breaks."""
        self.stream.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes the lines in order."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flushes the stream."""
        self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)  # fileno, encoding and isatty are those of the stream


class Above(Escaped):
    """An escaped stream whose text appears above the live line of its terminal."""

    def __init__(self, stream: TextIO, line: LiveLine) -> None:
        super().__init__(stream)
        self.line = line

    def write(self, text: str) -> int:
        """Writes the text at once. The live line is shown again after a line break."""
        if not text:
            return 0
        with self.line.lock, self.line.out_of_the_way():
            super().write(text)
            self.flush()
            self.line.is_open = not text.endswith("\n")
        return len(text)


def unescaped(stream: TextIO) -> TextIO:
    """Returns the stream inside an escaped one, for the live line and for colours. Names must be escaped by
    `printable_name` first."""
    return stream.stream if isinstance(stream, Escaped) else stream


@contextmanager
def escaped_output() -> Iterator[None]:
    """Escapes everything that is written to standard output and standard error inside the block."""
    with ExitStack() as stack:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and not isinstance(stream, Escaped):
                stack.callback(setattr, sys, name, stream)
                setattr(sys, name, Escaped(stream))
        yield


@contextmanager
def live_line() -> Iterator[LiveLine | None]:
    """Yields the terminal's live line. Inside the block, standard output, standard error and the log appear above the
    line.

    Yields None if standard error is not a terminal. A nested `live_line` yields the same line, and restores its text at
    the end.
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
        line = LiveLine(unescaped(outer))
        with ExitStack() as stack:
            _go_above(line, stack)
            yield line


def _go_above(line: LiveLine, stack: ExitStack) -> None:
    """Lets the streams of this process write above the line until the stack is closed."""
    above = cast("TextIO", Above(line.terminal, line))
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and unescaped(handler.stream) is line.terminal:
            stack.callback(handler.setStream, handler.stream)
            handler.setStream(above)
    stack.callback(setattr, sys, "stderr", sys.stderr)
    sys.stderr = above
    if sys.stdout is not None and sys.stdout.isatty():
        stack.callback(setattr, sys, "stdout", sys.stdout)
        sys.stdout = cast("TextIO", Above(unescaped(sys.stdout), line))


def command_lines(before: str, words: Sequence[str], *, columns: int) -> list[str]:
    """Returns the lines of a command after the prompt `before`. Breaks a line before a flag that would make it longer
    than `columns`; a flag that is longer stays whole."""
    lines = [before]
    for number, flag in enumerate(_flags(words)):
        line = f"{lines[-1]}{' ' if number else ''}{flag}"
        if number and len(line) + len(" \\") > columns:
            lines.append(_FLAG_INDENT + flag)
        else:
            lines[-1] = line
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def _flags(words: Sequence[str]) -> list[str]:
    """Returns the quoted words, with each flag and its values in one string."""
    flags: list[str] = []
    for word in words:
        quoted = printable_name(shlex.quote(word))
        if flags and not word.startswith("--"):
            flags[-1] += f" {quoted}"
        else:
            flags.append(quoted)
    return flags


@contextmanager
def command_output(*, level: int = logging.INFO, rank: int = 0) -> Iterator[None]:
    """Sends the log to standard error and escapes both standard streams inside the block.

    Warnings, and errors that end a thread, are logged, because Python would not indent their further lines. A program
    with its own log keeps its handlers.
    """
    with escaped_output(), ExitStack() as stack:
        root = logging.getLogger()
        if not root.handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(LogFormatter(sys.stderr, rank=rank))
            stack.callback(root.removeHandler, handler)
            root.addHandler(handler)
            root.setLevel(level)
        for noisy in _NOISY:
            logging.getLogger(noisy).setLevel(logging.WARNING)
        for unsafe in _UNSAFE:
            logging.getLogger(unsafe).setLevel(logging.ERROR)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=r"PIL\.")  # about odd metadata and large sizes, which are checked
        stack.callback(logging.captureWarnings, False)
        logging.captureWarnings(True)
        for module, say in ((threading, _say_end_of_thread), (sys, _say_unraisable)):
            name = "excepthook" if module is threading else "unraisablehook"
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, say)
        yield


def _say_end_of_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit):
        name = ended.thread.name if ended.thread else "a thread"
        log.error("%s ended", name, exc_info=ended.exc_value)


def _say_unraisable(ignored: Any) -> None:
    log.error("%s", ignored.err_msg or "an error was ignored", exc_info=ignored.exc_value)
