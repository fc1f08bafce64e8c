"""Signals that a thread notices at once, whatever the main thread is doing.

Python writes a signal's number to the wakeup descriptor in the C handler itself, so it arrives even while the main
thread is in a collective or a compilation, where no Python handler runs.
"""

import os
import select
import signal
import threading
from collections.abc import Callable

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
