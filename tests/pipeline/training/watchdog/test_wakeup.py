"""Signals reach the thread, and go where they went before afterwards."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from pipeline.training.watchdog.stopping import SignalWatcher

WAIT_SECONDS = 60.0


@pytest.fixture(autouse=True)
def _handled() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_is_noticed_then_time_passes_then_nothing_more() -> None:
    calls: list[bytes] = []
    seen = threading.Event()

    def notice(numbers: bytes) -> float | None:
        calls.append(numbers)
        if not numbers:
            seen.set()
        return 0.01 if numbers else None

    watcher = SignalWatcher(notice, name="test")
    watcher.start()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert seen.wait(WAIT_SECONDS)
    watcher.stop()
    assert calls == [bytes([signal.SIGUSR1]), b""]


def test_the_descriptor_of_before_is_set_again() -> None:
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(write_end)
    watcher = SignalWatcher(lambda _: None, name="test")
    watcher.start()
    watcher.stop()
    assert signal.set_wakeup_fd(before) == write_end
    os.close(read_end)
    os.close(write_end)


def test_another_thread_cannot_start_it() -> None:
    errors: list[Exception] = []

    def start() -> None:
        watcher = SignalWatcher(lambda _: None, name="test")
        try:
            watcher.start()
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(WAIT_SECONDS)
    assert "main thread" in str(errors)
