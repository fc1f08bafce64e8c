"""Pools of background threads, which by default delay a close, Ctrl-C or the process's end by at most CLOSE_SECONDS.

All background work inside a process uses pools: range reads, the window loader, the planner, decoding and evaluation
each have a pool. (shards/reading/parallel.py has the pool of processes for packing.)
"""

import atexit
import heapq
import math
import mmap
import os
import resource
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple, TypeVar

from shards.errors import StorageError
from shards.ulimits import has_address_limit, memory_todo

Item = TypeVar("Item")
Result = TypeVar("Result")
CLOSE_SECONDS = 1.0  # how long a close waits by default; a task stuck in a system call ends later, by its own timeout
# A free-threaded Python frees an object only when the thread that made it runs or ends. An idle thread would keep
# blocks in memory, and the next window would not be read ahead.
IDLE_SECONDS = 0.05 if "t" in sys.abiflags else 5.0
_NO_THREAD = "this process may start no more threads; raise its limit of processes and threads, or use fewer"
_STACK_BYTES = 8 << 20  # a thread's stack, unless its size is set or limited
# All pools, for the exit of the process and for forks. This set keeps no pool alive.
_POOLS: "weakref.WeakSet[Pool]" = weakref.WeakSet()
AT_ONCE = 128


def _why_no_thread() -> str:
    """Returns why no thread can start now. The kernel's error is the same for a lack of threads and of memory, so this
    tries to allocate a stack."""
    soft = resource.getrlimit(resource.RLIMIT_STACK)[0]
    size = threading.stack_size() or (soft if soft != resource.RLIM_INFINITY else _STACK_BYTES)
    try:
        mmap.mmap(-1, size).close()
    except (OSError, MemoryError):
        return f"there is no memory for its stack{': ' if has_address_limit() else '; '}{memory_todo()}"
    return _NO_THREAD


class _Task(NamedTuple):
    future: Future[Any]
    run: Callable[[], Any]


