"""Tasks in the background: urgent ones first, and left at once even where one stands still."""

import threading
import time
import weakref
from concurrent.futures import CancelledError

import numpy as np
import pytest

from shards.workers import Workers

DEADLINE_SECONDS = 60.0


def test_results_and_errors_come_back() -> None:
    workers = Workers(3, name="test")
    results = [workers.submit(lambda number=number: number**2) for number in range(50)]  # type: ignore[misc]
    failed = workers.submit(lambda: 1 // 0)
    assert [future.result(DEADLINE_SECONDS) for future in results] == [number**2 for number in range(50)]
    assert isinstance(failed.exception(DEADLINE_SECONDS), ZeroDivisionError)
    workers.close(seconds=DEADLINE_SECONDS)
    assert not any(thread.name == "test" for thread in threading.enumerate())
    with pytest.raises(CancelledError):
        workers.submit(int)


def test_urgent_tasks_overtake_those_that_wait() -> None:
    workers, gate = Workers(1, name="test"), threading.Event()
    order: list[str] = []
    first = workers.submit(lambda: gate.wait(DEADLINE_SECONDS))
    later = [workers.submit(lambda name=name: order.append(name)) for name in ("a", "b")]  # type: ignore[misc]
    later.append(workers.submit(lambda: order.append("urgent"), urgent=True))
    gate.set()
    assert first.result(DEADLINE_SECONDS)
    for future in later:
        future.result(DEADLINE_SECONDS)
    workers.close(seconds=DEADLINE_SECONDS)
    assert order == ["urgent", "a", "b"]


def test_threads_are_kept_for_what_is_urgent() -> None:
    workers, gate = Workers(3, name="test", most_patient=2), threading.Event()
    begun = threading.Semaphore(0)

    def stand_still() -> None:
        begun.release()
        gate.wait(DEADLINE_SECONDS)

    patient = [workers.submit(stand_still) for _ in range(5)]
    assert begun.acquire(timeout=DEADLINE_SECONDS)
    assert begun.acquire(timeout=DEADLINE_SECONDS)
    assert workers.submit(lambda: "at once", urgent=True).result(DEADLINE_SECONDS) == "at once"
    assert sum(future.running() for future in patient) == 2
    gate.set()
    for future in patient:
        future.result(DEADLINE_SECONDS)
    workers.close(seconds=DEADLINE_SECONDS)


def test_who_waits_is_told_at_once_that_it_is_closed() -> None:
    workers, gate, begun = Workers(1, name="test"), threading.Event(), threading.Event()

    def stand_still() -> None:
        begun.set()
        gate.wait(DEADLINE_SECONDS)

    under_way, waiting = workers.submit(stand_still), workers.submit(int)
    assert begun.wait(DEADLINE_SECONDS)
    began = time.monotonic()
    workers.close(seconds=0.1)
    assert time.monotonic() - began < 1
    with pytest.raises(CancelledError):
        under_way.result(0)
    with pytest.raises(CancelledError):
        waiting.result(0)
    gate.set()
    workers.close(seconds=DEADLINE_SECONDS)  # again: waits for what is left
    assert not any(thread.name == "test" for thread in threading.enumerate())


def test_a_task_that_has_ended_holds_nothing() -> None:
    workers = Workers(1, name="test")
    for _ in range(100):
        data = np.zeros(8)
        held = weakref.ref(data)
        future = workers.submit(lambda data=data: data.size)  # type: ignore[misc]
        del data
        assert future.result(DEADLINE_SECONDS) == 8
        assert held() is None
    workers.close(seconds=DEADLINE_SECONDS)
