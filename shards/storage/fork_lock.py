"""A lock that is free in a forked child, where the thread that held it does not exist."""

import os
import threading
import weakref
from types import TracebackType
from typing import Self

# Only for forks; it keeps no lock alive.
_LOCKS: "weakref.WeakSet[ForkLock]" = weakref.WeakSet()


class ForkLock:
    """A lock like threading.Lock that is unlocked in a forked child. `reentrant`: like threading.RLock."""

    def __init__(self, *, reentrant: bool = False) -> None:
        self._new = threading.RLock if reentrant else threading.Lock
        self._lock = self._new()
        _LOCKS.add(self)

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Renews the lock in a child, before the child has a second thread."""
        self._lock = self._new()


def _renew_all() -> None:
    for lock in list(_LOCKS):
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)
