"""Byte ranges of a store's objects, read by a few connections in the background; slow reads are asked for twice."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from shards.errors import UserError
from shards.storage.hedging import LEAST_SECONDS, Pace
from shards.storage.objects import Store
from shards.storage.retries import ReadStoppedError
from shards.storage.traffic import TrafficCounts

CLOSE_SECONDS = 1.0  # a read that stands still ends by its own timeout, and its thread with it
IDLE_SECONDS = 5.0
# Fewer reads at once for a storage that says it is too many: at most so often, by so much (AIMD, as TCP does).
CUT_SECONDS = 1.0
CUT_SHARE = 0.7


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """`connections`: reads under way at once, a rank. `hedge_share`: second requests for slow reads, as a share of all
    requests (0: none)."""

    connections: int = 8
    hedge_share: float = 0.05

    def __post_init__(self) -> None:
        if self.connections < 1 or not 0 <= self.hedge_share <= 1:
            raise UserError(f"allowed are connections of 1 or more and a hedge_share of 0 to 1: {self}")


@runtime_checkable
class Stoppable(Protocol):
    """A store whose reads can be stopped. Files are read too fast for that."""

    def read_range_until(self, stop: threading.Event, path: str, first: int, end: int) -> bytes:
        """As `Store.read_range`; ReadStoppedError soon after `stop` is set."""
        ...


@dataclass(eq=False, kw_only=True)
class _Half:
    """One of the up to two requests for the same bytes."""

    store: Store
    is_hedge: bool
    stop: threading.Event = field(default_factory=threading.Event)
    is_left: bool = False  # by its worker's successor: the read is over, and this thread may stand still for a while


@dataclass(eq=False, kw_only=True)
class _Read:
    path: str
    first: int
    end: int
    future: Future[bytes] = field(default_factory=Future)
    began: float = 0.0
    hedge_at: float = math.inf
    halves: list[_Half] = field(default_factory=list)  # under way
    error: BaseException | None = None  # of the half that failed first
    is_over: bool = False


class RangeReads:
    """Reads of one store in the order they are asked for. Close it when done; reads not begun are dropped then.

    Threads live only as long as there is something to read, and hold up nobody's end.
    """

    def __init__(self, store: Store, config: ReadConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.store, self.config = store, config
        self._clock, self._pace = clock, Pace()
        self._fresh = store.fresh()
        self._hedges = config.hedge_share > 0 and self._fresh is not store  # a folder is as slow the second time
        self._lock = threading.Lock()
        self._urgent: deque[_Read] = deque()
        self._waiting: deque[_Read] = deque()
        self._under_way: set[_Read] = set()
        self._threads: set[threading.Thread] = set()
        self._num_workers, self._num_begun, self._num_hedges = 0, 0, 0
        self._limit = float(config.connections)
        self._num_throttled, self._cut_at = store.traffic.counts().throttled, -math.inf
        self._is_closed = False
        self._watch_changed = threading.Condition(self._lock)
        self._is_watching, self._watch_until = False, math.inf

    def submit(self, path: str, first: int, end: int, *, urgent: bool = False) -> Future[bytes]:
        """Bytes first..end-1 of an object. The future raises what `Store.read_range` raises, and CancelledError where
        the reads were closed before. Urgent reads overtake those that wait."""
        read = _Read(path=path, first=first, end=end)
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"the reads of {self.store.url} are closed")
            (self._urgent if urgent else self._waiting).append(read)
            self._staff()
        return read.future

    def close(self) -> None:
        """Drops what is not read yet. Returns soon, even where a connection stands still."""
        with self._lock:
            self._is_closed = True
            waiting, under_way = [*self._urgent, *self._waiting], list(self._under_way)
            self._urgent.clear()
            self._waiting.clear()
            for read in under_way:
                self._over(read)
            self._watch_changed.notify_all()
            threads = self._threads - {threading.current_thread()}
        for read in waiting:
            read.future.cancel()
        for read in under_way:
            read.future.set_exception(CancelledError(f"the reads of {self.store.url} are closed"))
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _staff(self) -> None:
        """As many workers as may read now. The lock is held, here and in all that says nothing else."""
        num_waiting = len(self._urgent) + len(self._waiting)
        while num_waiting > 0 and self._num_workers < int(self._limit):
            self._num_workers += 1
            num_waiting -= 1
            self._start("read", self._work)

    def _start(self, name: str, target: Callable[[], None]) -> None:
        def run() -> None:
            try:
                target()
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.add(thread)
        thread.start()

    def _work(self) -> None:
        """One read after another, without the lock."""
        while half := self._next():
            self._run(*half)
            if half[1].is_left:
                return

    def _next(self) -> tuple[_Read, _Half] | None:
        """Without the lock: what a worker does next; None where it is not needed any more."""
        with self._lock:
            while self._num_workers <= int(self._limit) and (queue := self._urgent or self._waiting):
                read = queue.popleft()
                if read.future.set_running_or_notify_cancel():
                    return read, self._begin(read)
            self._num_workers -= 1
            return None

    def _begin(self, read: _Read) -> _Half:
        half = _Half(store=self.store, is_hedge=False)
        read.halves.append(half)
        read.began = self._clock()
        self._under_way.add(read)
        self._num_begun += 1
        if self._hedges:
            read.hedge_at = read.began + self._pace.slow_after(read.end - read.first)
            if not self._is_watching:
                self._is_watching = True
                self._start("read-watch", self._watch)
            elif read.hedge_at < self._watch_until:
                self._watch_changed.notify()
        return half

    def _run(self, read: _Read, half: _Half) -> None:
        """Without the lock: one half of a read, to its end."""
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
                    self._pace.add(len(data), seconds)
            self._adapt(error)
            self._staff()
        self._count(read, half, data, error, is_ours=is_ours)
        if is_ours and error is None:
            read.future.set_result(data)
        elif is_ours:
            read.future.set_exception(read.error or error)

    def _is_decided_by(self, read: _Read, error: BaseException | None) -> bool:
        """Whether this half of a read ends it: it is the first to have the bytes, or the last that could."""
        if read.is_over:
            return False
        if error is not None and read.halves:
            read.error = error
            return False
        return True

    def _over(self, read: _Read) -> None:
        """The read has its result, or needs none: what is under way of it stops as soon as it can."""
        read.is_over = True
        self._under_way.discard(read)
        for half in read.halves:
            half.stop.set()
            if not half.is_hedge:
                half.is_left = True
                self._num_workers -= 1

    def _adapt(self, error: BaseException | None) -> None:
        """Fewer reads at once after an answer that says so, more again while all goes well."""
        throttled, now = self.store.traffic.counts().throttled, self._clock()
        if throttled == self._num_throttled:
            self._limit = min(self._limit + (error is None) / self._limit, self.config.connections)
        elif now - self._cut_at > CUT_SECONDS:
            self._limit, self._cut_at = max(1.0, CUT_SHARE * self._limit), now
        self._num_throttled = throttled

    def _count(self, read: _Read, half: _Half, data: bytes, error: BaseException | None, *, is_ours: bool) -> None:
        wasted = error.num_bytes if isinstance(error, ReadStoppedError) else 0 if is_ours else len(data)
        won = is_ours and error is None
        self.store.traffic.add(
            TrafficCounts(
                requests=int(is_ours),
                bytes=len(data) if won else 0,
                seconds=self._clock() - read.began if is_ours else 0.0,
                hedges_won=int(half.is_hedge and won),
                wasted_bytes=wasted,
            )
        )

    def _watch(self) -> None:
        """Without the lock: sleeps until the next read is slow."""
        with self._lock:
            while not self._is_closed:
                self._watch_until = min((read.hedge_at for read in self._under_way), default=math.inf)
                left = min(self._watch_until - self._clock(), IDLE_SECONDS)
                if left <= 0:
                    self._hedge_slow()
                elif not self._watch_changed.wait(left) and not self._under_way:
                    break
            self._is_watching = False

    def _hedge_slow(self) -> None:
        now = self._clock()
        for read in self._under_way:
            if read.hedge_at <= now:
                self._hedge(read)

    def _hedge(self, read: _Read) -> None:
        """Asks for the same bytes once more, unless that was done too often, or the storage has too much to do."""
        now = self._clock()
        if self._num_hedges >= 1 + self.config.hedge_share * self._num_begun or now - self._cut_at < CUT_SECONDS:
            read.hedge_at = now + LEAST_SECONDS
            return
        half = _Half(store=self._fresh, is_hedge=True)
        read.hedge_at = math.inf
        read.halves.append(half)
        self._num_hedges += 1
        self.store.traffic.add(TrafficCounts(hedges=1))
        self._start("read-hedge", lambda: self._run(read, half))
