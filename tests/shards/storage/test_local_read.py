"""Files that fail for a while, and what is counted of those that do not."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shards.storage.local import LocalStore
from shards.storage.local_read import CountedFile, read_again, read_exactly
from shards.storage.objects import MissingObjectError
from shards.storage.retries import ReadStoppedError, RetryConfig
from shards.storage.traffic import Traffic, TrafficCounts


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RetryConfig(backoff_seconds=0.001, most_backoff_seconds=0.001, deadline_seconds=0.05)
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


def test_the_fault_itself_is_raised_once_the_deadline_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(str(tmp_path))
    store.write("x", b"0123456789")
    failing(monkeypatch, iter([errno.EIO] * 100_000))
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
