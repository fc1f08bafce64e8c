"""What Ctrl-C and TERM do to a command. A training run handles signals itself (training/signals.py).

While a command loads, the first signal ends it at once. While it works, the first signal is raised as
KeyboardInterrupt, so that half-written files are cleaned up; a second signal, or 10 s, end it at once.
"""

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

from pipeline.training.signals import install
from pipeline.training.stopping import DEADLINE_SECONDS, end_now, say

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHELL_ADDS = 128  # to a signal's number, as the exit code of a process that it ended


class Interrupted(KeyboardInterrupt):
    """`number`: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


def exit_code_of(interrupt: KeyboardInterrupt) -> int:
    """130 after Ctrl-C, 143 after TERM, as in shells."""
    return SHELL_ADDS + getattr(interrupt, "number", signal.SIGINT)


class Interrupts:
    """Context manager around a command. Outside the main thread it does nothing, since Python allows no handlers there.
    A signal that is ignored stays ignored."""

    def __init__(self) -> None:
        self._is_working = False
        self.interrupt: Interrupted | None = None  # what was raised
        self._late: threading.Timer | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = install(_SIGNALS, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._late:
            self._late.cancel()
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._handle:  # a finished run ignores signals until the process ends
                signal.signal(number, handler)

    def works(self) -> None:
        """Everything is loaded: from now on an interrupt is raised."""
        self._is_working = True

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if not self._is_working:
            say("interrupted")
            end_now(SHELL_ADDS + number)
        if self.interrupt:
            say("ended at once")
            end_now(SHELL_ADDS + number)
        self.interrupt = Interrupted(number)
        self._late = threading.Timer(DEADLINE_SECONDS, end_now, (SHELL_ADDS + number,))
        self._late.daemon = True
        self._late.start()
        if os.isatty(2):
            with suppress(OSError):
                os.write(2, b"\r  \r")  # over the ^C that the terminal has echoed
        raise self.interrupt
