"""Reads of one stream in the background: a limited number at once, urgent ones first, slow ones requested twice.

The limit shrinks when the storage says that it is too much, and then slowly grows again (AIMD, as in TCP: Chiu and
Jain, "Analysis of the Increase and Decrease Algorithms for Congestion Avoidance", Computer Networks 17, 1989). A read
is slow compared with the latest ones, whatever their sizes; a second request for the slowest few percent removes most
of the tail at little cost (Dean and Barroso, "The Tail at Scale", CACM 56(2), 2013).

Blocks of images share a few mappings of memory, which are used again and again. malloc keeps what a thread frees in an
arena of that thread. A stream reads blocks of several MB in many threads, so nearly as much memory again as it holds
would stay in the arenas. A new mapping for each block would return the memory, but the kernel clears its pages: the
loader would take 7 % more CPU time (the arm `patchline` of benchmarks/loader.py, MOST_FREE = 0).
"""

import math
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from shards.config import ReadConfig
from shards.pool import Pool, close_all
from shards.storage.fork_lock import ForkLock
from shards.storage.objects import Store, Traffic, TrafficCounts
from shards.storage.retries import ReadStoppedError

LEAST_BYTES = 1 << 20  # smaller ranges are left to malloc
MOST_FREE = 4  # mappings that are kept for the next blocks
Data = bytes | memoryview
QUANTILE = 0.99
REMEMBERED = 256
LEAST_SECONDS = 0.25  # below this, a second request gains too little
# The times that a distant store takes to answer and to send its bytes; they count until enough reads are known.
KNOWN_READS = 16
FIRST_SECONDS = 2.0
FIRST_BYTES_PER_SECOND = 5e6
REQUEST_BYTES = 1 << 20  # a request takes about as long as this many bytes of a body
CUT_SECONDS = 1.0  # at most one cut in this time
CUT_SHARE = 0.7


