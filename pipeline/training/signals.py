"""Asking a run to save, or to save and exit: signals from Slurm or a person, and marker files in the run directory.

A handler only sets a flag; the ranks agree by the reduction that every step makes anyway, so no rank saves alone. What
happens where no step ends is in stopping.py.
"""

import signal
import threading
from enum import IntEnum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

_EXIT_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequest(IntEnum):
    """What a rank is asked to do; all ranks act on the highest request of any."""

    NOTHING = 0
    SAVE = 1
    SAVE_AND_EXIT = 2


class Signals:
    """Context manager: while it is open USR1, USR2, TERM, INT (Ctrl-C) and HUP (a terminal that is closed) ask for save
    and exit, RUN/SAVE and RUN/STOP too. A signal that is ignored stays so: nohup's HUP, a background shell's INT."""

    def __init__(self, run_dir: Path, *, watch_markers: bool) -> None:
        self._stop, self._save = run_dir / "STOP", run_dir / "SAVE"
        self._watch_markers = watch_markers
        self._asked = threading.Event()
        self._before: dict[signal.Signals, object] = {}
        self._is_over = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _EXIT_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # After the last barrier a peer that left first must not take this rank with it (torchrun sends TERM).
            after = signal.SIG_IGN if self._is_over else handler
            signal.signal(number, after)  # type: ignore[arg-type]  # what signal.signal gave back

    def request(self) -> StopRequest:
        """What this rank is asked to do now."""
        if self._asked.is_set():
            return StopRequest.SAVE_AND_EXIT
        if self._watch_markers and self._stop.exists():
            return StopRequest.SAVE_AND_EXIT
        return StopRequest.SAVE if self._watch_markers and self._save.exists() else StopRequest.NOTHING

    def over(self) -> None:
        """All is committed and all ranks know: from now on, and after the context, the signals are ignored."""
        self._is_over = True

    def saved(self) -> None:
        """A save was made: RUN/SAVE is fulfilled."""
        if self._watch_markers:
            self._save.unlink(missing_ok=True)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._asked.set()
