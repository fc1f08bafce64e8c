"""A folder whose reads can be watched, held up, spoiled and refused."""

import threading
from dataclasses import dataclass, field
from pathlib import Path

from shards.dataset import Dataset, open_dataset
from shards.storage.local import LocalStore


@dataclass(frozen=True)
class WatchedStore(LocalStore):
    """`seen`: every range read. Those of more than `most_free_bytes` wait for `gate`. `spoiled` says of the next reads,
    last first, whether their first byte is wrong; `broken` is raised by all."""

    gate: threading.Event = field(default_factory=threading.Event)
    most_free_bytes: int = 1 << 60
    seen: list[tuple[str, int, int]] = field(default_factory=list)
    read_files: list[str] = field(default_factory=list)
    spoiled: list[bool] = field(default_factory=list)
    broken: list[Exception] = field(default_factory=list)

    def read(self, path: str) -> bytes:
        self.read_files.append(path)
        return super().read(path)

    def read_range(self, path: str, first: int, end: int) -> bytes:
        self.seen.append((path, first, end))
        if self.broken:
            raise self.broken[0]
        if end - first > self.most_free_bytes and not self.gate.wait(60):
            raise TimeoutError("nobody opened the gate")
        data = super().read_range(path, first, end)
        return bytes([data[0] ^ 1]) + data[1:] if self.spoiled and self.spoiled.pop() else data


def watched(folder: Path, *, most_free_bytes: int = 1 << 60) -> tuple[Dataset, WatchedStore]:
    """The dataset of a folder, and the store that it is read from."""
    plain, store = open_dataset(str(folder)), WatchedStore(str(folder), most_free_bytes=most_free_bytes)
    return Dataset(store, plain.manifest, fingerprint=plain.fingerprint), store
