"""A lock that is free in a forked child, in which the thread that held it does not exist."""

import os
import threading
import weakref
from types import TracebackType
from typing import Self

# Only forks need the set; it keeps no lock alive.
_LOCKS: "weakref.WeakSet[ForkLock]" = weakref.WeakSet()


class ForkLock:
    """A lock like threading.Lock, or like threading.RLock if it is `reentrant`, that is unlocked in a forked child."""

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
        """Renews the lock in a child that has only one thread so far."""
        self._lock = self._new()


def _renew_all() -> None:
    for lock in list(_LOCKS):
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)
