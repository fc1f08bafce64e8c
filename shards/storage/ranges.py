"""Byte ranges of a store's objects, read by a few connections in the background; slow reads are asked for twice."""

import atexit
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

from shards.errors import StorageError
from shards.storage.daemons import Daemons, join
from shards.storage.latency import LEAST_SECONDS, LatencyTracker
from shards.storage.objects import Store
from shards.storage.range_read import Half, Read, ReadConfig, Stoppable
from shards.storage.retries import ReadStoppedError
from shards.storage.traffic import TrafficCounts

__all__ = ["RangeReads", "ReadConfig"]

CLOSE_SECONDS = 1.0  # a read that stands still ends by its own timeout, and its thread with it
IDLE_SECONDS = 5.0
# Fewer reads at once for a storage that says it is too many: at most so often, by so much (AIMD, as TCP does).
CUT_SECONDS = 1.0
CUT_SHARE = 0.7
_NO_THREAD = "this process may start no more threads; raise its limit of processes and threads, or use fewer"


class RangeReads:
    """Reads of one store in the order they are asked for. Close it when done; reads not begun are dropped then.

    Threads live only as long as there is something to read, and hold up nobody's end. What is read is counted by the
    store; the hedges are counted here.
    """

    def __init__(self, store: Store, config: ReadConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.store, self.config = store, config
        self._clock, self._latency = clock, LatencyTracker()
        self._fresh = store.fresh()
        self._hedges = config.hedge_share > 0 and self._fresh is not store  # a folder is as slow the second time
        self._num_begun, self._num_hedges = 0, 0
        self._limit, self._cut_at, self._is_throttled = float(config.connections), -math.inf, False
        self._is_closed = False
        self._begin_anew()
        store.traffic.on_throttle(self._throttled)
        _OPEN.add(self)

    def _begin_anew(self) -> None:
        """Without a thread or a read: at the start, and in the child of a fork, which has neither."""
        self._lock = threading.Lock()
        self._urgent: deque[Read] = deque()
        self._waiting: deque[Read] = deque()
        self._under_way: set[Read] = set()
        self._daemons = Daemons()
        self._num_workers = 0
        self._watch_changed = threading.Condition(self._lock)
        self._is_watching, self._watch_until = False, math.inf

    def submit(self, path: str, first: int, end: int, *, urgent: bool = False) -> Future[bytes]:
        """Bytes first..end-1 of an object. The future raises what `Store.read_range` raises, and CancelledError where
        the reads were closed before. Urgent reads overtake those that wait."""
        read = Read(path=path, first=first, end=end)
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"the reads of {self.store.url} are closed")
            (self._urgent if urgent else self._waiting).append(read)
        self._staff()
        return read.future

    def close(self) -> None:
        """Drops what is not read yet. Returns soon, even where a connection stands still."""
        if not sys.is_finalizing():  # then a thread that holds the lock may never run again, and all is closed anyway
            join(self._end(), CLOSE_SECONDS)

    def _end(self) -> set[threading.Thread]:
        """Drops what is not read yet; the threads that may still live for a moment."""
        with self._lock:
            self._is_closed = True
            waiting, under_way = [*self._urgent, *self._waiting], list(self._under_way)
            self._urgent.clear()
            self._waiting.clear()
            for read in under_way:
                self._over(read)
            self._watch_changed.notify_all()
        for read in waiting:
            read.future.cancel()
        for read in under_way:
            read.future.set_exception(CancelledError(f"the reads of {self.store.url} are closed"))
        return self._daemons.living()

    def _staff(self) -> None:
        """As many workers as may read now. Where none can be had, what waits has failed."""
        with self._lock:
            num_waiting = len(self._urgent) + len(self._waiting)
            missing = max(0, min(num_waiting, int(self._limit) - self._num_workers))
            self._num_workers += missing
        while missing and self._daemons.start("read", self._work):
            missing -= 1
        if missing:
            self._go_without(missing)

    def _go_without(self, num_workers: int) -> None:
        """The workers that there are read what waits; where there are none, nobody will."""
        with self._lock:
            self._num_workers -= num_workers
            waiting = [] if self._num_workers else [*self._urgent, *self._waiting]
            if waiting:
                self._urgent.clear()
                self._waiting.clear()
        for read in waiting:
            if read.future.set_running_or_notify_cancel():
                read.future.set_exception(StorageError(f"{self.store.url} cannot be read: {_NO_THREAD}"))

    def _work(self) -> None:
        """One read after another."""
        while half := self._next():
            self._run(*half)
            if half[1].is_left:
                return

    def _next(self) -> tuple[Read, Half] | None:
        """What a worker does next; None where it is not needed any more."""
        with self._lock:
            begun = self._begun()
            is_watch_missing = bool(begun) and self._hedges and not self._is_watching
            self._is_watching |= is_watch_missing
        if is_watch_missing and not self._daemons.start("read-watch", self._watch):
            with self._lock:
                self._is_watching = False
        return begun

    def _begun(self) -> tuple[Read, Half] | None:
        """The lock is held."""
        while self._num_workers <= int(self._limit) and (queue := self._urgent or self._waiting):
            read = queue.popleft()
            if read.future.set_running_or_notify_cancel():
                half = Half(store=self.store, is_hedge=False)
                read.halves.append(half)
                read.began = self._clock()
                self._under_way.add(read)
                self._num_begun += 1
                if self._hedges:
                    read.hedge_at = read.began + self._latency.slow_after(read.end - read.first)
                    if read.hedge_at < self._watch_until:
                        self._watch_changed.notify()
                return read, half
        self._num_workers -= 1
        return None

    def _run(self, read: Read, half: Half) -> None:
        """One half of a read, to its end."""
        began, data, error = self._clock(), b"", None
        try:
            if isinstance(half.store, Stoppable):
                data = half.store.read_range_until(half.stop, read.path, read.first, read.end)
            else:
                data = half.store.read_range(read.path, read.first, read.end)
        except BaseException as raised:
            error = raised
        seconds = self._clock() - began
        with self._lock:
            read.halves.remove(half)
            if is_ours := self._is_decided_by(read, error):
                self._over(read)
                if error is None:
                    self._latency.add(len(data), seconds)
            self._grow(error)
        self._count(half, data, error, is_ours=is_ours)
        if is_ours and error is None:
            read.future.set_result(data)
        elif is_ours:
            read.future.set_exception(read.error or error)
        self._staff()

    def _is_decided_by(self, read: Read, error: BaseException | None) -> bool:
        """Whether this half of a read ends it: it is the first to have the bytes, or the last that could. The lock is
        held."""
        if read.is_over:
            return False
        if error is not None and read.halves:
            read.error = error
            return False
        return True

    def _over(self, read: Read) -> None:
        """The read has its result, or needs none: what is under way of it stops as soon as it can. The lock is held."""
        read.is_over = True
        self._under_way.discard(read)
        for half in read.halves:
            half.stop.set()
            if not half.is_hedge:
                half.is_left = True
                self._num_workers -= 1

    def _grow(self, error: BaseException | None) -> None:
        """More reads at once while all goes well. The lock is held."""
        if not self._is_throttled:
            self._limit = min(self._limit + (error is None) / self._limit, self.config.connections)
        self._is_throttled = False

    def _throttled(self) -> None:
        """The storage says that it is too much: fewer reads at once, from those on that have not begun."""
        with self._lock:
            self._is_throttled, now = True, self._clock()
            if now - self._cut_at > CUT_SECONDS:
                self._limit, self._cut_at = max(1.0, CUT_SHARE * self._limit), now

    def _count(self, half: Half, data: bytes, error: BaseException | None, *, is_ours: bool) -> None:
        traffic = self.store.traffic
        if isinstance(error, ReadStoppedError):
            traffic.add(TrafficCounts(wasted_bytes=error.num_bytes))
        elif data and not is_ours:  # the store has taken them for a read of their own
            traffic.add(TrafficCounts(requests=-1, bytes=-len(data), wasted_bytes=len(data)))
        elif half.is_hedge and is_ours and error is None:
            traffic.add(TrafficCounts(hedges_won=1))

    def _watch(self) -> None:
        """Sleeps until the next read is slow."""
        while (hedges := self._slow()) is not None:
            for read, half in hedges:
                self._hedge(read, half)

    def _slow(self) -> list[tuple[Read, Half]] | None:
        """Second requests to be made, once there is a reason to look; None where nobody is to wait for any."""
        with self._lock:
            while not self._is_closed:
                self._watch_until = min((read.hedge_at for read in self._under_way), default=math.inf)
                left = min(self._watch_until - self._clock(), IDLE_SECONDS)
                if left <= 0:
                    now = self._clock()
                    slow = [read for read in self._under_way if read.hedge_at <= now]
                    return [(read, half) for read in slow if (half := self._second_half(read, now))]
                if not self._watch_changed.wait(left) and not self._under_way:
                    break
            self._is_watching = False
            return None

    def _second_half(self, read: Read, now: float) -> Half | None:
        """None where that was done too often, or the storage has too much to do. The lock is held."""
        if self._num_hedges >= 1 + self.config.hedge_share * self._num_begun or now - self._cut_at < CUT_SECONDS:
            read.hedge_at = now + LEAST_SECONDS
            return None
        half = Half(store=self._fresh, is_hedge=True)
        read.hedge_at = math.inf
        read.halves.append(half)
        self._num_hedges += 1
        return half

    def _hedge(self, read: Read, half: Half) -> None:
        """Asks for the same bytes once more."""
        self.store.traffic.add(TrafficCounts(hedges=1))
        if self._daemons.start("read-hedge", lambda: self._run(read, half)):
            return
        self.store.traffic.add(TrafficCounts(hedges=-1))
        with self._lock:
            self._num_hedges -= 1
            read.halves.remove(half)
            if is_lost := not read.is_over and not read.halves:  # the first half has failed meanwhile
                self._over(read)
        if is_lost:
            read.future.set_exception(read.error)


# The way to them at the process's end and at a fork, which nobody else can tell them about; it keeps none alive.
_OPEN: "weakref.WeakSet[RangeReads]" = weakref.WeakSet()


def _end_all() -> None:
    """Before the interpreter stops daemon threads wherever they are, with their locks taken."""
    join({thread for reads in list(_OPEN) for thread in reads._end()}, CLOSE_SECONDS)


def _begin_all_anew() -> None:
    for reads in list(_OPEN):
        reads._begin_anew()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_begin_all_anew)
