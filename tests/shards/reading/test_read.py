"""A stream reads the samples of its order in bounded memory; its reads are counted, and one call ends them."""

import multiprocessing
import os
import random
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.config import ReadConfig
from shards.dataset import Dataset, open_dataset
from shards.errors import PrintableError, StorageError, UserError
from shards.manifest import index_path
from shards.order import BlockSlice, Mixture, SampleOrder, WindowId
from shards.reading.read import FIRST_READS, TRAFFIC_NAMES, RawBatch, SampleReader, StreamReader
from shards.reading.samples import locate_row, read_sample, read_slice, refetched, verified
from shards.reading.windows import Window, window_bound_bytes
from shards.store import open_store
from tests.rigs.datasets import packed_folders
from tests.rigs.faulty_connection import KINDS
from tests.rigs.faulty_proxy import faulty_proxy
from tests.rigs.watched import watched
from tests.shards.storage.test_fork_lock import ends_in_a_child

NUM_SAMPLES = 30
SECONDS = 60.0
BATCH, GOOD_STEPS = 4, 4
EXPIRED = "expired"  # beside the proxy's kinds of faults: all requests are refused until the credentials are renewed
KEYS = "[default]\naws_access_key_id = %s\naws_secret_access_key = secret\n"
COUNTED = ("requests", "retries", "broken_bodies", "hedges")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 samples: shards of 4 (the last of 2), blocks of 3 and 1."""
    return packed_folders(tmp_path_factory.mktemp("read"), num_classes=3, images_a_class=10)


@pytest.fixture(scope="module")
def truth(packed: Path) -> list[bytes]:
    """Every image in order of sample id."""
    dataset = open_dataset(str(packed))
    slices = [BlockSlice(first_sample_id=4 * shard, num_samples=4 if shard < 7 else 2) for shard in range(8)]
    return [bytes(sample.data or b"") for piece in slices for sample in read_slice(dataset, piece)]


def order_of(dataset: Dataset, *, lanes: int = 2, window_blocks: int = 2) -> SampleOrder:
    return SampleOrder(dataset.block_sizes, seed=11, lanes=lanes, window_blocks=window_blocks)


@contextmanager
def reader_of(dataset: Dataset, order: SampleOrder, *, connections: int = 4) -> Iterator[SampleReader]:
    with closing(StreamReader(ReadConfig(connections=connections))) as stream:
        yield stream.samples(dataset, order)


def read_steps(
    dataset: Dataset, order: SampleOrder, steps: range, *, batch: int, rank: int = 0, ranks: int = 1
) -> list[RawBatch]:
    """A rank's batches, step by step."""
    with reader_of(dataset, order) as reader:
        return [reader.read(order.positions(step, batch, rank, ranks)) for step in steps]


def read_on(reader: SampleReader, order: SampleOrder, steps: range) -> None:
    for step in steps:
        reader.read(order.positions(step, 4, 0, 1))


