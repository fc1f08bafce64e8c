"""Whatever a command or one of its workers says is escaped, and no line of it can pass for another message.

Commands in it are wrapped before their flags, and still work when they are copied.
"""

import logging
import shlex
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from shards.output.terminal import Escaped, command_lines, command_output
from tests.rigs.hostile import HOSTILE, assert_harmless

CHECKOUT = Path(__file__).resolve().parents[3]

WORKERS = """
from shards.reading.parallel import run_tasks
from tests.shards.output.test_command_output import warn
list(run_tasks(warn, range(3), workers=2))
"""


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
