"""All that a stream reads: in counters of its own, and ended by one call."""

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, ProcessPoolExecutor
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path

import pytest

from shards.config import ReadConfig
from shards.dataset import open_dataset
from shards.errors import PrintableError
from shards.order import SampleOrder
from shards.reading.read import read_sample
from shards.reading.stream_reader import TRAFFIC_NAMES, StreamReader
from shards.store import open_store
from tests.rigs.datasets import packed_folders
from tests.rigs.faulty_connection import KINDS
from tests.rigs.faulty_proxy import faulty_proxy
from tests.rigs.watched import watched
from tests.shards.storage.test_fork_lock import ends_in_a_child

SECONDS = 60.0


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_folders(tmp_path_factory.mktemp("stream_reader"))


def test_a_stream_counts_all_that_it_reads(packed: Path) -> None:
    dataset, store = watched(packed)
    order = SampleOrder(dataset.block_sizes, seed=1, lanes=1, window_blocks=1)
    store.read_files.clear()
    with closing(StreamReader(ReadConfig())) as stream, closing(StreamReader(ReadConfig())) as idle:
        reader = stream.samples(dataset, order)
        reader.read(order.positions(0, 4, 0, 1))
        read_sample(reader.dataset, 14)
        deadline = time.monotonic() + SECONDS
        while stream.counts()["requests"] < len(store.seen) + len(store.read_files):
            assert time.monotonic() < deadline
            threading.Event().wait(0.005)
        assert tuple(stream.counts()) == TRAFFIC_NAMES
        assert stream.held_bytes == reader.held_bytes
        assert set(idle.counts().values()) == {0}
    assert stream.held_bytes == 0


def test_one_call_ends_all(packed: Path) -> None:
    """Reads, loaders and the stream's own threads, though each of them is stuck."""
    dataset, store = watched(packed)
    order = SampleOrder(dataset.block_sizes, seed=1, lanes=1, window_blocks=1)
    gate, both_begun = threading.Event(), threading.Barrier(3)

    def plan() -> None:
        both_begun.wait(SECONDS)
        reader.read(order.positions(0, 4, 0, 1))

    def decode() -> None:
        both_begun.wait(SECONDS)
        assert gate.wait(SECONDS)

    store.file_gate.clear()
    stream = StreamReader(ReadConfig())
    reader = stream.samples(dataset, order)
    planner, decoders = stream.pool(1, name="plan"), stream.pool(1, name="decode")
    waiting = [planner.submit(plan), decoders.submit(decode)]
    both_begun.wait(SECONDS)
    assert not stream.is_closed
    stream.close()
    assert "decode" in [thread.name for thread in threading.enumerate()], "it does not wait for one that is stuck"
    assert stream.is_closed
    for future in waiting:
        assert isinstance(future.exception(0), CancelledError)
    with pytest.raises(CancelledError):
        read_sample(reader.dataset, 3)
    gate.set()
    store.file_gate.set()
    stream.close()


def test_a_forked_child_leaves_the_parents_stream_alone(packed: Path) -> None:
    dataset, store = watched(packed)
    order = SampleOrder(dataset.block_sizes, seed=1, lanes=1, window_blocks=1)
    with closing(StreamReader(ReadConfig())) as stream:
        reader = stream.samples(dataset, order)
        reader.read(order.positions(0, 4, 0, 1))
        assert ends_in_a_child(stream.close)
        assert len(reader.read(order.positions(1, 4, 0, 1)).samples) == 4
    assert store.seen


BATCH, GOOD_STEPS = 4, 4
EXPIRED = "expired"  # beside the proxy's kinds of faults: all requests are refused until the credentials are renewed
KEYS = "[default]\naws_access_key_id = %s\naws_secret_access_key = secret\n"
COUNTED = ("requests", "retries", "broken_bodies", "hedges")


