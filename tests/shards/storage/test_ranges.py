"""Reads in the background: order, hedges, throttling, and an end that nothing can hold up."""

import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from shards.errors import StorageError, UserError
from shards.storage.local import LocalStore
from shards.storage.objects import MissingObjectError
from shards.storage.range_read import ReadConfig
from shards.storage.ranges import RangeReads
from shards.storage.retries import ReadStoppedError
from shards.storage.s3 import S3Store
from shards.storage.s3_read import PIECE_BYTES
from shards.storage.traffic import TrafficCounts
from shards.store import open_store
from tests.rigs.faulty_connection import Fault, FaultyProxy
from tests.rigs.faulty_proxy import faulty_proxy
from tests.shards.storage.test_fork_lock import ends_in_a_child

CHECKOUT = Path(__file__).resolve().parents[3]
SECONDS = 30.0  # until a test that waits in vain has failed
DATA = random.Random(1).randbytes(1_000_000)

Answer = Callable[[threading.Event, int], bytes]


@dataclass(frozen=True)
class Scripted(LocalStore):
    """Reads give what `answer` gives for the event that stops them and their first byte; `second` is the answer over
    fresh connections."""

    answer: Answer = lambda _, first: bytes([first])
    second: Answer | None = None

    def fresh(self) -> "Scripted":
        return replace(self, answer=self.second) if self.second else self

    def read_range_until(self, stop: threading.Event, path: str, first: int, end: int) -> bytes:  # noqa: ARG002
        data = self.answer(stop, first)
        self.traffic.add(TrafficCounts(requests=1, bytes=len(data)))
        return data


def scripted(answer: Answer, second: Answer | None = None) -> Scripted:
    return Scripted("", answer=answer, second=second)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    wait_until(lambda: not own_threads())


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("read")]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline, pause = time.monotonic() + SECONDS, threading.Event()
    while not is_so():
        assert time.monotonic() < deadline, "waited in vain"
        pause.wait(0.005)


