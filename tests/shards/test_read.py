"""Planned reads give exactly the bytes of the order's samples, each window once, and say which bytes are wrong."""

import re
import shutil
import tarfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from shards.dataset import Dataset, open_dataset
from shards.errors import WillNotSucceedError
from shards.order import BlockPart, SampleOrder
from shards.read import RawBatch, SampleReader, checked_sample, locate_row, read_part, read_sample
from shards.store import LocalStore, open_store
from tests.rigs.datasets import packed_folders
from tests.rigs.turned import NUM_TURNED, packed_twins

NUM_SAMPLES = 30


@dataclass(frozen=True)
class WatchedStore(LocalStore):
    """A folder whose background reads wait for `gate`; `seen` lists all ranges read, `spoiled` reads to damage."""

    gate: threading.Event = field(default_factory=threading.Event)
    seen: list[tuple[str, str, int, int]] = field(default_factory=list)
    spoiled: list[int] = field(default_factory=list)

    def read_range(self, path: str, first: int, end: int) -> bytes:
        thread = threading.current_thread().name.partition("_")[0]
        if thread == "read":
            self.gate.wait(60)
        self.seen.append((thread, path, first, end))
        data = super().read_range(path, first, end)
        return bytes([data[0] ^ 1]) + data[1:] if self.spoiled and self.spoiled.pop() else data


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 samples: shards of 4 (the last of 2), blocks of 3 and 1."""
    return packed_folders(tmp_path_factory.mktemp("read"), num_classes=3, images_a_class=10)


def bytes_in_tars(packed: Path) -> list[bytes]:
    """Every image in order of sample id, read with the standard library."""
    images = []
    for path in sorted((packed / "shards").iterdir()):
        with tarfile.open(path) as tar:
            members = [member for member in tar if not member.name.endswith((".cls", ".json"))]
            files: list[BinaryIO] = [file for member in members if (file := tar.extractfile(member))]  # type: ignore[misc]
            images += [file.read() for file in files]
    return images


def order_of(dataset: Dataset, *, lanes: int = 2, window_blocks: int = 2) -> SampleOrder:
    return SampleOrder(dataset.block_sizes, seed=11, lanes=lanes, window_blocks=window_blocks)


def reader_of(dataset: Dataset, order: SampleOrder, *, batch: int, rank: int = 0, ranks: int = 1) -> SampleReader:
    return SampleReader(dataset, order, batch_size=batch, rank=rank, num_ranks=ranks, num_threads=2)


def read_steps(dataset: Dataset, order: SampleOrder, steps: range, *, batch: int, ranks: int = 1) -> list[RawBatch]:
    """All ranks' batches, step by step, rank by rank."""
    readers = [reader_of(dataset, order, batch=batch, rank=rank, ranks=ranks) for rank in range(ranks)]
    try:
        return [reader.read(step) for step in steps for reader in readers]
    finally:
        for reader in readers:
            reader.close()


