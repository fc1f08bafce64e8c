"""A folder whose reads can be watched, held up, spoiled and refused."""

import threading
from dataclasses import dataclass, field
from pathlib import Path

from shards.dataset import Dataset, open_dataset
from shards.storage.local import LocalStore
from shards.storage.objects import MOST_OBJECT_BYTES


def open_gate() -> threading.Event:
    """Nobody waits at it until it is cleared."""
    gate = threading.Event()
    gate.set()
    return gate


@dataclass(frozen=True)
class WatchedStore(LocalStore):
    """`seen`: every range read. Those of more than `most_free_bytes` wait for `gate`. `spoiled` says of the next reads,
    last first, whether their first byte is wrong, `spoiled_files` of the next whole files; `broken` is raised by all
    ranges. Whole files wait for `file_gate`, which is open; with `holds_repeats` set, ranges that have been read before
    for `gate`: they are in `held_up`."""

    gate: threading.Event = field(default_factory=threading.Event)
    most_free_bytes: int = 1 << 60
    seen: list[tuple[str, int, int]] = field(default_factory=list)
    read_files: list[str] = field(default_factory=list)
    spoiled: list[bool] = field(default_factory=list)
    spoiled_files: list[bool] = field(default_factory=list)
    broken: list[Exception] = field(default_factory=list)
    holds_repeats: threading.Event = field(default_factory=threading.Event)
    held_up: list[str] = field(default_factory=list)
    file_gate: threading.Event = field(default_factory=open_gate)

    def read(self, path: str, *, most_bytes: int = MOST_OBJECT_BYTES, stop: threading.Event | None = None) -> bytes:
        self.read_files.append(path)
        if not self.file_gate.wait(60):
            raise TimeoutError("nobody opened the gate of the files")
        data = super().read(path, most_bytes=most_bytes, stop=stop)
        return bytes([data[0] ^ 1]) + data[1:] if self.spoiled_files and self.spoiled_files.pop() else data

    def read_range(self, path: str, first: int, end: int, *, stop: threading.Event | None = None) -> bytes:
        is_held_up = self.holds_repeats.is_set() and (path, first, end) in self.seen
        self.seen.append((path, first, end))
        if self.broken:
            raise self.broken[0]
        if is_held_up:
            self.held_up.append(path)
        if (is_held_up or end - first > self.most_free_bytes) and not self.gate.wait(60):
            raise TimeoutError("nobody opened the gate")
        data = super().read_range(path, first, end, stop=stop)
        return bytes([data[0] ^ 1]) + data[1:] if self.spoiled and self.spoiled.pop() else data


def watched(folder: Path, *, most_free_bytes: int = 1 << 60) -> tuple[Dataset, WatchedStore]:
    """The dataset of a folder, and the store that it is read from."""
    plain, store = open_dataset(str(folder)), WatchedStore(str(folder), most_free_bytes=most_free_bytes)
    return Dataset(store, plain.manifest, fingerprint=plain.fingerprint), store
