"""Locks that a thread holds while its process forks."""

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from shards.storage.fork_lock import ForkLock
from shards.storage.objects import Traffic, TrafficCounts
from shards.storage.retries import RetryBudget, RetryConfig
from shards.storage.s3_client import ClientOfProcess

SECONDS = 60.0


def ends_in_a_child(use: Callable[[], object]) -> bool:
    """Whether `use` ends, and well, in a forked child."""
    child = os.fork()
    if not child:
        try:
            use()
        finally:
            os._exit(0)
    deadline, pause = time.monotonic() + SECONDS, threading.Event()
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        pause.wait(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def test_one_at_a_time() -> None:
    lock, inside = ForkLock(), threading.Event()

    def wait_for_it() -> None:
        with lock:
            inside.set()

    with lock:
        thread = threading.Thread(target=wait_for_it)
        thread.start()
        assert not inside.wait(0.05)
    assert inside.wait(SECONDS)
    thread.join()


def test_a_lock_that_is_held_at_a_fork_is_free_in_the_child() -> None:
    lock = ForkLock()

    def take() -> None:
        with lock:
            pass

    with lock:
        assert ends_in_a_child(take)


@pytest.mark.parametrize("name", ["traffic", "retries", "clients"])
def test_what_a_store_shares_can_be_used_in_a_child(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.storage.s3_client._new_clients", lambda: None)
    traffic, retries, clients = Traffic(), RetryBudget(RetryConfig()), ClientOfProcess()
    uses: dict[str, tuple[ForkLock, Callable[[], object]]] = {
        "traffic": (traffic._lock, lambda: traffic.add(TrafficCounts(requests=1))),
        "retries": (retries._lock, retries.spend),
        "clients": (clients._lock, clients._of_process),
    }
    lock, use = uses[name]
    with lock:
        assert ends_in_a_child(use)
