"""Runs whole commands on a pseudo-terminal, each in its own process."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jobs.cli import main
from tests.rigs.forks import forks
from tests.rigs.processes import ANSWER_SECONDS
from tests.rigs.screens import Screen


def patchline_on(screen: Screen, *words: str, act: Callable[[Screen], None] = lambda _: None) -> int:
    """Runs `patchline WORDS` on that terminal until it ends, calling `act` repeatedly meanwhile; its exit code."""
    process = forks().Process(target=_as_command, args=(list(words), os.ttyname(screen.inside)))
    process.start()
    deadline = time.monotonic() + ANSWER_SECONDS
    while process.exitcode is None and time.monotonic() < deadline:
        screen.read()
        act(screen)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"patchline {' '.join(words)} still runs: {screen.lines}")
    screen.read()
    return process.exitcode


def _as_command(words: list[str], terminal: str) -> None:
    os.setsid()  # the terminal opened next becomes this process's own, so that it receives its Ctrl-C
    with Path(terminal).open("rb+", buffering=0) as file:
        for number in range(3):
            os.dup2(file.fileno(), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
    sys.exit(main(words))
