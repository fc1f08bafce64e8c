"""Threads that run tasks in the background and can be left at once, even where one of them stands still in a read."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from shards.storage.daemons import Daemons, join

Result = TypeVar("Result")
_Task = tuple[Future[Any], Callable[[], Any]]


class Workers:
    """Runs tasks in the order in which they are given, urgent ones first. Close it when done.

    Of `num_threads` tasks at a time at most `most_patient` are not urgent (0: as many as there are threads). Unlike a
    ThreadPoolExecutor's, its threads hold up neither `close` nor the interpreter's end.
    """

    def __init__(self, num_threads: int, *, name: str, most_patient: int = 0) -> None:
        self._num_threads, self._most_patient, self._name = num_threads, most_patient or num_threads, name
        self._changed = threading.Condition()
        self._urgent: deque[_Task] = deque()
        self._patient: deque[_Task] = deque()
        self._under_way: set[Future[Any]] = set()
        self._daemons = Daemons()
        self._num_begun = self._num_idle = self._num_patient = 0
        self._is_closed = False

    def submit(self, task: Callable[[], Result], *, urgent: bool = False) -> Future[Result]:
        """The task's future. It raises CancelledError where the workers are closed before the task has ended."""
        future: Future[Result] = Future()
        with self._changed:
            if self._is_closed:
                raise CancelledError(f"the threads {self._name!r} are closed")
            (self._urgent if urgent else self._patient).append((future, task))
            is_short = self._num_idle < len(self._urgent) + len(self._patient) and self._num_begun < self._num_threads
            self._num_begun += is_short
            self._changed.notify()
        if is_short and not self._daemons.start(self._name, self._work):
            with self._changed:
                self._num_begun -= 1
                if self._num_begun == 0:
                    raise RuntimeError(f"this process gets no thread for {self._name!r}")
        return future

    def cancel(self) -> None:
        """Takes no more tasks and ends those given: whoever waits for one gets a CancelledError at once."""
        with self._changed:
            self._is_closed = True
            waiting = [future for future, _ in (*self._urgent, *self._patient)]
            dropped = [future for future in waiting if future.set_running_or_notify_cancel()]
            dropped += self._under_way
            self._urgent.clear()
            self._patient.clear()
            self._changed.notify_all()
        for future in dropped:
            with suppress(InvalidStateError):  # it has ended meanwhile
                future.set_exception(CancelledError(f"the threads {self._name!r} are closed"))

    def close(self, *, seconds: float) -> None:
        """Cancels, and waits so long for its threads to end: one that stands still goes on until its read ends."""
        self.cancel()
        join(self._daemons.living(), seconds)

    def _next(self) -> tuple[_Task, bool] | None:
        """A task and whether it is urgent, once there is one that may be begun; None at the end."""
        with self._changed:
            while not self._is_closed:
                if self._urgent:
                    task, is_urgent = self._urgent.popleft(), True
                elif self._patient and self._num_patient < self._most_patient:
                    task, is_urgent = self._patient.popleft(), False
                else:
                    self._num_idle += 1
                    self._changed.wait()
                    self._num_idle -= 1
                    continue
                if task[0].set_running_or_notify_cancel():
                    self._num_patient += not is_urgent
                    self._under_way.add(task[0])
                    return task, is_urgent
            return None

    def _work(self) -> None:
        while found := self._next():
            (future, task), is_urgent = found
            result, error = None, None
            try:
                result = task()
            except BaseException as raised:
                error = raised
            del found, task  # first: whoever waits for the end may count what the task held as given back
            with self._changed:
                self._under_way.discard(future)
                self._num_patient -= not is_urgent
                if self._patient:
                    self._changed.notify()
            with suppress(InvalidStateError):  # it was closed meanwhile
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)
            del future, result, error
