"""What only S3 has: bodies that break off, uploads of many parts, and what killed ones leave behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from shards.errors import InvalidDataError, StorageError
from shards.storage.objects import MissingObjectError, Traffic, TrafficCounts
from shards.storage.retries import ReadStoppedError, RetryConfig
from shards.storage.s3 import S3Store
from shards.storage.s3_client import BadAnswerError
from shards.store import Store, open_store
from tests.rigs.cutting_proxy import CuttingProxy, cutting_proxy
from tests.rigs.faulty_proxy import faulty_proxy

CHECKOUT = Path(__file__).resolve().parents[3]
MIB = 1 << 20


@pytest.fixture
def proxy(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[CuttingProxy]:
    with cutting_proxy(s3_endpoint) as running:
        monkeypatch.setattr("shards.storage.s3.RETRIES", RetryConfig(backoff_seconds=0.001))
        yield running


@pytest.fixture
def behind_proxy(s3_bucket: str, proxy: CuttingProxy, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store whose reads go through the proxy, with one object of 1000 bytes."""
    open_store(f"s3://{s3_bucket}").write("x", bytes(range(250)) * 4)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    open_store.cache_clear()
    return open_store(f"s3://{s3_bucket}")


def test_an_object_is_read_up_to_its_bound(s3_bucket: str) -> None:
    store = open_store(f"s3://{s3_bucket}")
    store.write("ten", b"0123456789")
    assert store.read("ten", most_bytes=10) == b"0123456789"
    with pytest.raises(InvalidDataError, match="ten is larger than 9 bytes, the most that"):
        store.read("ten", most_bytes=9)


@pytest.mark.parametrize(
    ("cuts", "ranges"),
    [
        ([], ["bytes=100-899"]),
        ([300], ["bytes=100-899", "bytes=400-899"]),
        ([0, 1, 798], ["bytes=100-899", "bytes=100-899", "bytes=101-899", "bytes=899-899"]),
    ],
)
def test_a_broken_body_goes_on_from_its_last_good_byte(
    behind_proxy: Store, proxy: CuttingProxy, cuts: list[int], ranges: list[str]
) -> None:
    proxy.cuts = list(cuts)
    assert behind_proxy.read_range("x", 100, 900) == (bytes(range(250)) * 4)[100:900]
    assert proxy.ranges == ranges


def test_a_broken_whole_read_goes_on_too(behind_proxy: Store, proxy: CuttingProxy) -> None:
    proxy.cuts = [10]
    assert behind_proxy.read("x") == bytes(range(250)) * 4
    assert proxy.ranges == ["", "bytes=10-999"]


@pytest.mark.parametrize(
    ("cuts", "deadline_seconds", "message"),
    [
        # Whatever the first request takes: on a busy machine, that alone may be a second.
        pytest.param([], 300.0, r"broke off 6 times, last in .* at byte 0", id="by number"),
        pytest.param([1], 1.0, r"at byte 1; the deadline is 1 s", id="by the deadline"),
    ],
)
def test_requests_are_bounded(
    behind_proxy: Store,
    proxy: CuttingProxy,
    monkeypatch: pytest.MonkeyPatch,
    cuts: list[int],
    deadline_seconds: float,
    message: str,
) -> None:
    """By their number until a first byte has come, then by the deadline."""
    config = RetryConfig(backoff_seconds=0.01, deadline_seconds=deadline_seconds)
    monkeypatch.setattr("shards.storage.s3.RETRIES", config)
    open_store.cache_clear()
    proxy.cuts = [*cuts, *[0] * 50]
    with pytest.raises(StorageError, match=message):
        open_store(behind_proxy.url).read("x")


