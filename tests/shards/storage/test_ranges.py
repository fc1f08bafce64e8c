"""Reads in the background: urgent ones first, slow ones requested twice, into memory that is used again."""

import gc
import math
import mmap
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from shards.config import ReadConfig
from shards.errors import StorageError
from shards.storage.local import LocalStore
from shards.storage.objects import MissingObjectError, TrafficCounts
from shards.storage.ranges import LEAST_BYTES, MOST_FREE, HedgedRequest, RangeReads, ReusedMemory
from shards.storage.retries import ReadStoppedError, RetryConfig
from shards.storage.s3 import PIECE_BYTES, S3Store
from shards.store import Store, open_store
from tests.rigs.faulty_connection import Fault, FaultyProxy
from tests.rigs.faulty_proxy import faulty_proxy
from tests.shards.storage.test_fork_lock import ends_in_a_child

CHECKOUT = Path(__file__).resolve().parents[3]
SECONDS = 60.0  # until a test that waits in vain has failed
DATA = random.Random(1).randbytes(1_000_000)
Answer = Callable[[threading.Event, int], bytes]
STALLED_SCRIPT = """
import sys
from shards.config import ReadConfig
from shards.storage.ranges import RangeReads
from shards.store import open_store
RangeReads(ReadConfig()).submit(open_store(sys.argv[1]), "x", 0, 1000)
sys.stdin.read()
"""
GLOBAL_SCRIPT = """
import sys
from shards.config import ReadConfig
from shards.storage.ranges import RangeReads
from shards.store import open_store


def pieces(url):
    reads, store = RangeReads(ReadConfig(connections=8)), open_store(url)
    try:
        futures = [reads.submit(store, "x", 0, 100_000) for _ in range(2000)]
        for future in futures:
            yield future.result()
    finally:
        reads.close()


held = pieces(sys.argv[1])
next(held)
"""


@dataclass(frozen=True)
class Scripted(LocalStore):
    """Reads give what `answer` gives for the event that stops them and their first byte; `second` is the answer over
    fresh connections."""

    answer: Answer = lambda _, first: bytes([first])
    second: Answer | None = None

    def fresh(self) -> "Scripted":
        return replace(self, answer=self.second) if self.second else self

    def read_range(self, path: str, first: int, end: int, *, stop: threading.Event | None = None) -> bytes:  # noqa: ARG002
        assert stop
        data = self.answer(stop, first)
        self.traffic.add(TrafficCounts(requests=1, bytes=len(data)))
        return data


def scripted(answer: Answer, second: Answer | None = None) -> Scripted:
    return Scripted("", answer=answer, second=second)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = own_threads()
    yield
    wait_until(lambda: own_threads() <= before)


def own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("read")}


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline, pause = time.monotonic() + SECONDS, threading.Event()
    while not is_so():
        assert time.monotonic() < deadline, "waited in vain"
        pause.wait(0.005)