class ReusedMemory:
    """Keeps a few anonymous mappings and lends them to blocks. Its methods may be called from any thread.

    There is no lock: memory may be given back anywhere in a thread, and in a child that was forked meanwhile.
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
                self._free.clear()  # perhaps they are what is missing
                try:
                    mapping = _new(size)
                except OSError as error:
                    raise MemoryError(f"{num_bytes} bytes for a block of images: {error.strerror}") from None
        return memoryview(mapping)[:num_bytes]

    def give_back(self, mapping: object) -> None:
        """Takes back a mapping (`view.obj` of what `take` returned) that nothing uses any more. Ignores any other
        object."""
        if isinstance(mapping, mmap.mmap) and not self._is_closed:
            self._free.append(mapping)  # beyond MOST_FREE, the oldest is unmapped

    def close(self) -> None:
        """Unmaps the free mappings, and from now on those that are given back."""
        self._is_closed = True
        self._free.clear()

    def _resized(self, size: int) -> mmap.mmap | None:
        """Returns a free mapping with this size, which keeps its pages. None if there is none, or if something still
        uses it."""
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
        """Returns the seconds after which a read of `num_bytes` is slower than 99 of 100 reads."""
        if len(self._seconds_per_byte) < KNOWN_READS:
            return FIRST_SECONDS + num_bytes / FIRST_BYTES_PER_SECOND
        ranked = sorted(self._seconds_per_byte)
        slowest = ranked[min(int(QUANTILE * len(ranked)), len(ranked) - 1)]
        return max(LEAST_SECONDS, slowest * (REQUEST_BYTES + num_bytes))


class AdaptiveLimit:
    """A limit between 1 and `most`, at which it begins. Only one thread may use it at a time."""

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
        """Records the end of a read. The limit grows by one after as many successes as it allows reads."""
        if not self._is_throttled:
            self._value = min(self._value + is_success / self._value, self._most)
        self._is_throttled = False

    def was_just_cut(self) -> bool:
        """Says whether the last cut is less than CUT_SECONDS ago."""
        return self._clock() - self._cut_at < CUT_SECONDS


@dataclass(eq=False, kw_only=True)
class HedgedRequest:
    """A request for bytes first..end-1 (`end` None: the whole object) and, if it is slow, a second one: the hedge.

    `stop` ends both. It is set once the read's future is done, by one of the requests or by a close. The future is not
    held here: it leads back to this object, and bytes in a cycle would be freed late.
    """

    store: Store
    path: str
    first: int
    end: int | None
    is_reused: bool = False  # the bytes come in memory that is used again
    stop: threading.Event = field(default_factory=threading.Event)
    hedge: Future[Data | None] | None = None
    is_hedged: bool = False  # the second request has begun
    is_over: bool = False  # one of the requests has the bytes, or the first one has failed before there was a second

    def done(self, _: Future[Data]) -> None:
        """Stops both requests, because nobody needs what they are still reading."""
        self.stop.set()
        if self.hedge:
            self.hedge.cancel()


class RangeReads:
    """The reads of one stream, of one or several stores. Close it when done; reads that have not begun are dropped.

    At most `config.connections` reads run at once, and as many more if somebody waits for them (urgent ones); hedges
    come on top. All are counted in `traffic`. Whoever waits for a read waits for its future, which `close` cancels: a
    stalled connection delays nobody and ends by its own timeout.
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

    def of(self, store: Store) -> "StreamStore":
        """Returns the store as this stream reads it."""
        return StreamStore(store.with_traffic(self.traffic), self)

    def submit(
        self, store: Store, path: str, first: int, end: int | None, *, urgent: bool = False, reused: bool = False
    ) -> Future[Data]:
        """Reads bytes first..end-1 of an object in the background, or all of it if `end` is None.

        The future raises the errors of `Store.read_range`, and CancelledError once the reads are closed; if they are
        closed already, this call raises it. `reused`: ranges of LEAST_BYTES or more come in a mapping of `memory`,
        which the caller must give back.
        """
        is_reused = reused and end is not None and end - first >= LEAST_BYTES
        request = HedgedRequest(store=store, path=path, first=first, end=end, is_reused=is_reused)
        future = Future[Data]()
        future.add_done_callback(request.done)
        return self._requests.submit(partial(self._read, request, future), urgent=urgent, future=future)

    def close(self) -> None:
        """Drops what has not been read yet. Returns within about a second, even if a connection is stalled."""
        self.memory.close()
        close_all(self.pools)

    def _read(self, request: HedgedRequest, future: Future[Data]) -> Data:
        """Does the first request. If it fails while the hedge is running, the hedge decides."""
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
        """Schedules the hedge of a request. There is none for a folder, which is as slow the second time, nor for a
        whole object, whose size nobody knows."""
        store, end = request.store, request.end
        if not self.config.hedge_share or end is None or store.fresh() is store:
            return
        with self._lock:
            self._num_begun += 1
            slow_after = self._latency.slow_after(end - request.first)
        request.hedge = self._hedges.submit_later(partial(self._hedge, request, future), slow_after)

    def _hedge(self, request: HedgedRequest, future: Future[Data]) -> Data | None:
        """Does the second request, over a connection of its own. Returns None if it does not bring the bytes."""
        while not self._begins_hedge(request):
            if request.stop.wait(LEAST_SECONDS):
                return None
        self.traffic.add(TrafficCounts(hedges=1))
        try:
            data = self._run(request, future, request.store.fresh())
        except Exception:  # it is not kept, because its traceback would keep bytes in memory, even the first request's
            return None
        self.traffic.add(TrafficCounts(hedges_won=1))
        with suppress(InvalidStateError):  # closed meanwhile
            future.set_result(data)
        return data

    def _begins_hedge(self, request: HedgedRequest) -> bool:
        """Says whether a second request may begin. It may not if there were too many already, or if the storage has
        asked for fewer requests."""
        with self._lock:
            allowed = 1 + self.config.hedge_share * self._num_begun
            if request.is_over or self._num_hedges >= allowed or self._limit.was_just_cut():
                return False
            request.is_hedged = True
            self._num_hedges += 1
            return True

    def _run(self, request: HedgedRequest, future: Future[Data], store: Store) -> Data:
        """Does one request, to its end. Raises ReadStoppedError if nobody needs its bytes, which are counted as
        wasted."""
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
        if not is_first:  # the store has counted this request as a read of its own
            self.traffic.add(TrafficCounts(requests=-1, bytes=-len(data), wasted_bytes=len(data)))
            raise ReadStoppedError(len(data))
        return data

    def _adapt(self, change: Callable[[], None]) -> None:
        """Changes the limit, which counts for the reads that have not begun."""
        with self._lock:
            change()
            limit = self._limit.value
        if limit != self._requests.limit:
            self._requests.limit = limit

    def _throttled(self) -> None:
        """Cuts the limit, because the storage has asked for fewer requests."""
        self._adapt(self._limit.throttled)


class StreamStore:
    """A store as one stream reads it. Whoever waits for a read gets a CancelledError when the stream is closed."""

    def __init__(self, store: Store, reads: RangeReads) -> None:
        self._store, self._reads = store, reads

    @property
    def url(self) -> str:
        """The store's URL."""
        return self._store.url

    @property
    def memory(self) -> ReusedMemory:
        """The mappings for ranges that are requested with `reused`."""
        return self._reads.memory

    def submit(self, path: str, first: int, end: int, *, urgent: bool = False, reused: bool = False) -> Future[Data]:
        """Reads bytes first..end-1 of an object in the background. `reused` is that of RangeReads.submit."""
        return self._reads.submit(self._store, path, first, end, urgent=urgent, reused=reused)

    def read(self, path: str) -> bytes:
        """Reads the whole object."""
        return bytes(self._reads.submit(self._store, path, 0, None, urgent=True).result())

    def read_range(self, path: str, first: int, end: int) -> bytes:
        """Reads bytes first..end-1 of an object."""
        return bytes(self._reads.submit(self._store, path, first, end, urgent=True).result())