def test_bodies_that_bring_next_to_nothing_spend_the_budget(
    behind_proxy: Store, proxy: CuttingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte is progress, but a request a byte is a storm."""
    monkeypatch.setattr("shards.storage.s3.RETRIES", RetryConfig(most_backoff_seconds=0.001, budget_reserve=20.0))
    open_store.cache_clear()
    store = open_store(behind_proxy.url)
    proxy.cuts = [1] * 100
    with pytest.raises(StorageError, match=r"broke off at byte 2\d; .*20 retries .* are spent"):
        store.read("x")


def test_a_stream_goes_on_from_its_last_good_byte(behind_proxy: Store, proxy: CuttingProxy) -> None:
    proxy.cuts = [0, 10, 400]
    with behind_proxy.open_read("x") as file:
        assert b"".join(iter(lambda: file.read(7), b"")) == bytes(range(250)) * 4
    assert proxy.ranges == ["", "bytes=0-999", "bytes=10-999", "bytes=410-999"]


def test_a_long_stream_may_break_often_and_not_in_vain(
    s3_bucket: str, proxy: CuttingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts are counted anew wherever a body brought something: hours of reading see many faults."""
    data = os.urandom(5 * MIB)
    open_store(f"s3://{s3_bucket}").write("x", data)
    monkeypatch.setattr("shards.storage.s3.RETRIES", RetryConfig(most_backoff_seconds=0.01))
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    open_store.cache_clear()
    proxy.cuts = [300_000, 0, 0, 0] * 10
    with open_store(f"s3://{s3_bucket}").open_read("x") as file:
        assert file.read() == data
    assert not proxy.cuts


def test_one_client_a_process_and_shared_by_children(s3_bucket: str) -> None:
    store = open_store(f"s3://{s3_bucket}/a")
    child = store.with_traffic(Traffic())
    assert isinstance(store, S3Store)
    assert isinstance(child, S3Store)
    assert store.clients.get() is child.clients.get()
    assert store.url == f"s3://{s3_bucket}/a"


def test_a_replaced_object_is_not_mixed(
    behind_proxy: Store, proxy: CuttingProxy, s3_bucket: str, s3_endpoint: str
) -> None:
    client = boto3.session.Session().client("s3", endpoint_url=s3_endpoint)

    class ReplaceAtFirstCut(list[int]):
        def pop(self, index: int = -1, /) -> int:  # type: ignore[override]
            client.put_object(Bucket=s3_bucket, Key="x", Body=b"y" * 1000)
            return super().pop(index)

    proxy.cuts = ReplaceAtFirstCut([10])
    with pytest.raises(StorageError, match="replaced"):
        behind_proxy.read("x")


UPLOAD_SCRIPT = """
import sys
from shards.store import open_store
with open_store(sys.argv[1]).create("big.tar") as file:
    file.truncate(int(sys.argv[2]))
"""


def unfinished(client: Any, bucket: str) -> list[str]:
    """The keys of the multipart uploads that nobody has ended."""
    return sorted(item["Key"] for item in client.list_multipart_uploads(Bucket=bucket).get("Uploads", ()))


def test_a_killed_upload_is_never_visible_and_is_discarded(any_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = boto3.session.Session().client("s3")
    with cutting_proxy(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        proxy.parts = 2
        words = [sys.executable, "-c", UPLOAD_SCRIPT, f"s3://{any_bucket}/a/b", str(100 * MIB)]  # 4 parts
        environment = os.environ | {"AWS_ENDPOINT_URL": proxy.endpoint, "PYTHONPATH": str(CHECKOUT)}
        process = subprocess.Popen(words, env=environment)
        assert proxy.holding.wait(60)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    store = open_store(f"s3://{any_bucket}/a/b")
    assert not store.exists("big.tar")
    assert list(store.list()) == []
    assert unfinished(client, any_bucket) == ["a/b/big.tar"]
    client.create_multipart_upload(Bucket=any_bucket, Key="a/b/c/d")
    for key in ("a/bc/x", "a/b", "a/x", "x", "b/a/b/x"):
        client.create_multipart_upload(Bucket=any_bucket, Key=key)
    store.write("kept", b"1")
    store.discard_unfinished()
    store.discard_unfinished()
    assert unfinished(client, any_bucket) == ["a/b", "a/bc/x", "a/x", "b/a/b/x", "x"]
    assert list(store.list()) == ["kept"]
    open_store(f"s3://{any_bucket}").discard_unfinished()
    assert unfinished(client, any_bucket) == []


def test_a_root_that_may_not_be_cleaned_is_logged(s3_bucket: str, caplog: pytest.LogCaptureFixture) -> None:
    open_store("s3://no-such-bucket/x").discard_unfinished()
    assert "unfinished uploads below s3://no-such-bucket/x are left as they are" in caplog.text


@pytest.mark.rgw
def test_ceph_refuses_an_upload_that_is_changed_on_the_way(
    ceph_bucket: str, ceph_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every body is signed with its SHA-256, a checksum that stores have verified for as long as they know SigV4."""
    client = boto3.session.Session().client("s3")
    with cutting_proxy(ceph_endpoint) as proxy:
        proxy.flips = True
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        open_store.cache_clear()
        store = open_store(f"s3://{ceph_bucket}/a")
        with pytest.raises(BadAnswerError, match="XAmzContentSHA256Mismatch"):
            store.write("x", b"0123456789")
        with pytest.raises(BadAnswerError, match="XAmzContentSHA256Mismatch"), store.create("big") as file:
            file.write(bytes(70 * MIB))
    assert client.list_objects_v2(Bucket=ceph_bucket).get("Contents", []) == []
    assert unfinished(client, ceph_bucket) == []


def test_every_way_to_read_is_counted_in_counters_of_ones_own(any_bucket: str) -> None:
    shared, own = S3Store(bucket=any_bucket), Traffic()
    store = shared.with_traffic(own)
    assert store == shared
    assert store.clients is shared.clients
    store.write("a/x", b"0123456789")
    store.read("a/x")
    store.fresh().read_range("a/x", 2, 5)
    store.read_range("a/x", 2, 5, stop=threading.Event())
    with store.open_read("a/x") as file:
        file.read()
    with pytest.raises(MissingObjectError):
        store.read_range("y", 0, 1)
    counts = own.counts()
    assert (counts.requests, counts.bytes) == (5, 10 + 3 + 3 + 10)
    assert counts.seconds > 0
    assert shared.traffic.counts() == TrafficCounts()


@pytest.mark.parametrize("kind", ["silence", "stall", "500"])
@pytest.mark.parametrize("how", ["read", "read_range"])
def test_reads_can_be_stopped(
    s3_bucket: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, kind: str, how: str
) -> None:
    """Whatever they wait for: an answer or a body, up to its timeout, or the pause before the next request."""
    monkeypatch.setattr("shards.storage.s3_client.READ_TIMEOUT_SECONDS", 1)
    retries = RetryConfig(backoff_seconds=1000.0, most_backoff_seconds=1000.0, deadline_seconds=10_000.0)
    monkeypatch.setattr("shards.storage.s3.RETRIES", retries)
    S3Store(bucket=s3_bucket).write("x", bytes(1000))
    stop = threading.Event()
    with faulty_proxy(s3_endpoint, rates={kind: 1.0}) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = S3Store(bucket=s3_bucket)
        store.clients.get()  # takes a while to make
        timer = threading.Timer(0.5, stop.set)
        timer.start()
        began = time.monotonic()
        with pytest.raises(ReadStoppedError):
            store.read("x", stop=stop) if how == "read" else store.read_range("x", 0, 1000, stop=stop)
        assert time.monotonic() - began < 30
        timer.join()
        with pytest.raises(ReadStoppedError):
            store.fresh().read("a/x", stop=stop)
    assert store.traffic.counts().requests == 0, "what was stopped is no read"
