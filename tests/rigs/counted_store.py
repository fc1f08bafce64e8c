"""A folder that answers slowly and counts: how many requests, and how many of them follow each other.

Requests that are made at the same time are answered at the same time: once no further one has come for a while. The
number of such rounds is what a caller would wait for, if every request took the same time.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from shards.storage.local import LocalStore
from shards.storage.objects import MOST_OBJECT_BYTES

Result = TypeVar("Result")


@dataclass
class Requests:
    """`names`: of all requests. `depth`: the rounds in which they were answered so far."""

    names: list[str] = field(default_factory=list)
    depth: int = 0
    last_at: float = 0.0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def answer(self, name: str, *, after_seconds: float) -> None:
        """Returns with all that wait in the same round."""
        with self.changed:
            self.names.append(name)
            own_round, self.last_at = self.depth, time.monotonic()
            while self.depth == own_round:
                left = self.last_at + after_seconds - time.monotonic()
                if left > 0:
                    self.changed.wait(left)
                else:
                    self.depth += 1
                    self.changed.notify_all()


@dataclass(frozen=True)
class CountedStore(LocalStore):
    """A request is answered once no other has come for `seconds`, however long it takes to make them all."""

    seconds: float = 0.0
    requests: Requests = field(default_factory=Requests)

    def read(self, path: str, *, most_bytes: int = MOST_OBJECT_BYTES, stop: threading.Event | None = None) -> bytes:
        return self._count("read", lambda: LocalStore.read(self, path, most_bytes=most_bytes, stop=stop))

    def exists(self, path: str) -> bool:
        return self._count("exists", lambda: LocalStore.exists(self, path))

    def list(self, prefix: str = "") -> Iterator[str]:
        return iter(self._count("list", lambda: [*LocalStore.list(self, prefix)]))

    def write(self, path: str, data: bytes) -> None:
        self._count("write", lambda: LocalStore.write(self, path, data))

    def delete(self, path: str) -> None:
        self._count("delete", lambda: LocalStore.delete(self, path))

    def _count(self, name: str, ask: Callable[[], Result]) -> Result:
        result = ask()
        self.requests.answer(name, after_seconds=self.seconds)
        return result
