"""All that a stream reads: in counters of its own, and ended by one call."""

import threading
import time
from concurrent.futures import CancelledError
from contextlib import closing
from pathlib import Path

import pytest

from shards.config import ReadConfig
from shards.order import SampleOrder
from shards.reading.read import read_sample
from shards.reading.stream_reader import TRAFFIC_NAMES, StreamReader
from tests.rigs.datasets import packed_folders
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