@pytest.mark.parametrize(
    ("ranks", "lanes"),
    [
        pytest.param(1, 4, id="one rank has all lanes"),
        pytest.param(2, 4, id="two ranks of two lanes each"),
        pytest.param(3, 4, id="three ranks share a lane"),
        pytest.param(3, 12, id="one sample a lane and step"),
    ],
)
def test_every_rank_reads_the_orders_samples(packed: Path, truth: list[bytes], ranks: int, lanes: int) -> None:
    dataset = open_dataset(str(packed))
    order = order_of(dataset, lanes=lanes)
    steps = range(12)  # more than four epochs, and more than the first reads
    of_ranks = [read_steps(dataset, order, steps, batch=12, rank=rank, ranks=ranks) for rank in range(ranks)]
    for step in steps:
        of_step = [batches[step] for batches in of_ranks]
        samples = [sample for batch in of_step for sample in batch.samples]
        assert [sample.sample_id for sample in samples] == order.batch(step, 12).tolist()
        assert [sample.data for sample in samples] == [truth[sample.sample_id] for sample in samples]
        assert all(verified(dataset, sample) is sample for sample in samples)
        epochs = np.concatenate([batch.epochs for batch in of_step])
        np.testing.assert_array_equal(epochs, order.positions(step, 12, 0, 1) // NUM_SAMPLES)


def test_a_bucket_gives_the_same_as_a_folder(packed: Path, s3_bucket: str) -> None:
    store = open_store(f"s3://{s3_bucket}/data")
    for path in packed.rglob("*"):
        if path.is_file():
            store.write(str(path.relative_to(packed)), path.read_bytes())
    local, remote = open_dataset(str(packed)), open_dataset(store.url)
    order = order_of(local)
    for here, there in zip(*(read_steps(d, order, range(12), batch=8, ranks=2) for d in (local, remote)), strict=True):
        assert here.samples == there.samples


@pytest.mark.parametrize("first_step", [0, 3, 1000])
def test_first_batches_do_not_wait_for_their_windows(packed: Path, truth: list[bytes], first_step: int) -> None:
    dataset, store = watched(packed, most_free_bytes=max(len(image) for image in truth))
    order = order_of(dataset, lanes=2, window_blocks=1)
    with reader_of(dataset, order, connections=40) as reader:
        try:
            early = [reader.read(order.positions(first_step + i, 2, 0, 1)) for i in range(2)]
            assert not store.gate.is_set()  # no block of more than one sample can have arrived
        finally:
            store.gate.set()
        later = [reader.read(order.positions(first_step + i, 2, 0, 1)) for i in range(2, 40)]
    for step, batch in enumerate([*early, *later]):
        assert [sample.sample_id for sample in batch.samples] == order.batch(first_step + step, 2).tolist()
        assert [sample.data for sample in batch.samples] == [truth[sample.sample_id] for sample in batch.samples]


def test_a_first_batch_reads_its_samples_before_all_else(packed: Path, truth: list[bytes]) -> None:
    dataset, store = watched(packed)
    order = order_of(dataset)
    with reader_of(dataset, order, connections=1) as reader:
        batch = reader.read(order.positions(0, 8, 0, 1))
        first = store.seen[:8]
    assert sorted(end - begin for _, begin, end in first) == sorted(len(truth[s.sample_id]) for s in batch.samples)


def test_every_block_is_read_once_an_epoch(packed: Path) -> None:
    dataset, store = watched(packed)
    order = order_of(dataset, lanes=2, window_blocks=1)
    num_steps = 2 * NUM_SAMPLES // 2
    with reader_of(dataset, order) as reader:
        for step in range(num_steps):
            reader.read(order.positions(step, 2, 0, 1))
    cut_blocks = order.lanes - 1  # a block on the border of two lanes is read in parts
    ahead = 3 * order.lanes  # begun for the third epoch
    most = 2 * (dataset.block_sizes.size + cut_blocks) + ahead + 2 * FIRST_READS
    assert len(store.seen) <= most
    assert max(store.seen.count(entry) for entry in store.seen) <= 3 + 1  # a block of one sample, at the start, too


def test_the_index_of_a_shard_is_read_once(packed: Path) -> None:
    dataset, store = watched(packed)
    order = order_of(dataset)
    with reader_of(dataset, order) as reader:
        reader.read(order.positions(0, 30, 0, 1))
        for step in range(1, 10):
            reader.read(order.positions(step, 30, 0, 1))
    indices = [path for path in store.read_files if path.startswith("index/")]
    assert sorted(set(indices)) == sorted(indices)
    assert len(indices) == len(dataset.manifest.shards)


def test_bytes_are_freed_as_they_are_consumed(packed: Path) -> None:
    dataset = open_dataset(str(packed))
    order = order_of(dataset, lanes=1, window_blocks=4)
    with reader_of(dataset, order) as reader:
        for step in range(NUM_SAMPLES):
            batch = reader.read(order.positions(step, 1, 0, 1))
        held = reader.held_bytes
        assert held > 0
        views = [sample.data for sample in batch.samples]
        assert isinstance(views[0], memoryview)
        assert views[0].readonly
    assert reader.held_bytes >= len(views[0])  # in the batch, which is still here
    del batch, views
    assert reader.held_bytes == 0


@settings(max_examples=40)
@given(data=st.data())
def test_memory_never_exceeds_the_bound(packed: Path, data: st.DataObject) -> None:
    dataset = open_dataset(str(packed))
    lanes = data.draw(st.sampled_from([1, 2, 3, 5]))
    ranks = data.draw(st.sampled_from([1, 2, 3]))
    batch = lanes * ranks * data.draw(st.integers(1, 3))
    in_use = data.draw(st.integers(1, 4))
    rank = data.draw(st.integers(0, ranks - 1))
    first = data.draw(st.integers(0, 40))
    order = order_of(dataset, lanes=lanes, window_blocks=data.draw(st.integers(1, 4)))
    bound = window_bound_bytes(dataset.blocks, order, batch_size=batch, num_ranks=ranks, batches_in_use=in_use)
    kept: deque[RawBatch] = deque(maxlen=in_use)
    with reader_of(dataset, order) as reader:
        for step in range(first, first + 3 + 2 * NUM_SAMPLES // batch):
            kept.append(reader.read(order.positions(step, batch, rank, ranks)))
            assert reader._held.most <= bound
    kept.clear()
    assert reader.held_bytes == 0


def test_the_share_of_single_reads_is_kept(packed: Path, truth: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where samples cannot be read singly any more, they wait for their blocks."""
    monkeypatch.setattr("shards.reading.read.SINGLE_READS_SHARE", 1 << 40)
    dataset, store = watched(packed)
    order = order_of(dataset)
    with reader_of(dataset, order) as reader:
        batch = reader.read(order.positions(0, 8, 0, 1))
    assert [sample.data for sample in batch.samples] == [truth[sample.sample_id] for sample in batch.samples]
    assert len(store.seen) <= 2 * 2 * order.lanes  # blocks alone


def broken_copy(packed: Path, folder: Path, *, shard: int, keep: int) -> Dataset:
    """The dataset with a shard's tar cut off, or without it."""
    shutil.copytree(packed, folder)
    dataset = open_dataset(str(folder))
    tar = folder / dataset.shard_path(shard)
    body = tar.read_bytes()
    tar.unlink()
    if keep:
        tar.write_bytes(body[:keep])
    return dataset


@pytest.mark.parametrize("keep", [pytest.param(0, id="missing"), pytest.param(700, id="cut off")])
def test_samples_of_a_broken_tar_are_faults_and_the_others_are_unchanged(
    packed: Path, truth: list[bytes], tmp_path: Path, keep: int
) -> None:
    dataset = broken_copy(packed, tmp_path / "broken", shard=1, keep=keep)
    order = order_of(dataset)
    steps = range(3 * FIRST_READS)  # read singly and by blocks
    samples = [sample for batch in read_steps(dataset, order, steps, batch=4) for sample in batch.samples]
    assert [sample.sample_id for sample in samples] == [i for step in steps for i in order.batch(step, 4).tolist()]
    for sample in samples:
        is_broken = locate_row(dataset, sample.sample_id)[0] == 1
        assert sample.data == (None if is_broken else truth[sample.sample_id])
        assert bool(sample.fault) == is_broken
        if is_broken:
            assert f"{dataset.url}/shards/shard-000001.tar" in sample.fault
            assert sample.source.startswith("c")


def test_a_damaged_sample_is_named_by_the_check(packed: Path, truth: list[bytes], tmp_path: Path) -> None:
    broken_id, folder = 17, tmp_path / "broken"
    shutil.copytree(packed, folder)
    dataset = open_dataset(str(folder))
    shard, row = locate_row(dataset, broken_id)
    tar = folder / dataset.shard_path(shard)
    data = bytearray(tar.read_bytes())
    data[int(dataset.sample_rows(shard).offset[row]) + 9] ^= 1
    tar.write_bytes(bytes(data))
    for batch in read_steps(dataset, order_of(dataset), range(20), batch=4):
        for sample in (verified(dataset, sample) for sample in batch.samples):
            assert sample.data == (None if sample.sample_id == broken_id else truth[sample.sample_id])
            assert sample.fault.startswith("crc32 is ") == (sample.sample_id == broken_id)


def test_a_sample_that_is_too_large_is_not_handed_on(
    packed: Path, truth: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shards.reading.read.SINGLE_READS_SHARE", 1)  # all of the first batch is read singly
    dataset, store = watched(packed)
    most = sorted(len(image) for image in truth)[-4]  # three are larger
    order = order_of(dataset)
    with closing(StreamReader(ReadConfig(connections=1))) as stream:
        reader = stream.samples(dataset, order, most_sample_bytes=most)
        first = reader.read(order.positions(0, 30, 0, 1)).samples
        assert max(end - begin for _, begin, end in store.seen[: len(first) - 3]) == most
        later = [s for step in range(1, 10) for s in reader.read(order.positions(step, 30, 0, 1)).samples]
    for sample in [*first, *later]:
        is_large = len(truth[sample.sample_id]) > most
        assert (sample.data is None) == is_large
        assert sample.fault.startswith("too large: ") == is_large


def test_a_store_that_does_not_answer_ends_the_reading(packed: Path) -> None:
    dataset, store = watched(packed)
    order = order_of(dataset)
    with reader_of(dataset, order) as reader:
        reader.read(order.positions(0, 4, 0, 1))
        store.broken.append(StorageError("no answer"))
        with pytest.raises(StorageError, match="no answer"):
            read_on(reader, order, range(1, 40))


@pytest.mark.parametrize("when", ["at the start", "ahead"])
def test_a_damaged_index_ends_the_reading(packed: Path, tmp_path: Path, when: str) -> None:
    folder = tmp_path / "data"
    shutil.copytree(packed, folder)
    dataset = open_dataset(str(folder))
    order = order_of(dataset)
    with reader_of(dataset, order) as reader:
        if when == "ahead":
            reader.read(order.positions(0, 4, 0, 1))
        for shard in range(len(dataset.manifest.shards)):
            (folder / index_path(shard)).write_bytes(b"")
        dataset._held.sample_rows._values.clear()
        with pytest.raises(UserError, match="patchline verify"):
            read_on(reader, order, range(1, 60))


def test_a_reader_can_be_closed_in_the_midst_of_it(packed: Path) -> None:
    dataset, store = watched(packed, most_free_bytes=0)
    order = order_of(dataset)
    store.gate.set()
    with reader_of(dataset, order, connections=1) as reader:
        batch = reader.read(order.positions(0, 4, 0, 1))
    del batch
    assert reader.held_bytes == 0


def test_windows_are_dropped_while_a_thread_begins_another(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner may still be computing an order when its stream has been closed."""
    dataset = open_dataset(str(packed))
    order = order_of(dataset)
    drop, numbers = Window.drop, count()

    def begin_another(window: Window) -> None:
        number = next(numbers)
        for lane in list(reader._lanes.values()):
            lane.windows[WindowId(epoch=99, lane=0, window=number)] = window
        reader._lanes[100 + number] = lane
        drop(window)

    with reader_of(dataset, order) as reader:
        batch = reader.read(order.positions(0, 4, 0, 1))
        del batch
        monkeypatch.setattr(Window, "drop", begin_another)
    assert next(numbers) > 0
    assert reader.held_bytes == 0


def test_samples_of_one_shard_do_not_wait_for_the_index_of_another(packed: Path) -> None:
    dataset, store = watched(packed)
    order = order_of(dataset)
    dataset.sample_rows(0)  # is there; the others' are not
    store.file_gate.clear()
    with reader_of(dataset, order, connections=40) as reader, ThreadPoolExecutor(1) as pool:
        batch = pool.submit(reader.read, order.positions(0, 30, 0, 1))
        try:
            wait_until(lambda: len(store.seen) == 4)
            assert {path for path, _, _ in store.seen} == {dataset.shard_path(0)}
            assert not batch.done()
        finally:
            store.file_gate.set()
        assert len(batch.result(60).samples) == 30


def test_a_reader_is_left_at_once_while_an_index_stands_still(packed: Path) -> None:
    dataset, store = watched(packed)
    order = order_of(dataset)
    store.read_files.clear()
    store.file_gate.clear()
    stream = StreamReader(ReadConfig(connections=1))
    reader = stream.samples(dataset, order)
    with ThreadPoolExecutor(2) as pool:
        batch = pool.submit(reader.read, order.positions(0, 30, 0, 1))
        wait_until(lambda: len(store.read_files) == 2)  # all that may be under way beside one connection
        began = time.monotonic()
        closing_it = pool.submit(stream.close)
        assert isinstance(batch.exception(60), CancelledError)
        assert time.monotonic() - began < 30, "half of what the index stands still for"
        store.file_gate.set()
        closing_it.result(60)
    assert reader.held_bytes == 0
    assert len(store.read_files) == 2


def wait_until(condition: Callable[[], bool]) -> None:
    """Nothing tells when a watched store was asked."""
    pause, deadline = threading.Event(), time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.005)


def test_a_window_that_no_thread_can_load_says_so(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason reaches the batch; nobody has closed anything."""
    dataset = open_dataset(str(packed))
    order = order_of(dataset)
    start = threading.Thread.start

    def start_some(thread: threading.Thread) -> None:
        if thread.name == "rows":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr("shards.reading.read.FIRST_READS", 0)  # all samples wait for their window
    monkeypatch.setattr(threading.Thread, "start", start_some)
    with reader_of(dataset, order) as reader, pytest.raises(StorageError, match="no thread for 'rows'"):
        reader.read(order.positions(0, 4, 0, 1))


def test_refetching_gives_the_same_sample(packed: Path) -> None:
    dataset = open_dataset(str(packed))
    for sample in read_steps(dataset, order_of(dataset), range(1), batch=8)[0].samples:
        assert refetched(dataset, sample).data == sample.data


def test_two_datasets_are_read_mixed(packed: Path, truth: list[bytes], tmp_path: Path) -> None:
    """Each by its own reader and order; a batch may take no sample at all of a lane."""
    other = packed_folders(tmp_path, num_classes=2, images_a_class=4)
    datasets = [open_dataset(str(url)) for url in (packed, other)]
    orders = [order_of(dataset) for dataset in datasets]
    mixture = Mixture((3, 1), seed=5, lanes=2)
    with reader_of(datasets[0], orders[0]) as first, reader_of(datasets[1], orders[1]) as second:
        counts = np.zeros(2, dtype=np.int64)
        for step in range(40):
            of, own = mixture.split(orders[0].positions(step, 4, 0, 1))
            for number, reader in enumerate((first, second)):
                chosen = own[of == number]
                samples = reader.read(chosen).samples
                assert [sample.sample_id for sample in samples] == orders[number].at(chosen).tolist()
                counts[number] += len(samples)
                if number == 0:
                    assert [sample.data for sample in samples] == [truth[sample.sample_id] for sample in samples]
    assert counts.tolist() == [120, 40]


def test_random_shares_of_memory_are_given_back(packed: Path) -> None:
    """Batches dropped in any order, by nobody's clock: nothing is held in the end."""
    dataset = open_dataset(str(packed))
    order, draw = order_of(dataset, lanes=3), random.Random(4)
    kept: list[RawBatch] = []
    with reader_of(dataset, order) as reader:
        for step in range(60):
            kept.append(reader.read(order.positions(step, 3, 0, 1)))
            if draw.random() < 0.6:
                kept.pop(draw.randrange(len(kept)))
    kept.clear()
    assert reader.held_bytes == 0


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_folders(tmp_path_factory.mktemp("stream_reader"))


def test_a_stream_counts_all_that_it_reads(streamed: Path) -> None:
    dataset, store = watched(streamed)
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


def test_one_call_ends_all(streamed: Path) -> None:
    """Reads, loaders and the stream's own threads, though each of them is stuck."""
    dataset, store = watched(streamed)
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


def test_a_forked_child_leaves_the_parents_stream_alone(streamed: Path) -> None:
    dataset, store = watched(streamed)
    order = SampleOrder(dataset.block_sizes, seed=1, lanes=1, window_blocks=1)
    with closing(StreamReader(ReadConfig())) as stream:
        reader = stream.samples(dataset, order)
        reader.read(order.positions(0, 4, 0, 1))
        assert ends_in_a_child(stream.close)
        assert len(reader.read(order.positions(1, 4, 0, 1)).samples) == 4
    assert store.seen


def read_through(kind: str, bucket: str, streamed: Path, keys: Path, seconds: float) -> dict[str, float]:
    """Reads a dataset on S3, in a process of its own: a few steps, as many as it can while every GET gets this fault
    for so long, and a few more. Returns what it took; AssertionError if the bytes are not those in `streamed`. `keys`:
    the file of the credentials."""
    os.environ["AWS_SHARED_CREDENTIALS_FILE"] = str(keys)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ.pop(name, None)
    keys.write_text(KEYS % "FIRST")
    with ExitStack() as stack:
        proxy = stack.enter_context(faulty_proxy(os.environ["AWS_ENDPOINT_URL"]))
        os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
        stream, right = (stack.enter_context(closing(StreamReader(ReadConfig()))) for _ in range(2))
        dataset, truth = open_dataset(f"s3://{bucket}"), open_dataset(str(streamed))
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
    kinds: Sequence[str], bucket: str, streamed: Path, folder: Path, *, seconds: float
) -> dict[str, dict[str, float] | str]:
    """What each of these faults took, all of them at the same time; the error of one that was not survived."""
    store = open_store(f"s3://{bucket}")
    for path in filter(Path.is_file, streamed.rglob("*")):
        store.write(str(path.relative_to(streamed)), path.read_bytes())
    found: dict[str, dict[str, float] | str] = {}
    with ProcessPoolExecutor(len(kinds), mp_context=multiprocessing.get_context("spawn")) as pool:
        reads = [pool.submit(read_through, kind, bucket, streamed, folder / kind, seconds) for kind in kinds]
        for kind, read in zip(kinds, reads, strict=True):
            try:
                found[kind] = read.result(seconds + 4 * SECONDS)
            except (PrintableError, AssertionError) as error:
                found[kind] = f"{type(error).__name__}: {error}"
    return found


def test_some_seconds_of_broken_bodies_are_survived(streamed: Path, s3_bucket: str, tmp_path: Path) -> None:
    """Without spending a process's budget of 200 retries on them."""
    what = survived(["short"], s3_bucket, streamed, tmp_path, seconds=4.0)["short"]
    assert isinstance(what, dict), what
    assert 10 < what["broken_bodies"] < 100, what


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_minute_of_any_fault_is_survived(streamed: Path, s3_bucket: str, tmp_path: Path) -> None:
    """Of each that the proxy knows, on every GET, and of credentials that have expired. The bytes stay right."""
    found = survived([*KINDS, EXPIRED], s3_bucket, streamed, tmp_path, seconds=60.0)
    for kind, what in found.items():
        sys.stdout.write(f"{kind}: {what}\n")
    assert {kind: what for kind, what in found.items() if isinstance(what, str)} == {}
    assert all(what["faults"] > 0 for what in found.values() if isinstance(what, dict)), found
