"""The background reads of one stream: a limited number at once, urgent ones first, slow ones requested twice.

The limit shrinks when the storage asks for fewer requests, and then slowly grows again (AIMD, as in TCP: Chiu and Jain,
"Analysis of the Increase and Decrease Algorithms for Congestion Avoidance", Computer Networks 17, 1989). A read counts
as slow if it takes longer than 99 % of the latest reads did, in proportion to its size. A second request for the
slowest few percent removes most of the tail at little cost (Dean and Barroso, "The Tail at Scale", CACM 56(2), 2013).

Blocks of images share a few memory mappings, which are reused. malloc would keep what a thread frees in an arena of
that thread, and a stream reads blocks of several MB in many threads: the arenas would waste nearly as much memory as
the blocks need. A new mapping for each block would return its memory, but the kernel clears new pages: the loader would
need 7 % more CPU time (the arm `patchline` of benchmarks/loader.py, with MOST_FREE = 0).
"""

import math
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from shards.config import ReadConfig
from shards.pool import Pool, close_all
from shards.storage.fork_lock import ForkLock
from shards.storage.objects import Store, Traffic, TrafficCounts
from shards.storage.retries import ReadStoppedError

LEAST_BYTES = 1 << 20  # memory for smaller ranges comes from malloc
MOST_FREE = 4  # free mappings that are kept for the next blocks
Data = bytes | memoryview
QUANTILE = 0.99
REMEMBERED = 256
LEAST_SECONDS = 0.25  # below this, a second request gains too little
# Until KNOWN_READS reads have been measured, a store is assumed to answer after FIRST_SECONDS and to send
# FIRST_BYTES_PER_SECOND, like a distant store.
KNOWN_READS = 16
FIRST_SECONDS = 2.0
FIRST_BYTES_PER_SECOND = 5e6
REQUEST_BYTES = 1 << 20  # a request is assumed to take as long as the transfer of this many bytes
CUT_SECONDS = 1.0  # at most one cut in this time
CUT_SHARE = 0.7


class ReusedMemory:
    """Lends anonymous memory mappings to blocks, and keeps up to MOST_FREE that are free. Its methods may be called
    from any thread.

    There is no lock, because memory may be returned at any point of a thread, and in a forked child.
    """

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque(maxlen=MOST_FREE)
        self._is_closed = False

    def take(self, num_bytes: int) -> memoryview:
        """Returns `num_bytes` (at least 1) of writable memory with undefined contents. Raises MemoryError if the system
        has too little."""
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        mapping = self._resized(size)
        if mapping is None:
            try:
                mapping = _new(size)
            except OSError:
                self._free.clear()  # perhaps the free mappings hold the memory that is missing
                try:
                    mapping = _new(size)
                except OSError as error:
                    raise MemoryError(f"{num_bytes} bytes for a block of images: {error.strerror}") from None
        return memoryview(mapping)[:num_bytes]

    def give_back(self, mapping: object) -> None:
        """Takes back a mapping (`view.obj` of the view that `take` returned) that is no longer used. Ignores any other
        object."""
        if isinstance(mapping, mmap.mmap) and not self._is_closed:
            self._free.append(mapping)  # if there are more than MOST_FREE, the oldest is unmapped

    def close(self) -> None:
        """Unmaps the free mappings. Mappings returned later are not kept."""
        self._is_closed = True
        self._free.clear()

    def _resized(self, size: int) -> mmap.mmap | None:
        """Returns a free mapping, resized to `size` without losing its pages. Returns None if no mapping is free, or if
        the free one is still in use."""
        try:
            mapping = self._free.pop()
            mapping.resize(size)
        except (IndexError, BufferError, OSError, SystemError, ValueError):
            return None
        return mapping


def _new(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class LatencyTracker:
    """Remembers how long the latest reads took. Only one thread may use it at a time."""

    def __init__(self) -> None:
        self._seconds_per_byte: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, num_bytes: int, seconds: float) -> None:
        """Records a read that has ended."""
        self._seconds_per_byte.append(seconds / (REQUEST_BYTES + num_bytes))

    def slow_after(self, num_bytes: int) -> float:
        """Returns the number of seconds after which a read of `num_bytes` is slower than 99 of 100 reads, but at least
        LEAST_SECONDS."""
        if len(self._seconds_per_byte) < KNOWN_READS:
            return FIRST_SECONDS + num_bytes / FIRST_BYTES_PER_SECOND
        ranked = sorted(self._seconds_per_byte)
        slowest = ranked[min(int(QUANTILE * len(ranked)), len(ranked) - 1)]
        return max(LEAST_SECONDS, slowest * (REQUEST_BYTES + num_bytes))


