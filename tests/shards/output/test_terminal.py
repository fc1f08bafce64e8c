"""All that a command or its workers write is escaped, and no line can pass for another message or move the cursor."""

import json
import logging
import shlex
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import pytest
from botocore.credentials import DeferredRefreshableCredentials
from botocore.exceptions import CredentialRetrievalError

from shards.output.terminal import (
    Escaped,
    LogFormatter,
    command_lines,
    command_output,
    escaped_output,
    live_line,
    message_text,
    printable,
    printable_name,
    wrapped_text,
)
from tests.rigs.hostile import HOSTILE, assert_harmless
from tests.rigs.screens import Screen

CHECKOUT = Path(__file__).resolve().parents[3]
WORKERS = """
from shards.reading.parallel import run_tasks
from tests.shards.output.test_terminal import warn
list(run_tasks(warn, range(3), workers=2))
"""


@pytest.fixture(params=[80, 120])
def screen(request: pytest.FixtureRequest) -> Iterator[Screen]:
    """A terminal of 80 columns, and one of 120."""
    screen = Screen(request.param)
    yield screen
    screen.close()


def test_what_is_written_stands_above_the_line(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    screen.take(monkeypatch)
    with live_line() as line:
        assert line is not None
        line.draw("step 1")
        assert screen.read() == ["step 1"]
        logging.getLogger("test").warning("a warning")
        line.draw("step 2, and longer than before")
        sys.stdout.write("to standard output\n")
        sys.stderr.write("to standard error\nin two lines\n")
        line.draw("step 3")
        said = ["a warning", "to standard output", "to standard error", "in two lines"]
        assert screen.read() == [*said, "step 3"]
        line.draw("")
    logging.getLogger("test").warning("after it")
    assert screen.read() == [*said, "after it", ""]
    assert (screen.controls, screen.num_wrapped) == ("", 0)


def test_text_without_an_end_of_line_is_not_drawn_over(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    screen.take(monkeypatch)
    with live_line() as line:
        assert line is not None
        line.draw("step 1")
        sys.stderr.write("half a ")
        assert screen.read() == ["half a"]
        sys.stderr.write("line\n")
        assert screen.read() == ["half a line", "step 1"]
        sys.stderr.write("no end")
        line.draw("step 2")
        assert screen.read() == ["half a line", "no end", "step 2"]


def test_the_line_is_drawn_on_a_terminal_whose_output_is_escaped(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen.take(monkeypatch)
    with escaped_output():
        logging.getLogger().handlers = [logging.StreamHandler(sys.stderr)]
        with live_line() as line:
            assert line is not None
            line.draw("step \x1b[31m1")
            logging.getLogger("test").warning("a \x1b[31mwarning")
            sys.stdout.write("to \rstandard output\n")
            sys.stderr.write("to standard \x9berror\n")
            line.draw("step 2")
            said = ["a \\x1b[31mwarning", "to \\rstandard output", "to standard \\x9berror"]
            assert screen.read() == [*said, "step 2"]
            line.draw("")
        logging.getLogger("test").warning("after\x07 it")
    assert screen.read() == [*said, "after\\x07 it", ""]
    assert (screen.controls, screen.num_wrapped) == ("", 0)


def test_the_echo_of_a_key_is_wiped_away(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    screen.take(monkeypatch)
    with live_line() as line:
        assert line is not None
        line.draw("x" * 200)
        with screen.open() as terminal:
            terminal.write("^C")
        logging.getLogger("test").warning("saved")
        assert [text.strip("x") for text in screen.read()] == ["saved", ""]
        line.keep()
    assert screen.num_wrapped == 0
    assert screen.read() == ["saved", "x" * (screen.columns - 3), ""]


def test_a_line_inside_a_line_gives_way_at_its_end(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    screen.take(monkeypatch)
    with live_line() as outer, live_line() as inner:
        assert outer is not None
        assert inner is outer
    with live_line() as outer:
        assert outer is not None
        outer.draw("train")
        with live_line() as inner:
            assert inner is not None
            inner.draw("evaluate")
            assert screen.read() == ["evaluate"]
        assert screen.read() == ["train"]


def test_the_streams_are_as_before_after_an_error(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    screen.take(monkeypatch)
    before = sys.stdout, sys.stderr, [getattr(each, "stream", None) for each in logging.getLogger().handlers]
    with suppress(ZeroDivisionError), live_line() as line:
        assert line is not None
        assert sys.stderr is not before[1]
        assert sys.stderr.fileno() == before[1].fileno()
        _ = 1 / 0
    after = sys.stdout, sys.stderr, [getattr(each, "stream", None) for each in logging.getLogger().handlers]
    assert after == before
    assert screen.read() == [""]


def test_no_line_where_no_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", StringIO())
    with live_line() as line:
        assert line is None


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        pytest.param("cat/1.jpg", "cat/1.jpg", id="plain"),
        pytest.param("Zoë/猫 🐈.jpg", "Zoë/猫 🐈.jpg", id="any language"),
        pytest.param("a\x1b[2Jb", "a\\x1b[2Jb", id="an escape code"),
        pytest.param("a\rb\x07\x9b", "a\\rb\\x07\\x9b", id="control characters"),
        pytest.param("a\u202eb", "a\\u202eb", id="text from right to left"),
        pytest.param("a\udcffb", "a\\udcffb", id="a byte that is not UTF-8"),
        pytest.param("a\x7fb\u200f\u061c", "a\\u007fb\\u200f\\u061c", id="DEL as in JSON, marks of direction"),
        pytest.param("a\nerror: b\t", "a\\nerror: b\\t", id="a line of its own"),
    ],
)
def test_names_cannot_move_the_cursor(name: str, shown: str) -> None:
    assert printable_name(name) == shown
    assert printable(name) == shown.replace("\\n", "\n").replace("\\t", "\t")


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        pytest.param("one two", ["one two"], id="short"),
        pytest.param("one two three four five", ["one two three", "  four five"], id="between words"),
        pytest.param("  one two three four", ["  one two", "    three four"], id="its own indentation stays"),
        pytest.param("a-very-long-name-of-a-file b", ["a-very-long-name-of-a-file", "  b"], id="words stay whole"),
        pytest.param("run: patchline verify URL", ["run: patchline verify URL"], id="commands stay whole"),
        pytest.param("again:\n  rm -rf a/plan a/work", ["again:", "  rm -rf a/plan a/work"], id="rm, too"),
        pytest.param("one\ntwo", ["one", "two"], id="lines stay lines"),
    ],
)
def test_long_lines_are_wrapped(text: str, lines: list[str]) -> None:
    assert wrapped_text(text, 14, indent="  ").split("\n") == lines


def record(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("test", logging.INFO, __file__, 1, message, arguments, None)


def test_log_lines_are_clean_and_lines_below_the_first_are_indented() -> None:
    text = LogFormatter(StringIO()).format(record("done: %s\nsecond", "a\x1b[31m"))
    first, second = text.split("\n")
    assert first[8:] == " done: a\\x1b[31m"
    assert second == " " * 9 + "second"
    assert LogFormatter(StringIO(), rank=3).format(record("hello"))[8:] == " rank 3: hello"


def test_lines_below_the_first_are_indented() -> None:
    assert message_text("error: a\n12:34:56 b\n  c\n") == "error: a\n  12:34:56 b\n    c"
    assert message_text("one two three\nfour", columns=8) == "one two\n  three\n  four"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("x" * 4_000, "x" * 4_000, id="a long line"),
        pytest.param("a" * 9_000_000 + "end", "a" * 2_000 + " [... 9,000,003 characters in all ...] ", id="name"),
        pytest.param("error\n" * 10_000, "error\n  " * 2_500, id="very many lines"),
    ],
)
def test_messages_do_not_fill_the_screen(text: str, shown: str) -> None:
    message = message_text(text)
    assert message.startswith(shown)
    assert message.endswith(text.strip()[-3:])
    assert len(message) < 45_000


def test_json_stays_json() -> None:
    name = "".join(map(chr, range(256))) + "\u2028\u202e\ud800"
    assert json.loads(printable(json.dumps(name))) == name


def test_log_lines_are_as_wide_as_the_terminal(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    screen.take(monkeypatch)
    text = LogFormatter(sys.stderr).format(record("word " * 60))
    assert screen.columns - 5 < max(map(len, text.split("\n"))) <= screen.columns
    assert len(LogFormatter(StringIO()).format(record("word " * 60)).split("\n")) == 1


def warn(number: int) -> None:
    """A worker's task: what libraries may do there."""
    logging.getLogger("library").warning("%d %s", number, HOSTILE)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(HOSTILE, stacklevel=1)
    sys.stdout.write(HOSTILE.replace("\n", " ") + "\n")


@contextmanager
def own_streams() -> Iterator[tuple[StringIO, StringIO]]:
    """Standard output and standard error of this process, and a log without handlers, until the block ends."""
    streams = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        patch.setattr(logging.getLogger(), "handlers", [])
        yield streams


def fail() -> None:
    raise ValueError(HOSTILE)


class Stubborn:
    """An object that cannot be deleted without an error, which Python ignores."""

    def __del__(self) -> None:
        raise ValueError(HOSTILE)


def test_the_streams_are_escaped() -> None:
    with own_streams() as streams, command_output():
        sys.stdout.write(f"caf\u00e9\t{HOSTILE!s}".partition("\n")[0] + "\n")
        sys.stderr.writelines(["\x1b[2J", "\x7f\n"])
        assert isinstance(sys.stdout, Escaped)
    assert streams[0].getvalue().startswith("caf\u00e9\t\\x1b]0;")
    assert streams[1].getvalue() == "\\x1b[2J\\u007f\n"
    assert not isinstance(sys.stdout, Escaped)
    assert not isinstance(sys.stderr, Escaped)


def test_no_message_has_a_line_that_passes_for_another() -> None:
    hooks = threading.excepthook, sys.unraisablehook
    with own_streams() as streams, command_output():
        logging.getLogger("library").error("%s", HOSTILE)
        try:
            fail()
        except ValueError:
            logging.getLogger("library").exception("with a traceback")
        warnings.warn(HOSTILE, stacklevel=1)
        thread = threading.Thread(target=fail, name=HOSTILE)
        thread.start()
        thread.join()
        stubborn = Stubborn()
        del stubborn
    said = streams[1].getvalue()
    assert_harmless(said)
    assert said.count("Traceback") == 3
    assert said.count("owned") == 6, said
    assert (threading.excepthook, sys.unraisablehook) == hooks


def test_botocore_does_not_log_what_a_credential_process_printed() -> None:
    def refused() -> None:
        raise CredentialRetrievalError(provider="custom-process", error_msg="hidden")

    with own_streams() as streams, command_output(), pytest.raises(CredentialRetrievalError):
        DeferredRefreshableCredentials(refresh_using=refused, method="custom-process").get_frozen_credentials()
    assert streams[1].getvalue() == ""


def test_the_output_of_workers_is_escaped() -> None:
    ended = subprocess.run([sys.executable, "-c", WORKERS], capture_output=True, check=True, cwd=CHECKOUT)
    output, errors = ended.stdout.decode(), ended.stderr.decode()
    assert_harmless(output)
    assert_harmless(errors)
    assert (output.count("owned"), errors.count("owned")) == (3, 6), (output, errors)


def test_a_program_keeps_its_own_handlers() -> None:
    own = logging.NullHandler()
    with own_streams() as streams:
        logging.getLogger().addHandler(own)
        with command_output():
            assert logging.getLogger().handlers == [own]
            logging.getLogger("library").error("not on our handler")
    assert streams[1].getvalue() == ""


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        pytest.param(["a"], ["next: a"], id="one word"),
        pytest.param(["a", "--b", "c"], ["next: a --b c"], id="it fits"),
        pytest.param(["a", "--b", "c d"], ["next: a --b 'c d'"], id="quoted"),
        pytest.param(
            ["a", "--b", "c" * 8, "--d", "e", "--f", "g"],
            ["next: a --b cccccccc \\", "    --d e --f g"],
            id="as much on a line as fits",
        ),
        pytest.param(
            ["a", "--b", "c" * 40, "--d", "e"], ["next: a \\", f"    --b {'c' * 40} \\", "    --d e"], id="a long word"
        ),
    ],
)
def test_commands_can_be_copied(words: list[str], lines: list[str]) -> None:
    found = command_lines("next: ", words, columns=24)
    assert found == lines
    assert shlex.split("\n".join(found).removeprefix("next: ").replace("\\\n", "")) == words


def test_a_command_cannot_move_the_cursor() -> None:
    assert command_lines("$ ", ["a", "b\x1b[2J"], columns=80) == ["$ a 'b\\x1b[2J'"]