@pytest.fixture
def quick_hedges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read is slow after 50 ms."""
    monkeypatch.setattr("shards.storage.ranges.FIRST_SECONDS", 0.05)
    monkeypatch.setattr("shards.storage.ranges.LEAST_SECONDS", 0.05)


class ReadsOfOne(RangeReads):
    """The reads of a stream, of one store."""

    def __init__(self, store: Store, connections: int = 2, hedge_share: float = 0.05) -> None:
        super().__init__(ReadConfig(connections=connections, hedge_share=hedge_share))
        self.store = self.of(store)

    def read(self, path: str, first: int, end: int, *, urgent: bool = False) -> Future[bytes | memoryview]:
        return self.store.submit(path, first, end, urgent=urgent)


@pytest.fixture
def reads_of() -> Iterator[Callable[..., ReadsOfOne]]:
    """Makes reads that are closed after the test."""
    made: list[ReadsOfOne] = []

    def make(store: Store, connections: int = 2, hedge_share: float = 0.05) -> ReadsOfOne:
        made.append(ReadsOfOne(store, connections, hedge_share))
        return made[-1]

    yield make
    for reads in made:
        reads.close()


Reads = Callable[..., ReadsOfOne]


@pytest.mark.parametrize("where", ["folder", "s3", pytest.param("ceph", marks=pytest.mark.rgw)])
def test_large_ranges_may_come_in_memory_that_is_used_again(
    request: pytest.FixtureRequest, tmp_path: Path, reads_of: Reads, where: str
) -> None:
    data = random.Random(2).randbytes(3 * LEAST_BYTES)
    url = str(tmp_path) if where == "folder" else f"s3://{request.getfixturevalue(f'{where}_bucket')}/a"
    store = open_store(url)
    store.write("x", data)
    reads, mappings = reads_of(store), set[object]()
    for first, end in ((0, LEAST_BYTES), (5, 2 * LEAST_BYTES), (7, 3 * LEAST_BYTES)):
        found = reads.store.submit("x", first, end, reused=True).result(SECONDS)
        assert isinstance(found, memoryview)
        assert found == data[first:end]
        mapping = found.obj
        found.release()
        reads.memory.give_back(mapping)
        mappings.add(mapping)
    assert len(mappings) == 1
    assert isinstance(reads.store.submit("x", 0, LEAST_BYTES - 1, reused=True).result(SECONDS), bytes)
    assert isinstance(reads.store.submit("x", 0, LEAST_BYTES).result(SECONDS), bytes)
    assert reads.traffic.counts().requests == 5
    assert reads.traffic.counts().bytes == 8 * LEAST_BYTES - 12 - 1
    with pytest.raises(EOFError, match=r"ends at 3145728|3145728"):
        reads.store.submit("x", 3, 3 * LEAST_BYTES + 1, reused=True).result(SECONDS)


@pytest.mark.parametrize("where", ["folder", "s3", pytest.param("ceph", marks=pytest.mark.rgw)])
def test_ranges_are_read_and_counted(
    request: pytest.FixtureRequest, tmp_path: Path, reads_of: Reads, where: str
) -> None:
    url = str(tmp_path) if where == "folder" else f"s3://{request.getfixturevalue(f'{where}_bucket')}/a"
    store = open_store(url)
    assert isinstance(store, LocalStore | S3Store)
    store.write("x", DATA)
    reads, before = reads_of(store, connections=4), store.traffic.counts()
    chosen = [(first, first + 30_000) for first in range(0, 900_000, 20_000)]
    futures = [reads.read("x", first, end) for first, end in chosen]
    for (first, end), future in zip(chosen, futures, strict=True):
        assert future.result(SECONDS) == DATA[first:end]
    counts = reads.traffic.counts()
    assert store.traffic.counts() == before, "a stream has counters of its own"
    assert (counts.requests, counts.bytes, counts.retries) == (len(chosen), 30_000 * len(chosen), 0)
    assert counts.seconds > 0
    with pytest.raises(EOFError):
        reads.read("x", 0, 1_000_001).result(SECONDS)
    with pytest.raises(MissingObjectError, match="no/such"):
        reads.read("no/such", 0, 4).result(SECONDS)


def test_reads_begin_in_order_and_urgent_ones_first(reads_of: Reads) -> None:
    begun: list[int] = []
    go = threading.Event()

    def answer(_: threading.Event, first: int) -> bytes:
        begun.append(first)
        go.wait(SECONDS)
        return b""

    reads = reads_of(scripted(answer), connections=1)
    futures = [reads.read("x", 0, 1)]
    wait_until(lambda: begun == [0])
    futures += [reads.read("x", first, first + 1, urgent=first > 3) for first in range(1, 7)]
    assert futures[2].cancel(), "it has not begun"
    wait_until(lambda: begun == [0, 4])  # a connection more, for reads that somebody waits for
    go.set()
    wait(futures, SECONDS)
    assert set(begun[2:4]) == {5, 6}
    assert begun[4:] == [1, 3]


def test_so_many_are_under_way_and_no_more(reads_of: Reads) -> None:
    together, lock, now, most = threading.Barrier(3, timeout=SECONDS), threading.Lock(), 0, 0

    def answer(_: threading.Event, first: int) -> bytes:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        together.wait()
        with lock:
            now -= 1
        return bytes([first])

    reads = reads_of(scripted(answer), connections=3)
    futures = [reads.read("x", first, first + 1) for first in range(60)]
    assert [future.result(SECONDS) for future in futures] == [bytes([first]) for first in range(60)]
    assert most == 3


def test_fewer_are_under_way_once_the_storage_says_so(reads_of: Reads) -> None:
    lock, now, under_way, is_told = threading.Lock(), 0, list[int](), threading.Event()

    def answer(_: threading.Event, first: int) -> bytes:
        nonlocal now
        with lock:
            now += 1
            under_way.append(now)
        if first < 3:
            reads.traffic.add(TrafficCounts(throttled=1))
            is_told.set()
        assert is_told.wait(SECONDS)  # before that no read ends, and none begins in its place
        threading.Event().wait(0.01)  # what a read takes
        with lock:
            now -= 1
        return b""

    reads = reads_of(scripted(answer), connections=8)
    wait([reads.read("x", first, first + 1) for first in range(200)], SECONDS)
    assert max(under_way[8:20]) < 8
    assert max(under_way[-60:]) == 8, "and it grows again"


def test_a_slow_read_is_asked_for_twice_and_the_first_answer_counts(
    reads_of: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = threading.Event()

    def slow(stop: threading.Event, first: int) -> bytes:
        if first != 3:
            return bytes([first])
        assert stop.wait(SECONDS)
        stopped.set()
        raise ReadStoppedError(1234)

    store = scripted(slow, second=lambda _, first: bytes([first]))
    reads = reads_of(store)
    monkeypatch.setattr("shards.storage.ranges.FIRST_SECONDS", SECONDS)  # a busy machine may hold up any of them
    futures = [reads.read("x", first, first + 1) for first in range(8) if first != 3]
    assert [future.result(SECONDS)[0] for future in futures] == [0, 1, 2, 4, 5, 6, 7]
    monkeypatch.setattr("shards.storage.ranges.FIRST_SECONDS", 0.05)
    assert reads.read("x", 3, 4).result(SECONDS) == bytes([3])
    assert stopped.wait(SECONDS), "the slow half is stopped"
    wait_until(lambda: reads.traffic.counts().wasted_bytes == 1234)
    counts = reads.traffic.counts()
    assert (counts.requests, counts.bytes, counts.hedges, counts.hedges_won) == (8, 8, 1, 1)


def test_a_hedge_that_comes_too_late_is_wasted(reads_of: Reads, quick_hedges: None) -> None:
    hedging = threading.Event()

    def first_half(_: threading.Event, first: int) -> bytes:
        assert hedging.wait(SECONDS)
        return b"first"

    def second_half(stop: threading.Event, first: int) -> bytes:
        hedging.set()
        assert stop.wait(SECONDS)
        return b"second"

    store = scripted(first_half, second=second_half)
    reads = reads_of(store)
    assert reads.read("x", 0, 5).result(SECONDS) == b"first"
    wait_until(lambda: reads.traffic.counts().wasted_bytes == 6)
    assert reads.traffic.counts() == TrafficCounts(requests=1, bytes=5, hedges=1, wasted_bytes=6)


@dataclass(frozen=True)
class SlowIntoMemory(LocalStore):
    """Writes ones and, once it is stopped, ones again; over fresh connections, twos at once."""

    written: threading.Event = field(default_factory=threading.Event)
    is_fresh: bool = False

    def fresh(self) -> "SlowIntoMemory":
        return replace(self, is_fresh=True)

    def read_into(
        self, _: str, first: int, end: int, take: Callable[[int], memoryview], *, stop: threading.Event | None = None
    ) -> memoryview:
        view, mark = take(end - first), b"2" if self.is_fresh else b"1"
        view[:] = mark * len(view)
        if not self.is_fresh:
            assert stop
            assert stop.wait(SECONDS)
            view[:] = mark * len(view)
            self.written.set()
        self.traffic.add(TrafficCounts(requests=1, bytes=len(view)))
        return view


def test_a_read_and_its_hedge_never_share_memory(reads_of: Reads, quick_hedges: None) -> None:
    store = SlowIntoMemory("")
    reads = reads_of(store)
    found = reads.store.submit("x", 0, LEAST_BYTES, reused=True).result(SECONDS)
    assert store.written.wait(SECONDS)
    assert found == b"2" * LEAST_BYTES
    wait_until(lambda: reads.traffic.counts().wasted_bytes == LEAST_BYTES)


@pytest.mark.parametrize("broken", ["first", "second", "both"])
def test_one_half_that_fails_does_not_fail_the_read(reads_of: Reads, quick_hedges: None, broken: str) -> None:
    hedging, failed = threading.Event(), threading.Event()

    def fail(message: str) -> bytes:
        failed.set()
        raise ConnectionError(message)

    def first_half(_: threading.Event, first: int) -> bytes:
        assert hedging.wait(SECONDS)
        if broken != "second":
            return fail("the first half")
        assert failed.wait(SECONDS)
        return b"data"

    def second_half(_: threading.Event, first: int) -> bytes:
        hedging.set()
        if broken == "second":
            return fail("the second half")
        assert failed.wait(SECONDS)
        return b"data" if broken == "first" else fail("the second half")

    future = reads_of(scripted(first_half, second=second_half)).read("x", 0, 4)
    if broken == "both":
        with pytest.raises(ConnectionError, match="the first half"):
            future.result(SECONDS)
    else:
        assert future.result(SECONDS) == b"data"


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5])
def test_hedges_are_no_more_than_their_share(reads_of: Reads, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Where all reads are slow, second requests would only double the load."""
    monkeypatch.setattr("shards.storage.ranges.FIRST_SECONDS", 0.0)
    monkeypatch.setattr("shards.storage.ranges.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("shards.storage.ranges.LEAST_SECONDS", 0.001)

    def slow(stop: threading.Event, first: int) -> bytes:
        stop.wait(0.01)
        return b""

    store = scripted(slow, second=slow)
    reads = reads_of(store, connections=4, hedge_share=share)
    wait([reads.read("x", first, first + 1) for first in range(100)], SECONDS)
    hedges = reads.traffic.counts().hedges
    assert (hedges > 0) == (share > 0)
    assert hedges <= math.ceil(1 + share * 100) if share else hedges == 0


def test_closing_ends_everything_soon(reads_of: Reads) -> None:
    begun, go = threading.Event(), threading.Event()

    def stuck(_: threading.Event, first: int) -> bytes:
        begun.set()
        go.wait(SECONDS)
        return b"late"

    reads = reads_of(scripted(stuck), connections=1)
    futures = [reads.read("x", first, first + 1) for first in range(3)]
    assert begun.wait(SECONDS)
    reads.close()
    assert own_threads(), "it does not wait for the read"
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(0)
    with pytest.raises(CancelledError, match="closed"):
        reads.read("x", 0, 1)
    go.set()
    reads.close()


@pytest.fixture
def proxy(any_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Before each S3 server in turn, with DATA as the object x."""
    S3Store(bucket=any_bucket).write("x", DATA)
    with faulty_proxy(os.environ["AWS_ENDPOINT_URL"]) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        yield running


@pytest.mark.parametrize(
    "fault", [pytest.param(Fault(kind="stall", after_bytes=300_000), marks=pytest.mark.long), Fault(kind="silence")]
)
def test_a_connection_that_stands_still_costs_little(
    any_bucket: str, proxy: FaultyProxy, reads_of: Reads, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """A new one takes its place within the time that reads are known to take; its own timeout never matters."""
    monkeypatch.setattr("shards.storage.s3_client.READ_TIMEOUT_SECONDS", 12)
    store = S3Store(bucket=any_bucket)
    reads = reads_of(store, connections=2)
    chosen = [(first, first + 600_000) for first in range(0, 400_000, 10_000)]
    wait([reads.read("x", first, end) for first, end in chosen], SECONDS)
    proxy.faults = [fault]
    before = reads.traffic.counts()
    futures = [reads.read("x", first, end) for first, end in chosen]
    assert [future.result(SECONDS) for future in futures] == [DATA[first:end] for first, end in chosen]
    assert proxy.num_standing == 1, "all bytes are there before its timeout"
    counts = reads.traffic.counts() - before
    assert counts.hedges >= counts.hedges_won >= 1
    assert (counts.requests, counts.retries, counts.broken_bodies) == (len(chosen), 0, 0)
    assert [request.closes for request in proxy.seen].count(True) == reads.traffic.counts().hedges
    wait_until(lambda: proxy.num_standing == 0)
    wait_until(lambda: reads.traffic.counts().wasted_bytes >= (PIECE_BYTES if fault.after_bytes else 0))
    assert reads.traffic.counts().retries == 0, "the slow half did not go on after its timeout"


def test_closing_does_not_wait_for_a_stalled_read(
    any_bucket: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shards.storage.s3_client.READ_TIMEOUT_SECONDS", 2 * SECONDS)
    proxy.faults = [Fault(kind="stall", after_bytes=100)]
    reads = ReadsOfOne(S3Store(bucket=any_bucket), connections=1, hedge_share=0.0)
    future: Future[bytes | memoryview] = reads.read("x", 0, 1000)
    assert proxy.stalling.wait(SECONDS)
    reads.close()
    assert own_threads(), "it still stands"
    with pytest.raises(CancelledError):
        future.result(0)


def test_the_interpreter_ends_while_a_read_is_stalled(any_bucket: str, proxy: FaultyProxy) -> None:
    proxy.rates = {"silence": 1.0}
    words = [sys.executable, "-c", STALLED_SCRIPT, f"s3://{any_bucket}"]
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    process = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE)
    assert proxy.stalling.wait(SECONDS)
    assert process.stdin
    process.stdin.close()
    assert process.wait(SECONDS) == 0


def test_the_interpreter_ends_while_a_generator_still_holds_the_reads(tmp_path: Path) -> None:
    """Its end closes the generator when daemon threads have been stopped for good, with the locks that they held."""
    (tmp_path / "x").write_bytes(DATA)
    words = [sys.executable, "-c", GLOBAL_SCRIPT, str(tmp_path)]
    for _ in range(20):
        done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(CHECKOUT)}, timeout=SECONDS, check=False)
        assert done.returncode == 0


@pytest.fixture
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of threads that cannot be started."""
    refused, start = set[str](), threading.Thread.start

    def start_some(thread: threading.Thread) -> None:
        if thread.name in refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    return refused


def test_workers_that_can_not_start_are_done_without(reads_of: Reads, no_more_threads: set[str]) -> None:
    begun, go = threading.Event(), threading.Event()

    def answer(_: threading.Event, first: int) -> bytes:
        begun.set()
        assert go.wait(SECONDS)
        return bytes([first])

    reads = reads_of(scripted(answer), connections=4)
    futures = [reads.read("x", 0, 1)]
    assert begun.wait(SECONDS)
    no_more_threads.add("read")
    futures += [reads.read("x", first, first + 1) for first in range(1, 6)]
    go.set()
    assert [future.result(SECONDS) for future in futures] == [bytes([first]) for first in range(6)]


def test_reads_fail_where_no_worker_can_start_and_go_on_later(reads_of: Reads, no_more_threads: set[str]) -> None:
    reads = reads_of(scripted(lambda _, first: bytes([first])))
    no_more_threads.add("read")
    with pytest.raises(StorageError, match="may start no more threads; raise its limit"):
        reads.read("x", 0, 1).result(SECONDS)
    no_more_threads.clear()
    assert reads.read("x", 1, 2).result(SECONDS) == bytes([1])


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_read_whose_hedge_can_not_start_is_read_all_the_same(
    reads_of: Reads, quick_hedges: None, no_more_threads: set[str], is_broken: bool
) -> None:
    go = threading.Event()

    def answer(_: threading.Event, first: int) -> bytes:
        assert go.wait(SECONDS)
        if is_broken:
            raise ConnectionError("reset")
        return bytes([first])

    no_more_threads.add("read-hedge")
    store = scripted(answer, second=answer)
    reads = reads_of(store)
    future = reads.read("x", 0, 1)
    threading.Timer(0.2, go.set).start()  # later than its hedge would begin
    if is_broken:
        with pytest.raises(ConnectionError, match="reset"):
            future.result(SECONDS)
    else:
        assert future.result(SECONDS) == bytes([0])
    assert reads.traffic.counts().hedges == 0


def test_a_read_without_a_hedge_ends_and_the_next_one_has_one_again(
    reads_of: Reads, quick_hedges: None, no_more_threads: set[str]
) -> None:
    def slow(stop: threading.Event, first: int) -> bytes:
        if first:
            assert stop.wait(SECONDS)
        return bytes([first])

    reads = reads_of(scripted(slow, second=lambda _, first: bytes([first])))
    no_more_threads.add("read-hedge")
    assert reads.read("x", 0, 1).result(SECONDS) == bytes([0])
    no_more_threads.clear()
    assert reads.read("x", 1, 2).result(SECONDS) == bytes([1])
    assert reads.traffic.counts().hedges_won == 1


def test_fewer_are_under_way_while_no_read_ends(reads_of: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a storm of 503s reads end after minutes; the answers are what counts."""
    monkeypatch.setattr("shards.storage.ranges.CUT_SECONDS", 0.0)
    lock, now, go = threading.Lock(), set[int](), threading.Event()

    def answer(_: threading.Event, first: int) -> bytes:
        with lock:
            now.add(first)
        if first < 8:
            for _number in range(20):
                reads.traffic.add(TrafficCounts(throttled=1))
        assert go.wait(SECONDS)
        return b""

    reads = reads_of(scripted(answer), connections=8)
    futures = [reads.read("x", first, first + 1) for first in range(40)]
    wait_until(lambda: reads._limit.value == 1)
    assert len(now) <= 8
    go.set()
    wait(futures, SECONDS)


def test_reads_can_be_used_in_the_child_of_a_fork(reads_of: Reads) -> None:
    go = threading.Event()
    reads = reads_of(scripted(lambda _, first: bytes([first]) if first or go.wait(SECONDS) else b""))
    under_way = reads.read("x", 0, 1)

    def read() -> None:
        assert reads.read("x", 1, 2).result(SECONDS) == bytes([1])
        reads.close()

    with reads._lock:
        assert ends_in_a_child(read)
    go.set()
    under_way.result(SECONDS)


def test_every_request_is_counted_once(reads_of: Reads, tmp_path: Path) -> None:
    """Those that somebody waits for, too."""
    store = LocalStore(str(tmp_path))
    store.write("x", DATA)
    reads = reads_of(store)
    reads.read("x", 0, 10).result(SECONDS)
    assert reads.store.read_range("x", 0, 20) == DATA[:20]
    assert reads.store.read("x") == DATA
    counts = reads.traffic.counts()
    assert (counts.requests, counts.bytes) == (3, 30 + len(DATA))


@pytest.mark.parametrize("kind", ["silence", "stall", "500"])
@pytest.mark.parametrize("how", ["read", "read_range"])
def test_whoever_waits_for_a_read_is_let_go_at_a_close(
    s3_bucket: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, kind: str, how: str
) -> None:
    """Whatever the read waits for: an answer, a body, or the pause before its next request."""
    monkeypatch.setattr("shards.storage.s3_client.READ_TIMEOUT_SECONDS", 2 * SECONDS)
    retries = RetryConfig(backoff_seconds=1000.0, most_backoff_seconds=1000.0, deadline_seconds=10_000.0)
    monkeypatch.setattr("shards.storage.s3.RETRIES", retries)
    S3Store(bucket=s3_bucket).write("x", bytes(1000))
    with faulty_proxy(s3_endpoint, rates={kind: 1.0}) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        reads = ReadsOfOne(S3Store(bucket=s3_bucket))
        timer = threading.Timer(0.5, reads.close)
        timer.start()
        began = time.monotonic()
        with pytest.raises(CancelledError):
            reads.store.read("x") if how == "read" else reads.store.read_range("x", 0, 1000)
        assert time.monotonic() - began < SECONDS
        timer.join()
        with pytest.raises(CancelledError):
            reads.store.read("x")
    wait_until(lambda: not own_threads())
    assert reads.traffic.counts().requests == 0, "what was stopped is no read"


def test_bytes_are_freed_with_what_refers_to_them(reads_of: Reads, quick_hedges: None) -> None:
    """Without waiting for the garbage collector, or for the moment when a hedge would have begun."""

    hedging = threading.Semaphore(0)

    def first_request(stop: threading.Event, first: int) -> bytes:
        if first % 4 == 1:  # the hedge wins
            assert stop.wait(SECONDS)
            raise ReadStoppedError(0)
        if first % 4 > 1:  # the hedge loses, or fails
            assert hedging.acquire(timeout=SECONDS)
        return bytes([first])

    def second_request(stop: threading.Event, first: int) -> bytes:
        if first % 4 > 1:
            hedging.release()
        if first % 4 == 2:
            assert stop.wait(SECONDS)
        if first % 4 == 3:
            raise ConnectionError("reset")
        return bytes([first])

    reads = reads_of(scripted(first_request, second=second_request), hedge_share=1.0)
    gc.disable()
    try:
        for first in range(8):
            future = reads.read("freed", first, first + 1)
            assert future.result(SECONDS) == bytes([first])
            known = [one for one in gc.get_objects() if isinstance(one, HedgedRequest)]
            requests = [weakref.ref(one) for one in known if one.path == "freed"]  # others: of earlier tests, in cycles
            del known
            del future
            wait_until(lambda: not any(one() for one in requests))  # noqa: B023
    finally:
        gc.enable()


def test_what_is_given_back_is_taken_again_at_any_size() -> None:
    memory = ReusedMemory()
    view = memory.take(5 * mmap.PAGESIZE)
    view[:3] = b"abc"
    mapping = view.obj
    view.release()
    memory.give_back(mapping)
    larger = memory.take(9 * mmap.PAGESIZE - 1)
    assert larger.obj is mapping
    assert len(larger) == 9 * mmap.PAGESIZE - 1
    assert bytes(larger[:3]) == b"abc", "its pages are the same"
    larger[-1] = 1
    assert memory.take(1).obj is not mapping


def test_the_latest_are_kept_until_it_is_closed() -> None:
    memory = ReusedMemory()
    given_back = freed(memory, MOST_FREE + 2)
    again = [memory.take(1).obj for _ in range(MOST_FREE + 1)]
    assert again[:-1] == given_back[:1:-1]
    assert again[-1] not in given_back
    freed(memory, 1)
    memory.close()
    (late,) = freed(memory, 1)
    assert memory.take(1).obj is not late
    assert not memory._free


def freed(memory: ReusedMemory, count: int) -> list[object]:
    """So many mappings, after they were taken and given back."""
    views = [memory.take(mmap.PAGESIZE) for _ in range(count)]
    mappings: list[object] = [view.obj for view in views]
    del views
    for mapping in mappings:
        memory.give_back(mapping)
    return mappings


def test_memory_that_is_still_referred_to_is_not_taken_again() -> None:
    memory = ReusedMemory()
    view = memory.take(mmap.PAGESIZE)
    view[0] = 7
    memory.give_back(view.obj)
    other = memory.take(mmap.PAGESIZE)
    assert other.obj is not view.obj
    other[0] = 8
    assert view[0] == 7


def test_what_is_not_its_memory_is_ignored_and_too_much_is_a_memory_error() -> None:
    memory = ReusedMemory()
    memory.give_back(None)
    memory.give_back(b"bytes")
    freed(memory, 2)
    with pytest.raises(MemoryError):
        memory.take(1 << 60)
    assert not memory._free, "they could have been what is missing"
    assert len(memory.take(1)) == 1


def test_threads_and_forked_children_never_get_memory_that_is_in_use() -> None:
    """Each writes its own byte to what it took, and finds it there when it gives it back."""
    memory, until, enough = ReusedMemory(), time.monotonic() + 60, 500  # a busy machine takes longer for as many
    children: list[int] = []

    def take_and_give_back(mark: int) -> int:
        draw, kept, count = random.Random(mark), deque[memoryview](maxlen=5), 0
        while count < enough and time.monotonic() < until:
            view = memory.take(draw.randrange(1, 20 * mmap.PAGESIZE))
            view[0] = view[-1] = mark
            if mark == 1 and len(children) < 5:
                children.append(os.fork())
                if not children[-1]:
                    memory.give_back(memory.take(1).obj)
                    os._exit(0)
            mapping, count = view.obj, count + 1
            if draw.random() < 0.5:
                view.release()
            else:
                kept.append(view)
            memory.give_back(mapping)  # half of them are in use: nobody may get them
            assert all(view[0] == view[-1] == mark for view in kept)
        return count

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(take_and_give_back, range(1, 5))) == [enough] * 4
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 5