class AdaptiveLimit:
    """A limit between 1 and `most`, which begins at `most`. Only one thread may use it at a time."""

    def __init__(self, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._value, self._cut_at, self._is_throttled = float(most), -math.inf, False

    @property
    def value(self) -> int:
        """The current limit."""
        return int(self._value)

    def throttled(self) -> None:
        """Cuts the limit, because the storage has asked for fewer requests."""
        self._is_throttled, now = True, self._clock()
        if now - self._cut_at > CUT_SECONDS:
            self._value, self._cut_at = max(1.0, CUT_SHARE * self._value), now

    def ended(self, *, is_success: bool) -> None:
        """Records the end of a read. The limit grows by one after `value` successful reads."""
        if not self._is_throttled:
            self._value = min(self._value + is_success / self._value, self._most)
        self._is_throttled = False

    def was_just_cut(self) -> bool:
        """Returns whether the last cut is less than CUT_SECONDS ago."""
        return self._clock() - self._cut_at < CUT_SECONDS


@dataclass(eq=False, kw_only=True)
class HedgedRequest:
    """A request for bytes first..end-1 (`end` None: the whole object) and, if it is slow, a second one: the hedge.

    `stop` ends both. It is set once the read's future is done, whether one of the requests has ended or the reads are
    closed. This object does not hold the future, because the future refers back to it, and the bytes of such a cycle
    would be freed late.
    """

    store: Store
    path: str
    first: int
    end: int | None
    is_reused: bool = False  # the bytes are read into reused memory
    stop: threading.Event = field(default_factory=threading.Event)
    hedge: Future[Data | None] | None = None
    is_hedged: bool = False  # the second request has begun
    is_over: bool = False  # a request has the bytes, or the first failed before a second began

    def done(self, _: Future[Data]) -> None:
        """Stops both requests, because nobody needs the bytes that they are still reading."""
        self.stop.set()
        if self.hedge:
            self.hedge.cancel()


class RangeReads:
    """The reads of one stream, from one or several stores. Call `close` when done; it drops reads that have not ended.

    At most `config.connections` reads run at once, plus the same number of urgent ones, which a caller is waiting for,
    plus hedges. All are counted in `traffic`. A caller waits for a read's future, and `close` cancels all futures, so
    that a stalled connection delays nobody; the connection itself ends by its timeout.
    """

    def __init__(self, config: ReadConfig) -> None:
        self.config, self.traffic = config, Traffic()
        self._lock = ForkLock()
        self._latency, self._limit = LatencyTracker(), AdaptiveLimit(config.connections)
        self._num_begun = self._num_hedges = 0
        self._requests = Pool(config.connections, name="read", reserve=config.connections)
        self._hedges = Pool(2 * config.connections, name="read-hedge")
        self.pools, self.memory = [self._requests, self._hedges], ReusedMemory()
        self.traffic.on_throttle(self._throttled)

    def of(self, store: Store, *, lost: Collection[str] = ()) -> "StreamStore":
        """Returns a view of `store` whose reads belong to this stream. `lost`: paths that are not read; reading one
        raises EOFError at once."""
        return StreamStore(store.with_traffic(self.traffic), self, lost=lost)

    def submit(
        self, store: Store, path: str, first: int, end: int | None, *, urgent: bool = False, reused: bool = False
    ) -> Future[Data]:
        """Reads bytes first..end-1 of an object in the background, or all of it if `end` is None.

        The future raises the errors of `Store.read_range`, and CancelledError once the reads are closed; if they are
        closed already, this call raises it. `reused`: a range of LEAST_BYTES or more is read into a mapping of
        `memory`, which the caller must return with `memory.give_back`.
        """
        is_reused = reused and end is not None and end - first >= LEAST_BYTES
        request = HedgedRequest(store=store, path=path, first=first, end=end, is_reused=is_reused)
        future = Future[Data]()
        future.add_done_callback(request.done)
        return self._requests.submit(partial(self._read, request, future), urgent=urgent, future=future)

    def close(self) -> None:
        """Drops the reads that have not ended. Returns within about a second, even if a connection is stalled."""
        self.memory.close()
        close_all(self.pools)

    def _read(self, request: HedgedRequest, future: Future[Data]) -> Data:
        """Makes the first request. If it fails while the hedge is running, returns the hedge's bytes."""
        self._plan_hedge(request, future)
        try:
            return self._run(request, future, request.store)
        except BaseException:
            with self._lock:
                request.is_over |= not request.is_hedged
                hedge = request.hedge if request.is_hedged else None
            data = hedge.result() if hedge else None
            if data is None:
                raise
            return data

    def _plan_hedge(self, request: HedgedRequest, future: Future[Data]) -> None:
        """Schedules the hedge of a request. A read from a folder has none, because a second read would be as slow. A
        read of a whole object has none, because its size is unknown."""
        store, end = request.store, request.end
        if not self.config.hedge_share or end is None or store.fresh() is store:
            return
        with self._lock:
            self._num_begun += 1
            slow_after = self._latency.slow_after(end - request.first)
        request.hedge = self._hedges.submit_later(partial(self._hedge, request, future), slow_after)

    def _hedge(self, request: HedgedRequest, future: Future[Data]) -> Data | None:
        """Makes the second request, over a new connection. Returns None if it is not the first to get the bytes."""
        while not self._begins_hedge(request):
            if request.stop.wait(LEAST_SECONDS):
                return None
        self.traffic.add(TrafficCounts(hedges=1))
        try:
            data = self._run(request, future, request.store.fresh())
        except Exception:  # dropped: its traceback would keep bytes in memory, even the first request's
            return None
        self.traffic.add(TrafficCounts(hedges_won=1))
        with suppress(InvalidStateError):  # the reads have been closed
            future.set_result(data)
        return data

    def _begins_hedge(self, request: HedgedRequest) -> bool:
        """Returns whether a second request may begin. It may not if there have been too many already, if the read is
        over, or if the storage has just asked for fewer requests."""
        with self._lock:
            allowed = 1 + self.config.hedge_share * self._num_begun
            if request.is_over or self._num_hedges >= allowed or self._limit.was_just_cut():
                return False
            request.is_hedged = True
            self._num_hedges += 1
            return True

    def _run(self, request: HedgedRequest, future: Future[Data], store: Store) -> Data:
        """Makes one request and waits for its end. Raises ReadStoppedError if nobody needs its bytes, and counts them
        as wasted."""
        began = time.monotonic()
        data: Data | None = None
        try:
            if request.end is None:
                data = store.read(request.path, stop=request.stop)
            elif request.is_reused:
                data = store.read_into(request.path, request.first, request.end, self.memory.take, stop=request.stop)
            else:
                data = store.read_range(request.path, request.first, request.end, stop=request.stop)
        except ReadStoppedError as error:
            self.traffic.add(TrafficCounts(wasted_bytes=error.num_bytes))
            raise
        finally:
            self._adapt(partial(self._limit.ended, is_success=data is not None))
        with self._lock:
            is_first = not (request.is_over or future.done())
            request.is_over = True
            if is_first and request.end is not None:
                self._latency.add(len(data), time.monotonic() - began)
        if not is_first:  # the store has counted this request as a separate read
            self.traffic.add(TrafficCounts(requests=-1, bytes=-len(data), wasted_bytes=len(data)))
            raise ReadStoppedError(len(data))
        return data

    def _adapt(self, change: Callable[[], None]) -> None:
        """Changes the limit, and applies it to the reads that have not begun."""
        with self._lock:
            change()
            limit = self._limit.value
        if limit != self._requests.limit:
            self._requests.limit = limit

    def _throttled(self) -> None:
        """Cuts the limit, because the storage has asked for fewer requests."""
        self._adapt(self._limit.throttled)


class StreamStore:
    """A store that is read by one stream. When the stream is closed, callers that wait for a read get a
    CancelledError."""

    def __init__(self, store: Store, reads: RangeReads, *, lost: Collection[str] = ()) -> None:
        self._store, self._reads, self._lost = store, reads, frozenset(lost)

    @property
    def url(self) -> str:
        """The store's URL."""
        return self._store.url

    @property
    def memory(self) -> ReusedMemory:
        """The memory for ranges that are requested with `reused`."""
        return self._reads.memory

    def submit(self, path: str, first: int, end: int, *, urgent: bool = False, reused: bool = False) -> Future[Data]:
        """Reads bytes first..end-1 of an object in the background, like RangeReads.submit."""
        if path in self._lost:
            failed = Future[Data]()
            failed.set_exception(self._is_lost(path))
            return failed
        return self._reads.submit(self._store, path, first, end, urgent=urgent, reused=reused)

    def read(self, path: str) -> bytes:
        """Reads the whole object."""
        return bytes(self._reads.submit(self._store, path, 0, None, urgent=True).result())

    def read_range(self, path: str, first: int, end: int) -> bytes:
        """Reads bytes first..end-1 of an object."""
        if path in self._lost:
            raise self._is_lost(path)
        return bytes(self._reads.submit(self._store, path, first, end, urgent=True).result())

    def _is_lost(self, path: str) -> EOFError:
        return EOFError(f"{self.url}/{path} could not be read when this run started, and is left out since")
