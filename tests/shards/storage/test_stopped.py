"""Reads that are left."""

import threading
import time

import pytest

from shards.storage.retries import ReadStoppedError
from shards.storage.stopped import stoppable

SECONDS = 20.0


def test_what_a_read_gives_and_raises_is_handed_on() -> None:
    stop = threading.Event()
    assert stoppable(lambda: b"data", None) == b"data"
    assert stoppable(lambda: b"data", stop) == b"data"
    with pytest.raises(ZeroDivisionError):
        stoppable(lambda: bytes(1 // 0), stop)


def test_a_timeout_of_the_read_itself_is_its_error() -> None:
    def slow() -> bytes:
        raise TimeoutError("the read's own")

    with pytest.raises(TimeoutError, match="the read's own"):
        stoppable(slow, threading.Event())


def test_a_read_that_stands_still_is_left() -> None:
    stop, go, began = threading.Event(), threading.Event(), time.monotonic()
    timer = threading.Timer(0.1, stop.set)
    timer.start()
    with pytest.raises(ReadStoppedError):
        stoppable(lambda: bytes(go.wait(SECONDS)), stop)
    assert time.monotonic() - began < 2
    go.set()
    timer.join()


def test_nothing_is_begun_once_it_is_stopped() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(ReadStoppedError):
        stoppable(lambda: b"data", stop)


def test_without_threads_it_is_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert stoppable(lambda: b"data", threading.Event()) == b"data"
