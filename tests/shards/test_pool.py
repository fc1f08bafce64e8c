"""Tasks in the background: urgent ones first, limits that change, and an end that no stuck task can delay."""

import os
import re
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, as_completed, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shards.errors import StorageError
from shards.pool import AT_ONCE, Pool, close_all, each_at_once
from tests.shards.storage.test_fork_lock import ends_in_a_child

CHECKOUT = Path(__file__).resolve().parents[2]
SECONDS = 60.0


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    wait_until(lambda: not threads())


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "test"]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline, pause = time.monotonic() + SECONDS, threading.Event()
    while not is_so():
        assert time.monotonic() < deadline, "waited in vain"
        pause.wait(0.005)


ROOMS = ("shards", "pipeline", "jobs", "slurm", "patchline")
# Who starts a thread beside a pool: most only wait, so that a signal, a silent rank or a parent's end is noticed; the
# checkpoint writer is a process of its own, whose two threads have different priorities; a service that loggers send to
# may never answer; a lock is renewed while its owner waits for Slurm; torch's number of threads is set back by a thread
# that does only that.
WATCHERS = [
    *("shards/reading/parallel.py", "pipeline/checkpoints/writer/process.py"),
    *(
        "pipeline/training/watchdog/stopping.py",
        "pipeline/training/watchdog/heartbeat.py",
        "pipeline/training/watchdog/heartbeat_files.py",
    ),
    "pipeline/training/reporting/follower.py",
    "jobs/cluster/folder_lock.py",
    "pipeline/data/samples.py",
]


def test_only_pools_work_in_the_background() -> None:
    starts = re.compile(r"\b(ThreadPoolExecutor|ThreadPool)\(|\bThread\(|\b_?start_new_thread\(")
    files = [path for room in ROOMS for path in (CHECKOUT / room).rglob("*.py") if starts.search(path.read_text())]
    assert sorted(path.relative_to(CHECKOUT).as_posix() for path in files) == sorted([*WATCHERS, "shards/pool.py"])


