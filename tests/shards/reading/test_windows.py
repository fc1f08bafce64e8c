"""Windows: what they hold, that it is counted and given back, and how much it is at most."""

import time
from concurrent.futures import CancelledError, Future
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal.isal_zlib import crc32

from shards.config import ReadConfig
from shards.dataset import Dataset, open_dataset
from shards.order import SampleOrder, WindowId
from shards.reading.windows import PLACED, HeldBytes, Window, lanes_of_rank, largest_blocks_bytes, window_bound_bytes
from shards.sample_rows import BlockTable
from shards.storage.local import LocalStore
from shards.storage.ranges import LEAST_BYTES, RangeReads, StreamStore
from tests.rigs.datasets import packed_folders
from tests.rigs.watched import watched

FIRST = WindowId(epoch=0, lane=0, window=0)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """15 samples: shards of 4 (the last of 3), blocks of 3 and 1."""
    return packed_folders(tmp_path_factory.mktemp("windows"))


def table(sizes: list[int], *, samples: int = 4) -> BlockTable:
    """Blocks of so many bytes, in one shard."""
    ends = np.cumsum(np.array(sizes, dtype=np.int64))
    return BlockTable(
        shard=np.zeros(len(sizes), dtype=np.int32),
        first_byte=ends - np.array(sizes),
        end_byte=ends,
        first_sample_id=samples * np.arange(len(sizes)),
        num_samples=np.full(len(sizes), samples),
    )


def loaded(dataset: Dataset, order: SampleOrder, reads: RangeReads, *, first: int, held: HeldBytes) -> Window:
    window = Window(name=FIRST, size=order.window_size(FIRST), first=first, held=HeldBytes(held))
    window.load(dataset, order, reads.of(dataset.shard_store))
    return window


class ClosedAfterOne(StreamStore):
    """Reads that are closed once the first has brought its bytes."""

    def submit(
        self, path: str, first: int, end: int, *, urgent: bool = False, reused: bool = False
    ) -> Future[bytes | memoryview]:
        read = super().submit(path, first, end, urgent=urgent, reused=reused)
        read.result(60)
        self._reads.close()
        return read


def order_of(dataset: Dataset) -> SampleOrder:
    return SampleOrder(dataset.block_sizes, seed=3, lanes=1, window_blocks=3)


def test_a_window_has_the_orders_samples_and_is_freed_block_by_block(packed: Path) -> None:
    dataset, held = open_dataset(str(packed)), HeldBytes()
    order = order_of(dataset)
    reads = RangeReads(ReadConfig())
    window = loaded(dataset, order, reads, first=0, held=held)
    contents = window.contents.result()
    ids = contents.rows.view(PLACED)["sample_id"].ravel().tolist()
    assert ids == order.window_samples(FIRST).tolist()
    assert order.window_size(FIRST) == len(ids)
    for one in contents.slices:
        assert one.fetched is not None
        one.fetched.body.result(60)
    reads.close()  # its threads hold nothing any more
    assert held.now == sum(len(one.wait().body.data) for one in contents.slices)
    for place in range(len(ids)):
        assert window.arrived(place)
        before = held.now
        one = contents.slices[contents.rows[place, 0]]
        assert one.fetched is not None
        size = len(one.wait().body.data)
        is_last = one.num_left == 1
        window.hand_over(np.array([place]))
        assert before - held.now == (size if is_last else 0)
    assert held.now == 0


def test_a_start_in_the_midst_reads_only_what_is_left(packed: Path) -> None:
    dataset, store = watched(packed)
    order = order_of(dataset)
    reads, held = RangeReads(ReadConfig()), HeldBytes()
    last = order.window_samples(FIRST).size - 1
    window = loaded(dataset, order, reads, first=last, held=held)
    contents = window.contents.result()
    one = contents.slices[contents.rows[last, 0]]
    assert one.fetched is not None
    data = one.wait().body.data
    (row,) = contents.rows[last].view(PLACED)
    assert crc32(data[row["begin"] : row["begin"] + row["size"]]) == row["crc32"]
    reads.close()
    begin = int(one.rows.offset[0])
    assert store.seen == [(one.path, begin, begin + len(data))]
    window.hand_over(np.array([last]))
    del data, one, contents
    assert held.now == 0


def test_a_window_that_is_dropped_gives_back_what_is_under_way(packed: Path) -> None:
    dataset, store = watched(packed, most_free_bytes=0)
    reads, held = RangeReads(ReadConfig(connections=1)), HeldBytes()
    window = loaded(dataset, order_of(dataset), reads, first=0, held=held)
    under_way = held.now
    assert under_way > 0
    window.drop()
    assert held.now < under_way  # all but the one that is being read
    store.gate.set()
    reads.close()
    assert held.now == 0
    early = Window(name=FIRST, size=3, first=0, held=HeldBytes(held), dropped=True)
    early.load(dataset, order_of(dataset), reads.of(dataset.shard_store))  # dropped before it was loaded
    assert held.now == 0


