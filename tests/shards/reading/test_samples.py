"""Single samples: found by id, read by offset, checked against the index; what cannot be had says why."""

import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest

from shards.dataset import Dataset, open_dataset
from shards.errors import StorageError
from shards.order import BlockSlice
from shards.reading.samples import RawSample, locate_row, read_sample, read_slice, refetched, too_large, verified
from shards.store import open_store
from tests.rigs.datasets import packed_folders
from tests.rigs.turned import NUM_TURNED, packed_twins
from tests.rigs.watched import watched

NUM_SAMPLES = 30


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 samples: shards of 4 (the last of 2), blocks of 3 and 1."""
    return packed_folders(tmp_path_factory.mktemp("samples"), num_classes=3, images_a_class=10)


@pytest.fixture(scope="module")
def truth(packed: Path) -> list[bytes]:
    """Every image in order of sample id, read with the standard library."""
    images = []
    for path in sorted((packed / "shards").iterdir()):
        with tarfile.open(path) as tar:
            members = [member for member in tar if not member.name.endswith((".cls", ".json"))]
            files: list[BinaryIO] = [file for member in members if (file := tar.extractfile(member))]  # type: ignore[misc]
            images += [file.read() for file in files]
    return images


def slice_of(first: int, count: int) -> BlockSlice:
    return BlockSlice(first_sample_id=first, num_samples=count)


def test_every_sample_has_its_row(packed: Path) -> None:
    dataset = open_dataset(str(packed))
    rows = [4 * shard + row for shard, row in (locate_row(dataset, sample_id) for sample_id in range(NUM_SAMPLES))]
    assert rows == list(range(NUM_SAMPLES))


def test_a_sample_is_what_the_index_says(packed: Path, truth: list[bytes]) -> None:
    dataset = open_dataset(str(packed))
    for sample_id in range(NUM_SAMPLES):
        sample = read_sample(dataset, sample_id)
        assert (sample.sample_id, sample.data, sample.fault) == (sample_id, truth[sample_id], "")
        again = refetched(dataset, sample)  # knows the name of the image, too
        label = int(again.source.split("/")[0].removeprefix("c"))
        assert (sample.height, sample.width, sample.labels) == (16 + 4 * label, 32, (label,))
        assert sample.orientation == 1
        assert again == replace(sample, source=again.source)


def test_a_sample_carries_its_orientation_and_its_size_as_stored(tmp_path: Path) -> None:
    upright, turned = (open_dataset(str(url)) for url in packed_twins(tmp_path))
    for dataset, num_orientations in ((upright, 1), (turned, 8)):
        samples = [refetched(dataset, read_sample(dataset, number)) for number in range(NUM_TURNED)]
        for sample in samples:
            number = int(sample.source.split("/")[-1].removesuffix(".png"))
            assert sample.orientation == (1 if dataset is upright else 1 + number // 2)
            assert (sample.height, sample.width) == ((24, 40) if sample.orientation < 5 else (40, 24))
        assert len({sample.orientation for sample in samples}) == num_orientations


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
def test_a_part_of_a_shard_is_one_range(packed: Path, truth: list[bytes], first: int, count: int) -> None:
    dataset, store = watched(packed)
    samples = read_slice(dataset, slice_of(first, count))
    assert [sample.data for sample in samples] == truth[first : first + count]
    assert [sample.sample_id for sample in samples] == list(range(first, first + count))
    assert len(store.seen) == 1


@pytest.mark.parametrize(
    ("spoiled", "usable", "num_reads"),
    [
        pytest.param([False], True, 1, id="right at once: read once"),
        pytest.param([False, True], True, 2, id="wrong bytes once: the second read is right"),
        pytest.param([True, True], False, 2, id="wrong bytes twice: given up"),
    ],
)
def test_wrong_bytes_are_read_once_more(
    packed: Path, truth: list[bytes], spoiled: list[bool], usable: bool, num_reads: int
) -> None:
    dataset, store = watched(packed)
    store.spoiled.extend(spoiled)
    sample = read_sample(dataset, 5)
    assert sample.data == (truth[5] if usable else None)
    assert len(store.seen) == num_reads
    if not usable:
        assert sample.fault.startswith("crc32 is ")
        assert sample.fault.endswith(f"(row 1 of {packed}/shards/shard-000001.tar)")
        assert sample.source.startswith("c")


def cut_off(tar: Path) -> None:
    tar.write_bytes(tar.read_bytes()[:700])


@pytest.mark.parametrize("damage", [Path.unlink, cut_off])
@pytest.mark.parametrize("scheme", ["folder", "s3"])
def test_bytes_that_are_not_there_are_a_fault(
    packed: Path, tmp_path: Path, request: pytest.FixtureRequest, scheme: str, damage: Callable[[Path], None]
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(packed, folder)
    damage(folder / "shards" / "shard-000001.tar")
    url = str(folder)
    if scheme == "s3":
        url = f"s3://{request.getfixturevalue('s3_bucket')}/data"
        store = open_store(url)
        for path in folder.rglob("*"):
            if path.is_file():
                store.write(str(path.relative_to(folder)), path.read_bytes())
    dataset = open_dataset(url)
    sample = read_sample(dataset, 7)  # the last of shard 1
    assert sample.data is None
    assert sample.fault.startswith("its bytes are not there: ")
    assert sample.fault.endswith(f"(row 3 of {url}/shards/shard-000001.tar)")
    assert sample.source.startswith("c")
    assert verified(dataset, sample) is sample  # not asked for a third time
    assert [bool(other.data) for other in read_slice(dataset, slice_of(8, 3))] == [True] * 3


def test_of_a_tar_that_is_cut_off_what_is_left_is_used(packed: Path, truth: list[bytes], tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(packed, folder)
    dataset = open_dataset(str(folder))
    tar, rows = folder / dataset.shard_path(0), dataset.sample_rows(0)
    tar.write_bytes(tar.read_bytes()[: int(rows.offset[2]) + 5])
    samples = read_slice(dataset, slice_of(0, 3))
    assert [sample.data for sample in samples] == [*truth[:2], None]


def test_a_store_that_does_not_answer_is_no_fault_of_the_sample(packed: Path) -> None:
    dataset, store = watched(packed)
    sample = read_sample(dataset, 3)
    store.broken.append(StorageError("gone"))
    with pytest.raises(StorageError, match="gone"):
        refetched(dataset, sample)


def test_a_folder_that_vanished_is_no_fault_of_the_samples(packed: Path, tmp_path: Path) -> None:
    """The manifest may still be there: tars can lie elsewhere."""
    folder = tmp_path / "data"
    shutil.copytree(packed, folder)
    dataset = open_dataset(str(folder))
    sample = read_sample(dataset, 7)
    (folder / "shards").rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="is the storage mounted"):
        refetched(dataset, sample)
    with pytest.raises(StorageError, match="is the storage mounted"):
        read_sample(dataset, 20)
    (tmp_path / "elsewhere").rename(folder / "shards")
    assert refetched(dataset, sample).data == sample.data


def test_what_is_too_large_is_not_asked_for(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, store = watched(packed)
    assert too_large(100) == ""
    assert too_large(100, most_bytes=100) == ""
    assert too_large(100, most_bytes=99) == "too large: 100 bytes, allowed: 99"
    monkeypatch.setattr("shards.reading.samples.too_large", lambda *_: "too large")
    sample = read_sample(dataset, 3)
    assert sample.data is None
    assert sample.fault.startswith("too large (row 3 of ")
    assert store.seen == []


def test_bytes_may_be_of_any_kind(packed: Path) -> None:
    dataset = open_dataset(str(packed))
    sample = read_sample(dataset, 3)
    assert sample.data is not None
    as_bytes: RawSample = replace(sample, data=bytes(sample.data))
    assert verified(dataset, as_bytes) is as_bytes
    assert isinstance(dataset, Dataset)