def read_through(kind: str, bucket: str, packed: Path, keys: Path, seconds: float) -> dict[str, float]:
    """Reads a dataset on S3, in a process of its own: a few steps, as many as it can while every GET gets this fault
    for so long, and a few more. Returns what it took; AssertionError if the bytes are not those in `packed`. `keys`:
    the file of the credentials."""
    os.environ["AWS_SHARED_CREDENTIALS_FILE"] = str(keys)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ.pop(name, None)
    keys.write_text(KEYS % "FIRST")
    with ExitStack() as stack:
        proxy = stack.enter_context(faulty_proxy(os.environ["AWS_ENDPOINT_URL"]))
        os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
        stream, right = (stack.enter_context(closing(StreamReader(ReadConfig()))) for _ in range(2))
        dataset, truth = open_dataset(f"s3://{bucket}"), open_dataset(str(packed))
        order = SampleOrder(dataset.block_sizes, seed=1, lanes=2, window_blocks=1)
        readers = [stream.samples(dataset, order), right.samples(truth, order)]
        longest = 0.0

        def read(step: int) -> None:
            nonlocal longest
            began = time.monotonic()
            found, expected = (
                [bytes(sample.data or b"") for sample in reader.read(order.positions(step, BATCH, 0, 1)).samples]
                for reader in readers
            )
            assert found == expected, f"step {step} has other bytes"
            longest = max(longest, time.monotonic() - began)

        def mend() -> None:
            proxy.rates = {}
            keys.write_text(KEYS % "SECOND")

        steps = count()
        for _ in range(GOOD_STEPS):
            read(next(steps))
        proxy.rates = {} if kind == EXPIRED else {kind: 1.0}
        proxy.expired_keys = frozenset({"FIRST"} if kind == EXPIRED else ())
        timer = threading.Timer(seconds, mend)
        timer.start()
        while timer.is_alive():
            read(next(steps))
            timer.join(0.02)  # some faults cost no time
        for _ in range(GOOD_STEPS):
            read(next(steps))
        faults = proxy.counts()
        counts = {name: value for name, value in stream.counts().items() if name in COUNTED}
        num_faults = proxy.num_expired + faults.total() - faults[""]
        return {"steps": next(steps), "faults": num_faults, "longest_seconds": round(longest, 1)} | counts


def survived(
    kinds: Sequence[str], bucket: str, packed: Path, folder: Path, *, seconds: float
) -> dict[str, dict[str, float] | str]:
    """What each of these faults took, all of them at the same time; the error of one that was not survived."""
    store = open_store(f"s3://{bucket}")
    for path in filter(Path.is_file, packed.rglob("*")):
        store.write(str(path.relative_to(packed)), path.read_bytes())
    found: dict[str, dict[str, float] | str] = {}
    with ProcessPoolExecutor(len(kinds), mp_context=multiprocessing.get_context("spawn")) as pool:
        reads = [pool.submit(read_through, kind, bucket, packed, folder / kind, seconds) for kind in kinds]
        for kind, read in zip(kinds, reads, strict=True):
            try:
                found[kind] = read.result(seconds + 4 * SECONDS)
            except (PrintableError, AssertionError) as error:
                found[kind] = f"{type(error).__name__}: {error}"
    return found


def test_some_seconds_of_broken_bodies_are_survived(packed: Path, s3_bucket: str, tmp_path: Path) -> None:
    """Without spending a process's budget of 200 retries on them."""
    what = survived(["short"], s3_bucket, packed, tmp_path, seconds=4.0)["short"]
    assert isinstance(what, dict), what
    assert 10 < what["broken_bodies"] < 100, what


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_minute_of_any_fault_is_survived(packed: Path, s3_bucket: str, tmp_path: Path) -> None:
    """Of each that the proxy knows, on every GET, and of credentials that have expired. The bytes stay right."""
    found = survived([*KINDS, EXPIRED], s3_bucket, packed, tmp_path, seconds=60.0)
    for kind, what in found.items():
        sys.stdout.write(f"{kind}: {what}\n")
    assert {kind: what for kind, what in found.items() if isinstance(what, str)} == {}
    assert all(what["faults"] > 0 for what in found.values() if isinstance(what, dict)), found
