"""Asking a run to save, or to save and exit: signals from Slurm or a person, and marker files in the run directory.

A handler only sets a flag. The ranks agree in the reduction that every step makes anyway, so no rank saves alone. If a
step does not end, stopping.py takes over.
"""

import logging
import signal
import threading
from collections.abc import Callable, Iterable
from enum import IntEnum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

log = logging.getLogger(__name__)
_EXIT_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequest(IntEnum):
    """What a rank is asked to do. All ranks act on the highest request of any of them."""

    NOTHING = 0
    SAVE = 1
    SAVE_AND_EXIT = 2


def install(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> dict[signal.Signals, Any]:
    """Sets a handler for these signals and returns the ones before it. An ignored signal stays ignored: nohup's HUP, a
    background shell's INT. Outside the main thread nothing is set, as Python allows no handlers there."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    caught = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in caught}


class Signals:
    """Context manager: inside it USR1, USR2, TERM, INT (Ctrl-C) and HUP (a closed terminal) ask to save and exit.
    RUN/STOP does the same, and RUN/SAVE asks to save."""

    def __init__(self, run_dir: Path, *, watch_markers: bool) -> None:
        self._stop, self._save = run_dir / "STOP", run_dir / "SAVE"
        self._watch_markers = watch_markers
        self._asked = threading.Event()
        self._before: dict[signal.Signals, Any] = {}
        self._is_over, self._can_save = False, True

    def __enter__(self) -> Self:
        self._before = install(_EXIT_SIGNALS, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # After the last barrier a peer that left first must not take this rank with it (torchrun sends TERM).
            signal.signal(number, signal.SIG_IGN if self._is_over else handler)

    def request(self) -> StopRequest:
        """What this rank is asked to do now."""
        if self._asked.is_set():
            return StopRequest.SAVE_AND_EXIT
        if self._watch_markers and self._stop.exists():
            return StopRequest.SAVE_AND_EXIT
        is_asked = self._watch_markers and self._can_save and self._save.exists()
        return StopRequest.SAVE if is_asked else StopRequest.NOTHING

    def over(self) -> None:
        """Everything is committed and all ranks know: the signals are ignored from the end of the context on."""
        self._is_over = True

    def saved(self) -> None:
        """A save was made: RUN/SAVE is fulfilled."""
        if self._watch_markers:
            try:
                self._save.unlink(missing_ok=True)
            except OSError as error:  # a folder, or somebody else's
                self._can_save = False
                log.warning("%s cannot be deleted (%s); it is ignored from now on", self._save, error.strerror)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._asked.set()
