"""Files that fail for a while, and what is counted of those that do not."""

import errno
import os
import socket
import threading
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import pytest

from shards.errors import InvalidDataError
from shards.storage.local import LocalStore
from shards.storage.local_read import CountedFile, read_again, read_exactly
from shards.storage.memory import ReusedMemory
from shards.storage.objects import MissingObjectError
from shards.storage.retries import ReadStoppedError, RetryConfig
from shards.storage.traffic import Traffic, TrafficCounts


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RetryConfig(backoff_seconds=0.001, most_backoff_seconds=0.001)
    monkeypatch.setattr("shards.storage.local_read.RETRIES", config)


def failing(monkeypatch: pytest.MonkeyPatch, faults: Iterator[int]) -> None:
    """The next reads of a place in a file have these faults."""
    pread = os.pread

    def faulty(descriptor: int, count: int, offset: int) -> bytes:
        if fault := next(faults, 0):
            raise OSError(fault, os.strerror(fault))
        return pread(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", faulty)


@pytest.mark.parametrize("fault", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_for_a_while_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int
) -> None:
    store = LocalStore(str(tmp_path))
    store.write("x", b"0123456789")
    failing(monkeypatch, iter([fault, fault]))
    assert store.read_range("x", 2, 5) == b"234"
    counts = store.traffic.counts()
    assert (counts.requests, counts.bytes, counts.retries) == (1, 3, 2)


def test_memory_is_filled_whatever_a_read_brings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two bytes at a time, and a fault between them."""
    store = LocalStore(str(tmp_path))
    store.write("x", b"0123456789")
    preadv, faults = os.preadv, iter([0, errno.EIO, 0, 0, errno.ESTALE])

    def few(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if fault := next(faults, 0):
            raise OSError(fault, os.strerror(fault))
        return preadv(descriptor, [buffers[0][:2]], offset)

    monkeypatch.setattr(os, "preadv", few)
    assert bytes(store.read_into("x", 1, 8, ReusedMemory().take)) == b"1234567"
    counts = store.traffic.counts()
    assert (counts.requests, counts.bytes, counts.retries) == (1, 7, 2)
    with pytest.raises(EOFError, match=r"bytes 4\.\.11 asked, it ends at 10"):
        store.read_into("x", 4, 12, ReusedMemory().take)


def test_the_fault_itself_is_raised_once_the_deadline_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RetryConfig(backoff_seconds=0.001, most_backoff_seconds=0.001, deadline_seconds=1.0)
    monkeypatch.setattr("shards.storage.local_read.RETRIES", config)
    store = LocalStore(str(tmp_path))
    store.write("x", b"0123456789")
    failing(monkeypatch, repeat(errno.EIO))
    with pytest.raises(OSError, match="Input/output error") as caught:
        store.read_range("x", 2, 5)
    assert caught.value.errno == errno.EIO
    assert store.traffic.counts().retries > 2


def test_other_faults_are_raised_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(str(tmp_path))
    store.write("x", b"0123456789")
    failing(monkeypatch, iter([errno.EACCES]))
    with pytest.raises(PermissionError):
        store.read_range("x", 2, 5)
    assert store.traffic.counts().retries == 0


def test_waiting_for_a_disk_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.storage.local_read.RETRIES", RetryConfig(backoff_seconds=100.0))
    stop = threading.Event()

    def fail() -> bytes:
        stop.set()
        raise OSError(errno.EIO, "it fails")

    with pytest.raises(ReadStoppedError):
        read_again("x", fail, traffic=Traffic(), stop=stop)


def test_a_file_ends_where_it_ends(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    with CountedFile(tmp_path / "x") as file:
        assert read_exactly(file.fileno(), 8, 20) == b"89"
        assert read_exactly(file.fileno(), 20, 30) == b""


def test_every_way_to_read_is_counted(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.write("x", b"0123456789")
    assert store.read("x") == b"0123456789"
    assert store.traffic.counts().seconds > 0
    assert store.read_range("x", 2, 5) == b"234"
    for count in (3, -1):
        with store.open_read("x") as file:
            assert file.read(count) == b"0123456789"[: count if count > 0 else None]
    counts = store.traffic.counts()
    assert (counts.requests, counts.bytes) == (4, 10 + 3 + 10 + 10), "a stream fills its buffer"
    with pytest.raises(MissingObjectError):
        store.open_read("y")


def test_counters_of_ones_own(tmp_path: Path) -> None:
    store, own = LocalStore(str(tmp_path)), Traffic()
    store.write("x", b"0123456789")
    mine = store.with_traffic(own)
    assert mine == store
    mine.write("a/x", b"0123")
    assert mine.read("x") + mine.read("a/x") == b"01234567890123"
    assert store.traffic.counts() == TrafficCounts()
    assert (own.counts().requests, own.counts().bytes) == (2, 14)


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "it"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    with pytest.raises(InvalidDataError, match="it is not a regular file; give a file"):
        LocalStore(str(tmp_path)).read("it")


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    (tmp_path / "ten").write_bytes(b"0123456789")
    assert store.read("ten", most_bytes=10) == b"0123456789"
    with pytest.raises(InvalidDataError, match="ten is larger than 9 bytes, the most that"):
        store.read("ten", most_bytes=9)


def test_a_file_that_does_not_say_its_size_is_read_up_to_its_end_or_bound() -> None:
    """Files of /proc have size 0."""
    whole = Path("/proc/self/smaps").read_bytes()
    assert LocalStore("/proc/self").read("status").startswith(b"Name:")
    with pytest.raises(InvalidDataError, match="smaps is larger than"):
        LocalStore("/proc/self").read("smaps", most_bytes=len(whole) // 2)
