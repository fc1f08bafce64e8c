"""Every fault that an S3 server may show while an object is read: the bytes are right, and the fault is counted."""

import io
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shards.errors import StorageError
from shards.storage.objects import TrafficCounts
from shards.storage.ranges import ReusedMemory
from shards.storage.retries import RetryBudget, RetryConfig
from shards.storage.s3 import ObjectRead, S3Store
from shards.storage.s3_client import BadAnswerError, GivenClient
from tests.rigs.faulty_connection import Fault, FaultyProxy
from tests.rigs.faulty_proxy import faulty_proxy, faulty_proxy_process

DATA = random.Random(0).randbytes(3_000_000)
FIRST, END = 1_000, 2_900_000
QUICK = RetryConfig(backoff_seconds=0.001)


@pytest.fixture
def proxy(any_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Before each S3 server in turn, with DATA as the object x."""
    S3Store(bucket=any_bucket).write("x", DATA)
    with faulty_proxy(os.environ["AWS_ENDPOINT_URL"]) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        monkeypatch.setattr("shards.storage.s3_client.READ_TIMEOUT_SECONDS", 60)  # or a busy machine adds retries
        yield running


@pytest.fixture
def store(any_bucket: str, proxy: FaultyProxy) -> S3Store:
    """Behind the proxy."""
    return S3Store(bucket=any_bucket, budget=RetryBudget(QUICK))


def faults_of(store: S3Store) -> TrafficCounts:
    """What is counted besides the reads themselves."""
    return replace(store.traffic.counts(), requests=0, bytes=0, seconds=0.0)


@pytest.mark.parametrize(
    ("fault", "counts"),
    [
        pytest.param(Fault(kind="500"), TrafficCounts(retries=1), id="500"),
        pytest.param(Fault(kind="502"), TrafficCounts(retries=1), id="502, no text"),
        pytest.param(Fault(kind="503"), TrafficCounts(retries=1, throttled=1), id="503"),
        pytest.param(Fault(kind="429"), TrafficCounts(retries=1, throttled=1), id="429"),
        pytest.param(Fault(kind="silence"), TrafficCounts(retries=1), id="no answer"),
        pytest.param(Fault(kind="reset", after_bytes=0), TrafficCounts(retries=1, broken_bodies=1), id="reset at once"),
        pytest.param(
            Fault(kind="reset", after_bytes=700_001), TrafficCounts(retries=1, broken_bodies=1), id="reset in mid-body"
        ),
        pytest.param(
            Fault(kind="short", after_bytes=700_001), TrafficCounts(retries=1, broken_bodies=1), id="short body"
        ),
        pytest.param(
            Fault(kind="stall", after_bytes=700_001), TrafficCounts(retries=1, broken_bodies=1), id="stalled body"
        ),
        pytest.param(Fault(kind="range"), TrafficCounts(retries=1, broken_bodies=1), id="another range"),
        pytest.param(Fault(kind="etag"), TrafficCounts(), id="another ETag, but all of one answer"),
    ],
)
def test_a_range_is_read_whatever_happens_once(
    store: S3Store, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, fault: Fault, counts: TrafficCounts
) -> None:
    proxy.faults = [fault]
    if fault.kind in ("silence", "stall"):
        monkeypatch.setattr("shards.storage.s3_client.READ_TIMEOUT_SECONDS", 3)
    assert store.read_range("x", FIRST, END) == DATA[FIRST:END]
    assert faults_of(store) == counts
    assert [request.fault for request in proxy.seen] == [fault.kind, ""][: 1 + counts.retries]


def test_a_body_goes_on_where_it_broke_off_and_only_of_the_same_object(store: S3Store, proxy: FaultyProxy) -> None:
    proxy.faults = [Fault(kind="short", after_bytes=300_000), Fault(kind="503"), Fault(kind="short", after_bytes=1)]
    assert store.read_range("x", FIRST, END) == DATA[FIRST:END]
    asked = [request.range for request in proxy.seen]
    assert asked == [f"bytes={first}-{END - 1}" for first in (1_000, 301_000, 301_000, 301_001)]
    assert [bool(request.if_match) for request in proxy.seen] == [False, True, True, True]
    assert faults_of(store) == TrafficCounts(retries=3, broken_bodies=2, throttled=1)


def test_bytes_of_two_objects_are_never_mixed(store: S3Store, proxy: FaultyProxy) -> None:
    """An answer with another ETag although If-Match was asked: some servers ignore it."""
    faults: list[Fault | None] = [Fault(kind="short", after_bytes=300_000), Fault(kind="etag")]
    proxy.faults = list(faults)
    assert store.read_range("x", FIRST, END) == DATA[FIRST:END]
    assert [request.range for request in proxy.seen][2] == f"bytes={FIRST}-{END - 1}", "from the start"
    assert faults_of(store) == TrafficCounts(retries=2, broken_bodies=1)
    proxy.faults = list(faults)
    assert store.read_into("x", FIRST, END, ReusedMemory().take) == DATA[FIRST:END]
    assert faults_of(store) == TrafficCounts(retries=4, broken_bodies=2)
    proxy.faults = list(faults)
    with pytest.raises(StorageError, match="was replaced while it was read"):
        store.read("x")


def test_an_object_that_is_replaced_all_the_time_is_given_up(store: S3Store, proxy: FaultyProxy) -> None:
    proxy.faults = [Fault(kind="short", after_bytes=300_000), Fault(kind="etag")] * 20
    with pytest.raises(StorageError, match="was replaced while it was read"):
        store.read_range("x", FIRST, END)
    assert len(proxy.seen) == 8


@pytest.mark.parametrize(
    ("kind", "what"), [("short", "the body broke off"), ("range", r"another range was answered \(bytes 1001-.*\)")]
)
def test_bodies_that_bring_nothing_are_given_up(store: S3Store, proxy: FaultyProxy, kind: str, what: str) -> None:
    proxy.faults = [Fault(kind=kind, after_bytes=0)] * 20
    with pytest.raises(StorageError, match=rf"{what} 6 times, last in s3://.*/x at byte {FIRST}"):
        store.read_range("x", FIRST, END)
    assert len(proxy.seen) == 6


def test_a_storage_that_never_answered_well_is_given_up_soon(store: S3Store, proxy: FaultyProxy) -> None:
    proxy.rates = {"503": 1.0}
    with pytest.raises(StorageError, match=r"GetObject of s3://.*/x failed: SlowDown"):
        store.read_range("x", FIRST, END)
    assert len(proxy.seen) == 6
    assert faults_of(store) == TrafficCounts(retries=5, throttled=6)


def test_a_spent_budget_is_said(any_bucket: str, proxy: FaultyProxy) -> None:
    config = RetryConfig(backoff_seconds=0.001, budget_reserve=8.0, budget_share=0.0)
    store = S3Store(bucket=any_bucket, budget=RetryBudget(config))
    assert store.read_range("x", 0, 10) == DATA[:10]
    proxy.rates = {"503": 1.0}
    with pytest.raises(
        StorageError, match=r"reading s3://.*/x failed 9 times in .* 503 SlowDown; .*8 retries .* spent"
    ):
        store.read_range("x", FIRST, END)
    with pytest.raises(StorageError, match="spent"):
        store.fresh().read_range("x", FIRST, END)
    assert len(proxy.seen) == 1 + 9 + 1


def test_a_passed_deadline_is_said(any_bucket: str, proxy: FaultyProxy) -> None:
    config = RetryConfig(backoff_seconds=0.05, most_backoff_seconds=0.05, deadline_seconds=0.2)
    store = S3Store(bucket=any_bucket, budget=RetryBudget(config))
    assert store.read_range("x", 0, 10) == DATA[:10]
    proxy.rates = {"500": 1.0}
    with pytest.raises(StorageError, match=r"failed \d+ times .* 500 InternalError; the deadline is 0 s; try again"):
        store.read_range("x", FIRST, END)


def test_a_fresh_connection_is_new_and_used_once(store: S3Store, proxy: FaultyProxy) -> None:
    for read in (store.fresh().read_range, store.read_range, store.fresh().read_range):
        assert read("x", FIRST, END) == DATA[FIRST:END]
    assert [request.closes for request in proxy.seen] == [True, False, True]


@pytest.mark.rgw
def test_a_connection_to_ceph_is_used_again(
    ceph_bucket: str, ceph_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless its body broke off: what is left of it would be taken for the next answer."""
    store = S3Store(bucket=ceph_bucket, budget=RetryBudget(QUICK))
    store.write("x", DATA)
    with faulty_proxy(ceph_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = S3Store(bucket=ceph_bucket, budget=RetryBudget(QUICK))
        for first in range(10):
            assert store.read_range("x", first, END) == DATA[first:END]
        assert proxy.num_connections == 1
        proxy.faults = [Fault(kind="503"), None, Fault(kind="range")]
        for first in range(10):
            assert store.read_range("x", first, END) == DATA[first:END]
        assert proxy.num_connections == 2
        for first in range(3):
            assert store.fresh().read_range("x", first, END) == DATA[first:END]
        assert proxy.num_connections == 5


def test_many_faults_in_a_row_of_reads(any_bucket: str, proxy: FaultyProxy) -> None:
    """What the benchmark does, with ten times its faults, from the proxy's own process."""
    store, seen = S3Store(bucket=any_bucket, budget=RetryBudget(QUICK)), 60
    rates = {"503": 0.1, "reset": 0.1, "short": 0.01, "500": 0.05, "range": 0.05}
    with pytest.MonkeyPatch.context() as patch, faulty_proxy_process(proxy.upstream, rates=rates, seed=3) as process:
        patch.setenv("AWS_ENDPOINT_URL", process.endpoint)
        for number in range(seen):
            first, end = number * 40_000, number * 40_000 + 600_000
            assert store.read_range("x", first, end) == DATA[first:end]
    counts = store.traffic.counts()
    assert sum(process.counts.values()) == seen + counts.retries
    assert counts.throttled == process.counts["503"] > 0
    assert counts.broken_bodies == sum(process.counts.get(kind, 0) for kind in ("reset", "short", "range")) > 0


Answers = Callable[[dict[str, str]], dict[str, Any]]


def read_of(answers: Answers, first: int, end: int | None) -> ObjectRead:
    """Of a storage that gives these answers."""
    client = GivenClient(SimpleNamespace(get_object=lambda **request: answers(request)))
    store = S3Store(bucket="b", clients=client, budget=RetryBudget(RetryConfig(backoff_seconds=0.0)))
    return ObjectRead(store, "x", first, end)


def answer(request: dict[str, str], *, most: int = 1 << 20, **headers: object) -> dict[str, Any]:
    """With bytes of DATA, fewer than it says where it has more than `most`."""
    first, last = (int(number) for number in request["Range"].removeprefix("bytes=").split("-"))
    body = io.BytesIO(DATA[first : min(last + 1, first + most)])
    return {"Body": body, "ContentLength": last + 1 - first, "ContentRange": f"bytes {first}-{last}/*"} | headers


def test_a_storage_that_does_not_say_how_long_an_object_is() -> None:
    assert read_of(answer, 10, 20).data() == DATA[10:20]
    with pytest.raises(EOFError, match=r"bytes 10..19 asked, the object has 15"):
        read_of(lambda request: answer(request, ContentRange="bytes 10-14/*"), 10, 20).data()
    with pytest.raises(BadAnswerError, match="does not say how long"):
        read_of(lambda _: {"Body": io.BytesIO(b"")}, 0, None).data()


@pytest.mark.parametrize("etag", ['W/"a"', "", '"a"'])
def test_only_a_strong_etag_is_asked_for(etag: str) -> None:
    """A weak one matches nothing in an If-Match; some storages have none at all."""
    asked: list[str | None] = []

    def answered(request: dict[str, str]) -> dict[str, Any]:
        asked.append(request.get("IfMatch"))
        return answer(request, most=100_000, LastModified=1, **({"ETag": etag} if etag else {}))

    assert read_of(answered, 0, 1_000_000).data() == DATA[:1_000_000], "small bodies, and each brings something"
    assert asked == [None, *(['"a"'] if etag == '"a"' else [None]) * 9]