class Stuck:
    """A task that begins and ends when it is told to."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Semaphore(0), threading.Event()

    def __call__(self) -> str:
        self.begun.release()
        assert self.go.wait(2 * SECONDS)
        return "late"

    def wait(self, count: int = 1) -> None:
        """Until it has begun so many times."""
        for _ in range(count):
            assert self.begun.acquire(timeout=SECONDS)


def test_results_and_errors_come_back() -> None:
    pool = Pool(3, name="test")
    results = [pool.submit(partial(pow, number, 2)) for number in range(50)]
    failed = pool.submit(lambda: 1 // 0)
    assert [future.result(SECONDS) for future in results] == [number**2 for number in range(50)]
    assert isinstance(failed.exception(SECONDS), ZeroDivisionError)
    assert all(thread.daemon for thread in threads())
    pool.close(seconds=SECONDS)
    assert not threads()
    with pytest.raises(CancelledError):
        pool.submit(int)
    with pytest.raises(CancelledError):
        pool.submit_later(int, 0.0)


def test_urgent_tasks_overtake_those_that_wait() -> None:
    pool, stuck, order = Pool(1, name="test"), Stuck(), list[str]()
    first = pool.submit(stuck)
    later: list[Future[None]] = [pool.submit(partial(order.append, name)) for name in ("a", "b")]
    later += [pool.submit(partial(order.append, name), urgent=True) for name in ("urgent", "urgent, too")]
    stuck.go.set()
    first.result(SECONDS)
    wait(later, SECONDS)
    pool.close()
    assert order == ["urgent", "urgent, too", "a", "b"]


def test_a_reserve_is_kept_for_what_is_urgent() -> None:
    pool, stuck = Pool(2, name="test", reserve=1), Stuck()
    patient = [pool.submit(stuck) for _ in range(5)]
    stuck.wait(2)
    assert pool.submit(lambda: "at once", urgent=True).result(SECONDS) == "at once"
    urgent = [pool.submit(stuck, urgent=True) for _ in range(2)]
    stuck.wait()
    assert sum(future.running() for future in patient) == 2
    assert sum(future.running() for future in urgent) == 1
    stuck.go.set()
    wait([*patient, *urgent], SECONDS)
    pool.close()


def test_a_lower_limit_lowers_the_reserve() -> None:
    """A storage that asks for fewer reads means those that somebody waits for, too."""
    pool, stuck = Pool(4, name="test", reserve=3), Stuck()
    pool.limit = 1
    urgent = [pool.submit(stuck, urgent=True) for _ in range(5)]
    stuck.wait(2)
    assert not stuck.begun.acquire(timeout=0.1)
    pool.limit = 4
    stuck.wait(3)
    stuck.go.set()
    wait(urgent, SECONDS)
    pool.close()


def test_so_many_run_and_no_more_and_the_limit_may_change() -> None:
    lock, now, most = threading.Lock(), 0, 0

    def count(together: threading.Barrier) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        together.wait()
        with lock:
            now -= 1

    pool = Pool(4, name="test")
    for limit in (4, 2, 6, 1):
        pool.limit, most, together = limit, 0, threading.Barrier(limit, timeout=SECONDS)
        for future in [pool.submit(partial(count, together)) for _ in range(36)]:
            future.result(SECONDS)
        assert most == limit
    pool.close()


def test_a_higher_limit_begins_what_waits() -> None:
    pool, stuck = Pool(1, name="test"), Stuck()
    futures = [pool.submit(stuck) for _ in range(3)]
    stuck.wait()
    pool.limit = 3
    stuck.wait(2)
    stuck.go.set()
    wait(futures, SECONDS)
    pool.close()


@pytest.mark.parametrize("is_idle", [False, True], ids=["a new thread", "a thread that is idle"])
def test_a_task_whose_future_is_set_elsewhere_makes_room(is_idle: bool) -> None:
    """Its thread may be stuck for long: it ends with the task, and another one takes its place."""
    pool, stuck, given = Pool(1, name="test", reserve=1), Stuck(), Future[str]()
    assert pool.submit(stuck, future=given) is given
    stuck.wait()
    if is_idle:
        pool.submit(int, urgent=True).result(SECONDS)
    after = pool.submit(lambda: "next")
    given.set_result("elsewhere")
    assert after.result(SECONDS) == "next"
    stuck.go.set()
    wait_until(lambda: len(threads()) == 1)
    assert given.result(0) == "elsewhere"
    pool.close()


def test_a_cancelled_task_is_passed_over() -> None:
    pool, stuck, order = Pool(1, name="test"), Stuck(), list[int]()
    first, futures = pool.submit(stuck), [pool.submit(partial(order.append, number)) for number in range(3)]
    assert futures[1].cancel()
    stuck.go.set()
    assert first.result(SECONDS) == "late"
    wait([futures[0], futures[2]], SECONDS)
    assert order == [0, 2]
    pool.close()


def test_tasks_become_due(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("shards.pool.time", SimpleNamespace(monotonic=lambda: now[0]))
    pool = Pool(1, name="test")
    futures = {seconds: pool.submit_later(int, seconds) for seconds in (0.3, 0.1, 0.2)}
    never = pool.submit_later(int, SECONDS)
    cancelled = pool.submit_later(int, 0.15)
    assert cancelled.cancel()
    for seconds in sorted(futures):
        now[0] = seconds
        assert futures[seconds].result(SECONDS) == 0
        assert all(future.done() is (due <= seconds) for due, future in futures.items())
    pool.close()
    assert never.cancelled(), "it is not waited for"


def test_a_task_becomes_due_while_others_are_stuck() -> None:
    pool, stuck = Pool(2, name="test"), Stuck()
    first = pool.submit_later(stuck, 0.0)
    second = pool.submit_later(lambda: "due", 0.1)
    stuck.wait()
    assert second.result(SECONDS) == "due"
    stuck.go.set()
    assert first.result(SECONDS) == "late"
    pool.close()


def test_whoever_waits_for_a_task_that_is_cancelled_before_it_is_due_is_told() -> None:
    pool = Pool(1, name="test")
    future = pool.submit_later(int, SECONDS)
    threading.Timer(0.05, future.cancel).start()
    assert wait([future], SECONDS / 2).done
    assert future.cancelled()
    pool.close()


def test_what_is_cancelled_before_it_is_due_holds_nothing() -> None:
    pool, data = Pool(1, name="test"), np.zeros(8)
    held = weakref.ref(data)
    future = pool.submit_later(partial(np.sum, data), SECONDS)
    del data
    future.cancel()
    assert held() is None
    pool.close()


def test_whoever_waits_is_told_at_once_that_the_pool_is_closed() -> None:
    pool, stuck = Pool(1, name="test"), Stuck()
    under_way, waiting, later = pool.submit(stuck), pool.submit(int), pool.submit_later(int, SECONDS)
    stuck.wait()
    pool.close(seconds=0.1)
    assert threads(), "it does not wait for the one that is stuck"
    assert pool.is_closed
    futures: list[Future[Any]] = [under_way, waiting, later]
    for future in as_completed(futures, SECONDS):
        with pytest.raises(CancelledError):
            future.result(0)
    stuck.go.set()
    pool.close(seconds=SECONDS)  # again: waits for what is left
    assert not threads()


def test_several_are_closed_within_one_deadline() -> None:
    pools, stuck = [Pool(1, name="test") for _ in range(70)], Stuck()
    futures = [pool.submit(stuck) for pool in pools]
    stuck.wait(len(pools))
    began = time.monotonic()
    close_all(pools, seconds=1)
    assert 1 <= time.monotonic() - began < SECONDS, "not a second for each"
    assert all(isinstance(future.exception(0), CancelledError) for future in futures)
    stuck.go.set()


def test_a_task_may_close_its_own_pool() -> None:
    pool = Pool(1, name="test")
    future = pool.submit(lambda: pool.close(seconds=SECONDS))
    with pytest.raises(CancelledError):
        future.result(SECONDS)


def test_a_task_that_has_ended_holds_nothing() -> None:
    pool = Pool(1, name="test")
    for _ in range(100):
        data = np.zeros(8)
        held = weakref.ref(data)
        future = pool.submit(lambda data=data: data.size)  # type: ignore[misc]
        del data
        assert future.result(SECONDS) == 8
        assert held() is None
    pool.close(seconds=SECONDS)


def test_a_result_is_freed_with_its_future() -> None:
    pool = Pool(1, name="test")
    for _ in range(20):
        future = pool.submit(lambda: np.zeros(8))
        held = weakref.ref(future.result(SECONDS))
        del future
        wait_until(lambda: held() is None)  # noqa: B023
    pool.close()


def test_a_result_is_freed_soon_though_its_thread_idles() -> None:
    """A free-threaded Python leaves it to the thread that made an object to free it."""
    pool = Pool(1, name="test")
    futures = [pool.submit(lambda: np.zeros(8)) for _ in range(3)]
    held = [weakref.ref(future.result(SECONDS)) for future in futures]
    time.sleep(0.02)  # so that the thread waits for work when the results are dropped
    began = time.monotonic()
    del futures
    wait_until(lambda: not any(one() is not None for one in held))
    assert time.monotonic() - began < 2  # it idled for 5 s, and kept a window of a lane from being read ahead
    pool.close()


def test_idle_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.pool.IDLE_SECONDS", 0.05)
    pool = Pool(3, name="test")
    wait([pool.submit(int) for _ in range(10)], SECONDS)
    wait_until(lambda: not threads())
    assert pool.submit(int).result(SECONDS) == 0
    gone = weakref.ref(pool)
    wait_until(lambda: not threads())
    del pool
    assert gone() is None


def test_a_pool_keeps_the_idle_time_that_it_was_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that makes idle threads stay must not keep those of an earlier test."""
    monkeypatch.setattr("shards.pool.IDLE_SECONDS", 0.05)
    pool = Pool(1, name="test")
    monkeypatch.setattr("shards.pool.IDLE_SECONDS", 10 * SECONDS)
    assert pool.submit(int).result(SECONDS) == 0
    wait_until(lambda: not threads())


