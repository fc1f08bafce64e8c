"""Threads that hold up nobody's end, of one owner who waits for them only so long."""

import threading
import time
from collections.abc import Callable, Iterable

from shards.storage.fork_lock import ForkLock


class Daemons:
    """The threads of one owner."""

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._threads: set[threading.Thread] = set()

    def start(self, name: str, target: Callable[[], None]) -> bool:
        """False where this process gets no more threads. Not with a lock held: it waits for the thread to begin."""

        def run() -> None:
            try:
                target()
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        with self._lock:
            if thread.is_alive():
                self._threads.add(thread)
        return True

    def living(self) -> set[threading.Thread]:
        """Those that have not ended, but for the one that asks."""
        with self._lock:
            self._threads = {thread for thread in self._threads if thread.is_alive()}
            return self._threads - {threading.current_thread()}


def join(threads: Iterable[threading.Thread], seconds: float) -> None:
    """Waits for them, so long in all."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
