"""A lock that is unlocked in a forked child, because the thread that held it does not exist there."""

import os
import threading
import weakref
from types import TracebackType
from typing import Self

# All locks of this process, to be renewed after a fork. The set keeps no lock alive.
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
        """Replaces the lock with an unlocked one. It is called in a forked child while the child has only one
        thread."""
        self._lock = self._new()


def _renew_all() -> None:
    for lock in list(_LOCKS):
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)