@pytest.fixture
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether threads can be started: the last entry refuses them."""
    refused, start = [False], threading.Thread.start

    def start_some(thread: threading.Thread) -> None:
        if refused[-1]:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    return refused


def test_threads_that_can_not_start_are_done_without(no_more_threads: list[bool]) -> None:
    pool, stuck = Pool(4, name="test"), Stuck()
    futures = [pool.submit(stuck)]
    stuck.wait()
    no_more_threads.append(True)
    futures += [pool.submit(lambda: "by the one there is") for _ in range(5)]
    stuck.go.set()
    assert [future.result(SECONDS) for future in futures] == ["late"] + 5 * ["by the one there is"]
    pool.close()


def test_tasks_fail_if_no_thread_can_start_and_run_later(no_more_threads: list[bool]) -> None:
    pool = Pool(2, name="test")
    no_more_threads.append(True)
    for future in (pool.submit(int), pool.submit_later(int, SECONDS)):
        with pytest.raises(StorageError, match="no thread for 'test': this process may start no more threads; raise"):
            future.result(SECONDS)
    no_more_threads.append(False)
    assert pool.submit(int).result(SECONDS) == 0
    pool.close()


def test_a_thread_that_finds_no_memory_says_so() -> None:
    def lack_memory() -> None:
        threading.stack_size(64 << 20)  # no stack of an earlier thread is as large
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (32 << 20), resource.RLIM_INFINITY))
        pool = Pool(1, name="test")
        with pytest.raises(
            StorageError, match=r"no memory for its stack: .* GB of addresses \(ulimit -v\); raise that"
        ):
            pool.submit(int).result(SECONDS)

    assert ends_in_a_child(lack_memory)


def test_a_pool_can_be_used_in_the_child_of_a_fork() -> None:
    pool, stuck = Pool(1, name="test"), Stuck()
    under_way = [pool.submit(stuck) for _ in range(3)]
    stuck.wait()

    def use() -> None:
        assert pool.submit(lambda: 5).result(SECONDS) == 5
        pool.close(seconds=SECONDS)

    with pool._changed:
        assert ends_in_a_child(use)
    stuck.go.set()
    wait(under_way, SECONDS)
    pool.close()


AT_EXIT = """
import sys, threading
from shards.pool import Pool
pool, begun = Pool(2, name="test"), threading.Event()
def stuck():
    begun.set()
    threading.Event().wait()
