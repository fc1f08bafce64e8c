"""What Ctrl-C and TERM do to a command. While a training run trains, it answers by itself (training/signals.py).

While a command loads, the first signal ends it at once. While it works, the first is raised as KeyboardInterrupt, so
that what is half-written is cleaned away; a second one, or 10 s, end it at once.
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from pipeline.training.signals import install
from pipeline.training.stopping import DEADLINE_SECONDS, end_now, say

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHELL_ADDS = 128  # to a signal's number, in the exit code of what it ended


class Interrupted(KeyboardInterrupt):
    """`number`: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


def exit_code_of(interrupt: KeyboardInterrupt) -> int:
    """130 after Ctrl-C, 143 after TERM, as shells have it."""
    return SHELL_ADDS + getattr(interrupt, "number", signal.SIGINT)


class Interrupts:
    """Context manager around a command. Outside the main thread it does nothing, as Python allows no handlers there. A
    signal that is ignored stays so."""

    def __init__(self) -> None:
        self._is_working = self._was_asked = False
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
            if signal.getsignal(number) == self._handle:  # a run that is over ignores them until the process ends
                signal.signal(number, handler)

    def works(self) -> None:
        """All is loaded: from now on an interrupt is raised."""
        self._is_working = True

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if not self._is_working:
            say("interrupted")
            end_now(SHELL_ADDS + number)
        if self._was_asked:
            say("ended at once")
            end_now(SHELL_ADDS + number)
        self._was_asked = True
        self._late = threading.Timer(DEADLINE_SECONDS, end_now, (SHELL_ADDS + number,))
        self._late.daemon = True
        self._late.start()
        raise Interrupted(number)