def test_a_window_whose_reads_are_closed_while_it_loads_holds_nothing(packed: Path) -> None:
    """The error that it keeps for whoever waits must not keep the first block's bytes."""
    dataset, held = open_dataset(str(packed)), HeldBytes()
    reads = RangeReads(ReadConfig())
    window = Window(name=FIRST, size=3, first=0, held=HeldBytes(held))
    window.load(dataset, order_of(dataset), ClosedAfterOne(dataset.shard_store, reads))
    assert held.most > 0
    assert isinstance(window.contents.exception(0), CancelledError)
    assert held.now == 0


def test_held_bytes_add_up_in_their_whole() -> None:
    whole = HeldBytes()
    parts = [HeldBytes(whole), HeldBytes(whole)]
    parts[0].add(5)
    parts[1].add(3)
    parts[0].add(-4)
    assert (parts[0].now, parts[0].most, parts[1].now, whole.now, whole.most) == (1, 5, 3, 4, 8)


def test_the_memory_of_a_large_block_is_used_again_once_nothing_refers_to_it(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 3 * LEAST_BYTES, dtype=np.uint8).tobytes()
    (tmp_path / "x").write_bytes(data)
    reads, held = RangeReads(ReadConfig()), HeldBytes()
    tars = reads.of(LocalStore(str(tmp_path)))
    first = held.fetch(tars, "x", 0, 2 * LEAST_BYTES)
    body = first.wait()
    address, sample = body.address, body.data[9:20]
    del first, body
    other = held.fetch(tars, "x", 1, 3 * LEAST_BYTES).wait()
    assert other.address != address
    assert sample == data[9:20]
    assert held.now == 5 * LEAST_BYTES - 1
    addresses = {address, other.address}
    del sample, other
    deadline = time.monotonic() + 60
    while held.now:  # the thread that read may be slow to drop it
        assert time.monotonic() < deadline
        time.sleep(0.005)
    found = held.fetch(tars, "x", 5, 2 * LEAST_BYTES + 5).wait()
    assert found.data == data[5 : 2 * LEAST_BYTES + 5]
    assert found.address in addresses
    reads.close()


@given(lanes=st.integers(1, 12), members=st.integers(1, 6), data=st.data())
def test_a_rank_reads_no_more_lanes_than_said(lanes: int, members: int, data: st.DataObject) -> None:
    batch = lanes * members
    ranks = data.draw(st.sampled_from([ranks for ranks in range(1, batch + 1) if batch % ranks == 0]))
    order = SampleOrder(np.full(30, 4), seed=0, lanes=lanes, window_blocks=2)
    read = [np.unique(order.positions(3, batch, rank, ranks) % lanes).size for rank in range(ranks)]
    assert max(read) <= lanes_of_rank(lanes, batch_size=batch, num_ranks=ranks)
    if lanes % ranks == 0:
        assert lanes_of_rank(lanes, batch_size=batch, num_ranks=ranks) == lanes // ranks


@pytest.mark.parametrize(
    ("count", "epochs", "expected"),
    [
        pytest.param(2, 1, 9 + 7, id="the two largest"),
        pytest.param(3, 2, 9 + 9 + 7, id="each in two epochs"),
        pytest.param(99, 1, 9 + 7 + 2 + 1, id="there are no more"),
        pytest.param(99, 2, 38, id="there are no more, in two epochs"),
    ],
)
def test_the_largest_blocks(count: int, epochs: int, expected: int) -> None:
    assert largest_blocks_bytes(table([2, 9, 1, 7]), count, epochs=epochs) == expected


@pytest.mark.parametrize(
    ("ranks", "batch", "in_use", "blocks_a_lane", "lanes"),
    [
        pytest.param(1, 64, 4, 8, 64, id="a sample a lane: two windows"),
        pytest.param(8, 64, 4, 8, 8, id="a rank has its own lanes"),
        pytest.param(64, 4096, 3, 8 + 3 + 1, 1, id="64 samples of a lane, four batches: three blocks and another cut"),
        pytest.param(8, 4096, 3, 8 + 3 + 1, 8, id="so in every lane"),
    ],
)
def test_the_bound_of_common_settings(ranks: int, batch: int, in_use: int, blocks_a_lane: int, lanes: int) -> None:
    blocks = table([1000] * 100_000, samples=64)
    order = SampleOrder(blocks.num_samples, seed=0, lanes=64, window_blocks=4)
    bound = window_bound_bytes(blocks, order, batch_size=batch, num_ranks=ranks, batches_in_use=in_use)
    of_windows = 1000 * lanes * (blocks_a_lane + 1)  # a block that is cut at the end of a lane
    assert bound == of_windows + of_windows // 8