@pytest.mark.parametrize(
    ("ranks", "lanes"),
    [
        pytest.param(1, 4, id="one rank has all lanes"),
        pytest.param(2, 4, id="two ranks of two lanes each"),
        pytest.param(3, 4, id="three ranks share a lane"),
        pytest.param(3, 12, id="one sample a lane and step"),
    ],
)
def test_every_rank_reads_the_orders_samples(packed: Path, ranks: int, lanes: int) -> None:
    dataset, truth = open_dataset(str(packed)), bytes_in_tars(packed)
    order = order_of(dataset, lanes=lanes)
    steps = range(8)  # three epochs: 96 of 30 samples
    batches = read_steps(dataset, order, steps, batch=12, ranks=ranks)
    for step in steps:
        of_step = batches[step * ranks : (step + 1) * ranks]
        samples = [sample for batch in of_step for sample in batch.samples]
        assert [sample.sample_id for sample in samples] == order.batch(step, 12).tolist()
        assert [sample.data for sample in samples] == [truth[sample.sample_id] for sample in samples]
        assert {sample.fault for sample in samples} == {""}
        epochs = np.concatenate([batch.epochs for batch in of_step])
        np.testing.assert_array_equal(epochs, order.positions(step, 12, 0, 1) // NUM_SAMPLES)


def test_a_bucket_gives_the_same_as_a_folder(packed: Path, s3_bucket: str) -> None:
    store = open_store(f"s3://{s3_bucket}/data")
    for path in packed.rglob("*"):
        if path.is_file():
            store.write(str(path.relative_to(packed)), path.read_bytes())
    local, remote = open_dataset(str(packed)), open_dataset(store.url)
    order = order_of(local)
    for here, there in zip(*(read_steps(d, order, range(3), batch=8, ranks=2) for d in (local, remote)), strict=True):
        assert here.samples == there.samples


def test_a_sample_carries_its_row_of_the_index(packed: Path) -> None:
    dataset = open_dataset(str(packed))
    for sample_id in range(NUM_SAMPLES):
        sample = checked_sample(dataset, sample_id, read_sample(dataset, sample_id))
        label = int(sample.source.split("/")[0].removeprefix("c"))
        assert (sample.height, sample.width, sample.labels) == (16 + 4 * label, 32, (label,))
        assert sample.orientation == 1


def test_a_sample_carries_its_orientation_and_its_size_as_stored(tmp_path: Path) -> None:
    upright, turned = (open_dataset(str(url)) for url in packed_twins(tmp_path))
    for dataset, num_orientations in ((upright, 1), (turned, 8)):
        samples = [checked_sample(dataset, number, read_sample(dataset, number)) for number in range(NUM_TURNED)]
        for sample in samples:
            number = int(sample.source.split("/")[-1].removesuffix(".png"))
            assert sample.orientation == (1 if dataset is upright else 1 + number // 2)
            assert (sample.height, sample.width) == ((24, 40) if sample.orientation < 5 else (40, 24))
        assert len({sample.orientation for sample in samples}) == num_orientations


def test_the_first_batch_does_not_wait_for_its_windows(packed: Path) -> None:
    truth, store = bytes_in_tars(packed), WatchedStore(str(packed))
    plain = open_dataset(str(packed))
    dataset = Dataset(store, plain.manifest, fingerprint=plain.fingerprint)
    order = order_of(dataset)
    reader = reader_of(dataset, order, batch=4)
    try:
        early = reader.read(0)  # while the gate is shut no window can arrive
        assert len([entry for entry in store.seen if entry[0] != "read"]) == 4
        store.gate.set()
        later = [reader.read(step) for step in range(1, 7)]
    finally:
        store.gate.set()
        reader.close()
    for batch in (early, *later):
        assert [sample.data for sample in batch.samples] == [truth[sample.sample_id] for sample in batch.samples]
    again = read_steps(dataset, order, range(1), batch=4)
    assert again[0].samples == early.samples


def test_passed_windows_are_dropped_and_none_is_read_twice(packed: Path) -> None:
    store = WatchedStore(str(packed))
    store.gate.set()
    plain = open_dataset(str(packed))
    dataset = Dataset(store, plain.manifest, fingerprint=plain.fingerprint)
    order = order_of(dataset, lanes=2, window_blocks=1)
    reader = reader_of(dataset, order, batch=2)  # one sample a lane: a step is in one window of each lane
    try:
        for step in range(2 * NUM_SAMPLES // 2):
            reader.read(step)
            assert len(reader._windows) <= 2 * order.lanes, f"step {step} holds {list(reader._windows)}"
    finally:
        reader.close()
    ahead = [entry[1:] for entry in store.seen if entry[0] == "read"]
    cut_blocks = order.lanes - 1  # a block on the border of two lanes is read in parts
    assert len(ahead) <= 3 * (dataset.block_sizes.size + cut_blocks)  # two epochs, and the start of the third
    assert max(ahead.count(entry) for entry in ahead) <= 3  # once an epoch


def test_a_damaged_sample_is_named_and_the_others_are_unchanged(packed: Path, tmp_path: Path) -> None:
    broken_id = 17
    folder = tmp_path / "broken"
    shutil.copytree(packed, folder)
    dataset = open_dataset(str(folder))
    shard, row = locate_row(dataset, broken_id)
    tar = folder / dataset.shard_path(shard)
    data = bytearray(tar.read_bytes())
    data[int(dataset.shard_rows(shard).offset[row]) + 9] ^= 1
    tar.write_bytes(bytes(data))
    order, truth = order_of(dataset), bytes_in_tars(packed)
    samples = [s for batch in read_steps(dataset, order, range(8), batch=4) for s in batch.samples]
    assert [sample.sample_id for sample in samples] == [i for step in range(8) for i in order.batch(step, 4).tolist()]
    for sample in samples:
        assert sample.data == (None if sample.sample_id == broken_id else truth[sample.sample_id])
        assert bool(sample.fault) == (sample.sample_id == broken_id)
    fault = next(sample.fault for sample in samples if sample.fault)
    assert fault.startswith("crc32 is ")
    assert f"the index of shards/shard-{shard:06d}.tar says" in fault


@pytest.mark.parametrize(
    ("spoiled", "usable"),
    [
        pytest.param([False, True], True, id="wrong bytes once: the second read is right"),
        pytest.param([True, True], False, id="wrong bytes twice: given up"),
    ],
)
def test_wrong_bytes_are_read_once_more(packed: Path, spoiled: list[int], usable: bool) -> None:
    store, plain = WatchedStore(str(packed), spoiled=list(spoiled)), open_dataset(str(packed))
    dataset = Dataset(store, plain.manifest, fingerprint=plain.fingerprint)
    sample = checked_sample(dataset, 5, read_sample(dataset, 5))
    assert (sample.data == bytes_in_tars(packed)[5]) == usable
    assert (sample.fault == "") == usable


@pytest.mark.parametrize(
    ("first", "count"),
    [
        pytest.param(0, 3, id="a whole block"),
        pytest.param(1, 2, id="the end of a block"),
        pytest.param(4, 1, id="the start of the second shard"),
        pytest.param(7, 1, id="the one-sample block at the end of a shard"),
        pytest.param(28, 2, id="the short last shard"),
        pytest.param(29, 1, id="the last sample"),
    ],
)
def test_a_part_of_a_block_is_one_range(packed: Path, first: int, count: int) -> None:
    store, plain = WatchedStore(str(packed)), open_dataset(str(packed))
    dataset = Dataset(store, plain.manifest, fingerprint=plain.fingerprint)
    part = BlockPart(block=-1, first_sample_id=first, num_samples=count)
    assert read_part(dataset, part) == bytes_in_tars(packed)[first : first + count]
    assert len(store.seen) == 1


@pytest.mark.parametrize("cut", [pytest.param(0, id="missing"), pytest.param(700, id="cut off")])
@pytest.mark.parametrize("scheme", ["folder", "s3"])
def test_a_tar_without_its_bytes_ends_the_run(
    packed: Path, tmp_path: Path, request: pytest.FixtureRequest, scheme: str, cut: int
) -> None:
    store = open_store(str(tmp_path / "data"))
    if scheme == "s3":
        store = open_store(f"s3://{request.getfixturevalue('s3_bucket')}/data")
    for path in packed.rglob("*"):
        if path.is_file():
            store.write(str(path.relative_to(packed)), path.read_bytes())
    dataset = open_dataset(store.url)
    tar = dataset.shard_path(1)
    body = store.read(tar)
    store.delete(tar)
    if cut:
        store.write(tar, body[:cut])
    order = order_of(dataset)
    expected = f"{store.url}/{tar}: .*run: patchline verify {store.url}"
    with pytest.raises(WillNotSucceedError, match=expected):
        read_steps(dataset, order, range(8), batch=4)
    with pytest.raises(WillNotSucceedError, match=re.escape(tar)):
        read_sample(dataset, 7)  # the last of shard 1


def test_every_sample_has_its_row(packed: Path) -> None:
    dataset = open_dataset(str(packed))
    rows = [4 * shard + row for shard, row in (locate_row(dataset, sample_id) for sample_id in range(NUM_SAMPLES))]
    assert rows == list(range(NUM_SAMPLES))