class Pool:
    """Runs tasks in the order in which they are submitted, urgent ones first. Its owner must close it.

    At most `limit` tasks run at a time, and `reserve` more (but no more than `limit`) if they are urgent. A task whose
    future has been set no longer counts, even if it still runs: another thread takes the place of its thread, which
    ends when the task returns.

    Threads are daemons. They start when there is work and end after IDLE_SECONDS without work. Unlike a
    ThreadPoolExecutor's, they never hold up the interpreter's exit. In a forked child the pool is empty.
    """

    def __init__(self, limit: int, *, name: str, reserve: int = 0) -> None:
        self._limit, self._reserve, self._name, self._idle_seconds = limit, reserve, name, IDLE_SECONDS
        self._is_closed = False
        self._numbers = count()
        self._empty()
        _POOLS.add(self)

    def _empty(self) -> None:
        """Makes the pool empty, without tasks or threads: at first, and in a forked child, since a fork does not copy
        threads."""
        self._changed = threading.Condition()
        self._urgent: deque[_Task] = deque()
        self._patient: deque[_Task] = deque()
        self._later: list[tuple[float, int, _Task]] = []  # a heap, ordered by the time when tasks become due
        self._running: set[Future[Any]] = set()
        self._threads: set[threading.Thread] = set()
        self._num_threads = 0  # not counting threads whose task no longer counts

    @property
    def is_closed(self) -> bool:
        """Whether the pool takes no more tasks."""
        return self._is_closed

    @property
    def limit(self) -> int:
        """The number of tasks that may run at a time if none is urgent. It can be changed at any time."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        with self._changed:
            self._limit = limit
            self._changed.notify_all()
        self._start_missing()

    def submit(
        self, run: Callable[[], Result], *, urgent: bool = False, future: Future[Result] | None = None
    ) -> Future[Result]:
        """Submits a task and returns its future, which is `future` if given. Raises CancelledError if the pool is
        closed.

        The future raises CancelledError if the pool is closed before the task ends, and StorageError if this process
        can start no thread.
        """
        task = _Task(future or Future(), run)
        with self._changed:
            self._check_open()
            (self._urgent if urgent else self._patient).append(task)
            self._changed.notify()
        task.future.add_done_callback(self._leave)
        self._start_missing()
        return task.future

    def submit_later(self, run: Callable[[], Result], seconds: float) -> Future[Result]:
        """Submits an urgent task that becomes due in `seconds`."""
        task = _Task(Future(), run)
        with self._changed:
            self._check_open()
            heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), task))
            if self._later[0][2] is task:
                self._changed.notify()
        task.future.add_done_callback(self._leave)
        self._start_missing()
        return task.future

    def cancel(self) -> None:
        """Takes no more tasks. Threads that wait for a task get a CancelledError at once."""
        if sys.is_finalizing():  # a thread that holds the lock may never run again, and the process ends anyway
            return
        with self._changed:
            self._is_closed = True
            waiting, running = self._take_waiting(), list(self._running)
            self._changed.notify_all()
        for task in waiting:
            task.future.cancel()
            task.future.set_running_or_notify_cancel()  # tells `wait` and `as_completed`, too
        for future in running:
            with suppress(InvalidStateError):  # the task has just ended
                future.set_exception(self._closed_error())

    def close(self, *, seconds: float | None = None) -> None:
        """Cancels the pool, and waits up to `seconds` (None: CLOSE_SECONDS) for threads that still run a task."""
        close_all([self], seconds=seconds)

    def join(self, deadline: float) -> None:
        """Waits for the pool's threads until `deadline`, a time of time.monotonic()."""
        with self._changed:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(None if math.isinf(deadline) else max(0.0, deadline - time.monotonic()))

    def _check_open(self) -> None:
        if self._is_closed:
            raise self._closed_error()

    def _closed_error(self) -> CancelledError:
        return CancelledError(f"the pool {self._name!r} is closed")

    def _leave(self, future: Future[Any]) -> None:
        """Stops counting a task whose future was set by code other than its thread."""
        with self._changed:
            left = [entry for entry in self._later if entry[2].future is not future]
            if len(left) < len(self._later):
                heapq.heapify(left)
                self._later = left
                if future.cancelled():
                    future.set_running_or_notify_cancel()  # no thread will do it: it tells `wait` and `as_completed`
            if future not in self._running:
                return
            self._running.discard(future)
            self._num_threads -= 1
            self._changed.notify()
        self._start_missing()

    def _start_missing(self) -> None:
        """Starts threads for tasks that may run now. If none can start, running threads take the tasks; if no thread
        runs, the tasks fail."""
        failed: list[_Task] = []
        with self._changed:
            while not self._is_closed and self._num_threads < self._num_wanted():
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._threads.add(thread)
                self._num_threads += 1
                try:
                    thread.start()
                except RuntimeError:
                    self._threads.discard(thread)
                    self._num_threads -= 1
                    failed = [] if self._num_threads else self._take_waiting()
                    break
        for task in failed:
            if task.future.set_running_or_notify_cancel():
                task.future.set_exception(StorageError(f"no thread for {self._name!r}: {_why_no_thread()}"))

    def _num_wanted(self) -> int:
        """Returns the number of threads for tasks that run or may run now. The lock must be held."""
        urgent = len(self._running) + len(self._urgent)
        patient = min(self._limit, urgent + len(self._patient))
        return max(min(self._most_urgent(), urgent), patient) + bool(self._later)

    def _most_urgent(self) -> int:
        """Returns the number of urgent tasks that may run at a time. It falls with `limit`."""
        return self._limit + min(self._reserve, self._limit)

    def _take_waiting(self) -> list[_Task]:
        """Removes and returns all tasks that have not begun. The lock must be held."""
        waiting = [*self._urgent, *self._patient, *(task for _, _, task in self._later)]
        self._urgent.clear()
        self._patient.clear()
        self._later.clear()
        return waiting

    def _work(self) -> None:
        """Runs one task after another. Every thread runs this."""
        try:
            while task := self._next():
                if self._later:
                    self._start_missing()  # another thread has to wait for the task that is due next
                future, run = task
                result, error = None, None
                try:
                    result = run()
                except BaseException as raised:
                    error = raised
                del task, run  # before the future is set: waiting code may rely on freed memory
                is_counted = self._end(future)
                _set(future, result, error)
                del future, result, error
                if not is_counted:
                    break
        finally:
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _next(self) -> _Task | None:
        """Waits until a task may run, and returns it; None when this thread is no longer needed."""
        with self._changed:
            is_idle = False
            while not self._is_closed:
                if task := self._runnable():
                    if task.future.set_running_or_notify_cancel():
                        self._running.add(task.future)
                        if self._later:
                            self._changed.notify()
                        return task
                    continue
                if is_idle and not self._later:
                    break
                until_due = self._later[0][0] - time.monotonic() if self._later else math.inf
                is_idle = not self._changed.wait(min(self._idle_seconds, until_due)) and until_due > self._idle_seconds
            self._num_threads -= 1
            return None

    def _runnable(self) -> _Task | None:
        """Returns a task that may run now, if there is one. The lock must be held."""
        while self._later and self._later[0][0] <= time.monotonic():
            self._urgent.append(heapq.heappop(self._later)[2])
        if self._urgent and len(self._running) < self._most_urgent():
            return self._urgent.popleft()
        if self._patient and len(self._running) < self._limit:
            return self._patient.popleft()
        return None

    def _end(self, future: Future[Any]) -> bool:
        """Records that a task has returned. Returns whether its thread still counts."""
        with self._changed:
            is_counted = future in self._running
            self._running.discard(future)
            return is_counted


def _set(future: Future[Any], result: object, error: BaseException | None) -> None:
    with suppress(InvalidStateError):  # other code has set it
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def close_all(pools: list[Pool], *, seconds: float | None = None) -> None:
    """Cancels the pools, and waits for their threads, up to `seconds` (None: CLOSE_SECONDS) in total."""
    if sys.is_finalizing():
        return
    for pool in pools:
        pool.cancel()
    deadline = time.monotonic() + (CLOSE_SECONDS if seconds is None else seconds)
    for pool in pools:
        pool.join(deadline)


def _close_at_exit() -> None:
    """Closes all pools before the interpreter stops daemon threads, which might hold locks."""
    close_all(list(_POOLS))


def _empty_in_child() -> None:
    for pool in list(_POOLS):
        pool._empty()


atexit.register(_close_at_exit)


os.register_at_fork(after_in_child=_empty_in_child)


def each_at_once(do: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Returns `do` of each item, in the order of the items. Runs up to AT_ONCE of them at a time, since a save of 512
    ranks must not wait for 512 answers of a store one after another. After all have ended, raises the error of the
    first item that failed."""
    if len(items) < 2:
        return [do(item) for item in items]
    pool = Pool(min(AT_ONCE, len(items)), name="store")
    try:
        futures = [pool.submit(lambda item=item: do(item)) for item in items]  # type: ignore[misc]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]
    finally:
        pool.close()
