"""A folder that answers slowly and counts: how many requests, and how long the longest chain of them is.

Each request takes a while. One that begins after another has ended may have waited for it: the longest chain of such
pairs is what a caller would wait for, if every request took the same time.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from shards.storage.local import LocalStore
from shards.storage.objects import MOST_OBJECT_BYTES

Result = TypeVar("Result")


@dataclass
class Requests:
    """`names`: of all requests. `depth`: of the longest chain so far."""

    names: list[str] = field(default_factory=list)
    depth: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class CountedStore(LocalStore):
    """Every request takes at least `seconds`."""

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
        requests = self.requests
        with requests.lock:
            requests.names.append(name)
            depth = requests.depth + 1
        result = ask()
        threading.Event().wait(self.seconds)
        with requests.lock:
            requests.depth = max(requests.depth, depth)
        return result
