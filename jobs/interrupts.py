"""What Ctrl-C, TERM, and Slurm's USR1 and USR2 do to a command. A training run handles signals itself
(training/watchdog/stopping.py).

While a command loads, the first signal ends it at once. While it works, the first signal is raised as
KeyboardInterrupt, so that half-written files are cleaned up; a second signal, or 10 s, end it at once.
"""

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

from pipeline.training.watchdog.stopping import DEADLINE_SECONDS, SignalWatcher, end_now, install, say

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
SHELL_ADDS = 128  # to a signal's number, as the exit code of a process that it ended


class Interrupted(KeyboardInterrupt):
    """`number`: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


def exit_code_of(interrupt: KeyboardInterrupt) -> int:
    """130 after Ctrl-C, 143 after TERM, 138 after USR1 and 140 after USR2, as in shells."""
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


class AnsweredInExchanges:
    """Context manager for ranks that wait for each other: in an exchange, Python runs no handler. Inside, a signal ends
    the command 10 s later, and the second one at once, even if the exchange never ends.

    Outside the main thread it does nothing.
    """

    def __init__(self) -> None:
        self._watcher: SignalWatcher | None = None
        self._first = 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._watcher = SignalWatcher(self._notice, name="interrupts")
            self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watcher:
            self._watcher.stop()

    def _notice(self, numbers: bytes) -> float | None:
        if not numbers:
            say("interrupted; run the same command to start again")
            end_now(SHELL_ADDS + self._first)
        for number in numbers:
            if number in _SIGNALS:
                if self._first:
                    end_now(SHELL_ADDS + number)
                self._first = number
        return DEADLINE_SECONDS if self._first else None
