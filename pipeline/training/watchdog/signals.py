"""Asking a run to save, or to save and exit: signals from Slurm or a person, and marker files in the run directory.

A handler only sets a flag. The ranks agree in the reduction that every step makes anyway, so no rank saves alone. If a
step does not end, stopping.py takes over.

Signals that a thread notices at once, whatever the main thread is doing.

Python writes a signal's number to the wakeup descriptor in the C handler itself, so it arrives even while the main
thread is in a collective or a compilation, where no Python handler runs.
"""

import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Iterable
from enum import IntEnum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

_LEAVE = b"\0"


class SignalWatcher:
    """Calls `notice(numbers)` in a thread, with the signals that came, or none when the time is up that it asked for.

    `notice` returns the seconds after which it is called in any case, None for never.
    """

    def __init__(self, notice: Callable[[bytes], float | None], *, name: str) -> None:
        self._notice = notice
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)

    def start(self) -> None:
        """Only in the main thread: ValueError in another."""
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._thread.start()

    def stop(self) -> None:
        """Signals go where they went before; returns once the thread has ended."""
        signal.set_wakeup_fd(self._before)
        os.write(self._write_end, _LEAVE)
        self._thread.join()
        os.close(self._read_end)
        os.close(self._write_end)

    def _watch(self) -> None:
        seconds: float | None = None
        while True:
            ready, _, _ = select.select([self._read_end], [], [], seconds)
            numbers = os.read(self._read_end, 1024) if ready else b""
            if _LEAVE in numbers:
                return
            seconds = self._notice(numbers)


log = logging.getLogger(__name__)
_File = tuple[int, int]  # inode, and nanoseconds of its last change
_SLURMS = (signal.SIGUSR1, signal.SIGUSR2)
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
    background shell's INT; but not Slurm's USR1 and USR2, which slurm/stage.sbatch ignores on behalf of torchrun.
    Outside the main thread nothing is set, as Python allows no handlers there."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    caught = [number for number in numbers if number in _SLURMS or signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in caught}


class Signals:
    """Context manager: inside it USR1, USR2, TERM, INT (Ctrl-C) and HUP (a closed terminal) ask to save and exit.
    RUN/STOP does the same, and RUN/SAVE asks to save."""

    def __init__(self, run_dir: Path, *, watch_markers: bool) -> None:
        self._stop, self._save = run_dir / "STOP", run_dir / "SAVE"
        self._watch_markers = watch_markers
        self._asked = threading.Event()
        self._before: dict[signal.Signals, Any] = {}
        self._is_over = False
        self._served: _File | None = None
        self._ignored: _File | None = None

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
        asked = self._marker() if self._watch_markers else None
        return StopRequest.SAVE if asked and asked != self._served else StopRequest.NOTHING

    def over(self) -> None:
        """Everything is committed and all ranks know: the signals are ignored from the end of the context on."""
        self._is_over = True

    def saving(self) -> None:
        """A save begins: it is the one that RUN/SAVE asks for, if that is there now."""
        self._served = self._marker() if self._watch_markers else None

    def not_saved(self) -> None:
        """It failed: RUN/SAVE asks again."""
        self._served = None

    def saved(self) -> None:
        """The save is committed: RUN/SAVE is fulfilled, unless it came later."""
        served, self._served = self._served, None
        if served and served == self._marker():
            try:
                self._save.unlink(missing_ok=True)
            except OSError as error:  # a folder, or somebody else's
                self._ignored = served
                log.warning(
                    "%s cannot be deleted (%s) and is ignored; to ask for a save again, remove it first",
                    *(self._save, error.strerror),
                )

    def _marker(self) -> _File | None:
        """RUN/SAVE as it is now; None if it is not there, or ignored. A request that is repeated is another one."""
        try:
            found = self._save.lstat()
        except OSError:
            return None
        if self._ignored and found.st_ino == self._ignored[0]:
            return None
        return found.st_ino, found.st_mtime_ns

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._asked.set()