futures = [pool.submit(stuck) for _ in range(5)]
assert begun.wait(60)
def held():
    try:
        yield
    finally:
        pool.close()  # when the interpreter's modules are torn down
left_open = held()
next(left_open)
"""


def test_the_interpreter_ends_while_a_task_is_stuck() -> None:
    words = [sys.executable, "-c", AT_EXIT]
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(words, env=environment, timeout=SECONDS, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_many_threads_submit_cancel_and_close() -> None:
    """Nothing is stuck, and every future is done in the end."""
    for _ in range(20):
        pool, futures, lock = Pool(3, name="test", reserve=2), list[Future[int]](), threading.Lock()

        def use(pool: Pool = pool, futures: list[Future[int]] = futures, lock: threading.Lock = lock) -> None:
            with suppress(CancelledError):
                for number in range(100):
                    future = pool.submit(partial(abs, number), urgent=number % 3 == 0)
                    later = pool.submit_later(partial(abs, number), 0.001 * (number % 4))
                    with lock:
                        futures += [future, later]
                    if number % 5 == 0:
                        later.cancel()
                    if number % 7 == 0:
                        pool.limit = 1 + number % 5

        users = [threading.Thread(target=use) for _ in range(4)]
        for user in users:
            user.start()
        threading.Event().wait(0.01)
        pool.close(seconds=SECONDS)
        for user in users:
            user.join(SECONDS)
        assert all(future.done() for future in futures)


@pytest.mark.parametrize("num_items", [0, 1, 2, 300])
def test_the_results_of_many_requests_are_in_order(num_items: int) -> None:
    assert each_at_once(lambda item: item * item, range(num_items)) == [item * item for item in range(num_items)]


def test_as_many_run_at_once_as_are_allowed() -> None:
    together = threading.Barrier(AT_ONCE, timeout=60)
    assert each_at_once(lambda _: together.wait() >= 0, range(AT_ONCE)) == [True] * AT_ONCE