@pytest.fixture
def quick_hedges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read is slow after 50 ms."""
    monkeypatch.setattr("shards.storage.latency.FIRST_SECONDS", 0.05)
    monkeypatch.setattr("shards.storage.latency.LEAST_SECONDS", 0.05)


@pytest.fixture
def reads_of() -> Iterator[Callable[..., RangeReads]]:
    """Makes reads that are closed after the test."""
    made: list[RangeReads] = []

    def make(store: LocalStore | S3Store, connections: int = 2, hedge_share: float = 0.05) -> RangeReads:
        made.append(RangeReads(store, ReadConfig(connections=connections, hedge_share=hedge_share)))
        return made[-1]

    yield make
    for reads in made:
        reads.close()


Reads = Callable[..., RangeReads]


@pytest.mark.parametrize("values", [{"connections": 0}, {"hedge_share": -0.1}, {"hedge_share": 1.1}])
def test_impossible_values_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"is .*; allowed (is 1 or more|are 0 \(none\) to 1)$"):
        ReadConfig(**values)  # type: ignore[arg-type]


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
    futures = [reads.submit("x", first, end) for first, end in chosen]
    for (first, end), future in zip(chosen, futures, strict=True):
        assert future.result(SECONDS) == DATA[first:end]
    counts = store.traffic.counts() - before
    assert (counts.requests, counts.bytes, counts.retries) == (len(chosen), 30_000 * len(chosen), 0)
    assert counts.seconds > 0
    with pytest.raises(EOFError):
        reads.submit("x", 0, 1_000_001).result(SECONDS)
    with pytest.raises(MissingObjectError, match="no/such"):
        reads.submit("no/such", 0, 4).result(SECONDS)


def test_reads_begin_in_order_and_urgent_ones_first(reads_of: Reads) -> None:
    begun: list[int] = []
    go = threading.Event()

    def answer(_: threading.Event, first: int) -> bytes:
        begun.append(first)
        go.wait(SECONDS)
        return b""

    reads = reads_of(scripted(answer), connections=1)
    futures = [reads.submit("x", 0, 1)]
    wait_until(lambda: begun == [0])
    futures += [reads.submit("x", first, first + 1, urgent=first > 3) for first in range(1, 7)]
    assert futures[2].cancel(), "it has not begun"
    go.set()
    wait(futures, SECONDS)
    assert begun == [0, 4, 5, 6, 1, 3]


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
    futures = [reads.submit("x", first, first + 1) for first in range(60)]
    assert [future.result(SECONDS) for future in futures] == [bytes([first]) for first in range(60)]
    assert most == 3


def test_fewer_are_under_way_once_the_storage_says_so(reads_of: Reads) -> None:
    lock, now, under_way = threading.Lock(), 0, list[int]()
    store = LocalStore("")

    def answer(_: threading.Event, first: int) -> bytes:
        nonlocal now
        with lock:
            now += 1
            under_way.append(now)
        if first < 3:
            store.traffic.add(TrafficCounts(throttled=1))
        threading.Event().wait(0.01)  # what a read takes
        with lock:
            now -= 1
        return b""

    reads = reads_of(Scripted("", store.traffic, answer=answer), connections=8)
    wait([reads.submit("x", first, first + 1) for first in range(200)], SECONDS)
    assert max(under_way[8:20]) < 8
    assert max(under_way[-60:]) == 8, "and it grows again"


def test_a_slow_read_is_asked_for_twice_and_the_first_answer_counts(reads_of: Reads, quick_hedges: None) -> None:
    stopped = threading.Event()

    def slow(stop: threading.Event, first: int) -> bytes:
        if first != 3:
            return bytes([first])
        assert stop.wait(SECONDS)
        stopped.set()
        raise ReadStoppedError(1234)

    store = scripted(slow, second=lambda _, first: bytes([first]))
    reads = reads_of(store)
    futures = [reads.submit("x", first, first + 1) for first in range(8)]
    assert [future.result(SECONDS) for future in futures] == [bytes([first]) for first in range(8)]
    assert stopped.wait(SECONDS), "the slow half is stopped"
    wait_until(lambda: store.traffic.counts().wasted_bytes == 1234)
    counts = store.traffic.counts()
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
    assert reads_of(store).submit("x", 0, 5).result(SECONDS) == b"first"
    wait_until(lambda: store.traffic.counts().wasted_bytes == 6)
    assert store.traffic.counts() == TrafficCounts(requests=1, bytes=5, hedges=1, wasted_bytes=6)


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

    future = reads_of(scripted(first_half, second=second_half)).submit("x", 0, 4)
    if broken == "both":
        with pytest.raises(ConnectionError, match="the first half"):
            future.result(SECONDS)
    else:
        assert future.result(SECONDS) == b"data"


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5])
def test_hedges_are_no_more_than_their_share(reads_of: Reads, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Where all reads are slow, second requests would only double the load."""
    monkeypatch.setattr("shards.storage.latency.FIRST_SECONDS", 0.0)
    monkeypatch.setattr("shards.storage.latency.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("shards.storage.ranges.LEAST_SECONDS", 0.001)

    def slow(stop: threading.Event, first: int) -> bytes:
        stop.wait(0.01)
        return b""

    store = scripted(slow, second=slow)
    reads = reads_of(store, connections=4, hedge_share=share)
    wait([reads.submit("x", first, first + 1) for first in range(100)], SECONDS)
    hedges = store.traffic.counts().hedges
    assert (hedges > 0) == (share > 0)
    assert hedges <= math.ceil(1 + share * 100) if share else hedges == 0


def test_closing_ends_everything_soon(reads_of: Reads) -> None:
    begun, go = threading.Event(), threading.Event()

    def stuck(_: threading.Event, first: int) -> bytes:
        begun.set()
        go.wait(SECONDS)
        return b"late"

    reads = reads_of(scripted(stuck), connections=1)
    futures = [reads.submit("x", first, first + 1) for first in range(3)]
    assert begun.wait(SECONDS)
    began = time.monotonic()
    reads.close()
    assert time.monotonic() - began < 5
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(0)
    with pytest.raises(RuntimeError, match="closed"):
        reads.submit("x", 0, 1)
    go.set()
    reads.close()


@pytest.fixture
def proxy(any_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Before each S3 server in turn, with DATA as the object x."""
    S3Store(bucket=any_bucket).write("x", DATA)
    with faulty_proxy(os.environ["AWS_ENDPOINT_URL"]) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        yield running


@pytest.mark.parametrize("fault", [Fault(kind="stall", after_bytes=300_000), Fault(kind="silence")])
def test_a_connection_that_stands_still_costs_little(
    any_bucket: str, proxy: FaultyProxy, reads_of: Reads, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """A new one takes its place within the time that reads are known to take; its own timeout never matters."""
    monkeypatch.setattr("shards.storage.s3_client.READ_TIMEOUT_SECONDS", 6)
    store = S3Store(bucket=any_bucket)
    reads = reads_of(store, connections=2)
    chosen = [(first, first + 600_000) for first in range(0, 400_000, 10_000)]
    wait([reads.submit("x", first, end) for first, end in chosen], SECONDS)
    proxy.faults = [fault]
    before, began = store.traffic.counts(), time.monotonic()
    futures = [reads.submit("x", first, end) for first, end in chosen]
    assert [future.result(SECONDS) for future in futures] == [DATA[first:end] for first, end in chosen]
    assert time.monotonic() - began < 5
    counts = store.traffic.counts() - before
    assert counts.hedges >= counts.hedges_won >= 1
    assert (counts.requests, counts.retries, counts.broken_bodies) == (len(chosen), 0, 0)
    assert [request.closes for request in proxy.seen].count(True) == store.traffic.counts().hedges
    wait_until(lambda: proxy.num_standing == 0)
    wait_until(lambda: store.traffic.counts().wasted_bytes >= (PIECE_BYTES if fault.after_bytes else 0))
    assert store.traffic.counts().retries == 0, "the slow half did not go on after its timeout"


def test_closing_does_not_wait_for_a_stalled_read(
    any_bucket: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shards.storage.s3_client.READ_TIMEOUT_SECONDS", 5)
    proxy.faults = [Fault(kind="stall", after_bytes=100)]
    reads = RangeReads(S3Store(bucket=any_bucket), ReadConfig(connections=1, hedge_share=0.0))
    future: Future[bytes] = reads.submit("x", 0, 1000)
    assert proxy.stalling.wait(SECONDS)
    began = time.monotonic()
    reads.close()
    assert time.monotonic() - began < 4
    with pytest.raises(CancelledError):
        future.result(0)


STALLED_SCRIPT = """
import sys
from shards.storage.ranges import RangeReads, ReadConfig
from shards.store import open_store
RangeReads(open_store(sys.argv[1]), ReadConfig()).submit("x", 0, 1000)
sys.stdin.read()
"""


def test_the_interpreter_ends_while_a_read_is_stalled(any_bucket: str, proxy: FaultyProxy) -> None:
    proxy.rates = {"silence": 1.0}
    words = [sys.executable, "-c", STALLED_SCRIPT, f"s3://{any_bucket}"]
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    process = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE)
    assert proxy.stalling.wait(SECONDS)
    assert process.stdin
    process.stdin.close()
    assert process.wait(10) == 0


GLOBAL_SCRIPT = """
import sys
from shards.storage.ranges import RangeReads, ReadConfig
from shards.store import open_store


def pieces(url):
    reads = RangeReads(open_store(url), ReadConfig(connections=8))
    try:
        futures = [reads.submit("x", 0, 100_000) for _ in range(2000)]
        for future in futures:
            yield future.result()
    finally:
        reads.close()


held = pieces(sys.argv[1])
next(held)
"""


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
    futures = [reads.submit("x", 0, 1)]
    assert begun.wait(SECONDS)
    no_more_threads.add("read")
    futures += [reads.submit("x", first, first + 1) for first in range(1, 6)]
    go.set()
    assert [future.result(SECONDS) for future in futures] == [bytes([first]) for first in range(6)]


def test_reads_fail_where_no_worker_can_start_and_go_on_later(reads_of: Reads, no_more_threads: set[str]) -> None:
    reads = reads_of(scripted(lambda _, first: bytes([first])))
    no_more_threads.add("read")
    with pytest.raises(StorageError, match="may start no more threads; raise its limit"):
        reads.submit("x", 0, 1).result(SECONDS)
    no_more_threads.clear()
    assert reads.submit("x", 1, 2).result(SECONDS) == bytes([1])


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
    future = reads.submit("x", 0, 1)
    wait_until(lambda: reads._num_hedges == 0 and math.isinf(next(iter(reads._under_way)).hedge_at))
    go.set()
    if is_broken:
        with pytest.raises(ConnectionError, match="reset"):
            future.result(SECONDS)
    else:
        assert future.result(SECONDS) == bytes([0])
    assert store.traffic.counts().hedges == 0


def test_without_its_watch_a_read_ends_and_the_next_one_has_it_again(
    reads_of: Reads, quick_hedges: None, no_more_threads: set[str]
) -> None:
    store = scripted(lambda _, first: bytes([first]), second=lambda _, first: bytes([first]))
    reads = reads_of(store)
    no_more_threads.add("read-watch")
    assert reads.submit("x", 0, 1).result(SECONDS) == bytes([0])
    no_more_threads.clear()
    assert reads.submit("x", 1, 2).result(SECONDS) == bytes([1])
    assert "read-watch" in own_threads()


def test_fewer_are_under_way_while_no_read_ends(reads_of: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a storm of 503s reads end after minutes; the answers are what counts."""
    monkeypatch.setattr("shards.storage.ranges.CUT_SECONDS", 0.0)
    lock, now, go = threading.Lock(), set[int](), threading.Event()
    store = LocalStore("")

    def answer(_: threading.Event, first: int) -> bytes:
        with lock:
            now.add(first)
        if first < 8:
            for _number in range(20):
                store.traffic.add(TrafficCounts(throttled=1))
        assert go.wait(SECONDS)
        return b""

    reads = reads_of(Scripted("", store.traffic, answer=answer), connections=8)
    futures = [reads.submit("x", first, first + 1) for first in range(40)]
    wait_until(lambda: reads._limit == 1.0)
    assert len(now) <= 8
    go.set()
    wait(futures, SECONDS)


def test_reads_can_be_used_in_the_child_of_a_fork(reads_of: Reads) -> None:
    go = threading.Event()
    reads = reads_of(scripted(lambda _, first: bytes([first]) if first or go.wait(SECONDS) else b""))
    under_way = reads.submit("x", 0, 1)

    def read() -> None:
        assert reads.submit("x", 1, 2).result(SECONDS) == bytes([1])
        reads.close()

    with reads._lock:
        assert ends_in_a_child(read)
    go.set()
    under_way.result(SECONDS)


def test_every_request_is_counted_once(reads_of: Reads, tmp_path: Path) -> None:
    """Those that go past RangeReads, too."""
    store = LocalStore(str(tmp_path))
    store.write("x", DATA)
    reads = reads_of(store)
    reads.submit("x", 0, 10).result(SECONDS)
    store.read_range("x", 0, 20)
    store.read("x")
    counts = store.traffic.counts()
    assert (counts.requests, counts.bytes) == (3, 30 + len(DATA))
