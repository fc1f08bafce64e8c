"""Opening a dataset, and what is refused."""

import hashlib
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from shards.config import ReadConfig
from shards.dataset import Dataset, open_dataset
from shards.errors import StorageError, UnreachableError, UserError
from shards.manifest import BLOCKS_PATH, MANIFEST_PATH, index_path
from shards.reading.samples import read_sample
from shards.storage.ranges import RangeReads
from tests.rigs.datasets import index_rows, packed_folders
from tests.rigs.watched import watched


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return open_dataset(str(packed_folders(tmp_path)))


def test_what_a_dataset_says_of_itself(dataset: Dataset) -> None:
    assert (dataset.num_samples, dataset.num_classes) == (15, 3)
    assert dataset.label_names == ("c0", "c1", "c2")
    assert dataset.first_sample_ids.tolist() == [0, 4, 8, 12]
    assert dataset.block_sizes.sum() == 15
    assert dataset.shard_path(1) == "shards/shard-000001.tar"
    assert dataset.manifest.split == "train"
    manifest = dataset.store.read(MANIFEST_PATH)
    assert dataset.fingerprint == hashlib.sha256(manifest).hexdigest()


def test_of_what_reading_needs_so_many_bytes_are_held(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    of_four = dataset.sample_rows(0).num_bytes
    monkeypatch.setattr("shards.dataset.HELD_ROWS_BYTES", 2 * of_four)
    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(lambda shard: dataset.sample_rows(shard).offset.size, [0, 1, 2, 3] * 8))
    assert counts == [4, 4, 4, 3] * 8
    held = dataset.sample_rows(0)
    assert dataset.sample_rows(1) is dataset.sample_rows(1)
    assert dataset.sample_rows(0) is held
    dataset.sample_rows(2)
    assert dataset.sample_rows(0) is held  # asked for later than shard 1
    dataset.sample_rows(1)
    dataset.sample_rows(2)
    assert dataset.sample_rows(0) is not held
    monkeypatch.setattr("shards.dataset.HELD_ROWS_BYTES", 0)
    assert dataset.sample_rows(3).offset.size == 3


def test_a_sample_is_named_by_its_source(dataset: Dataset) -> None:
    for shard in range(4):
        sources = [row.source for row in index_rows(dataset, shard)]
        assert [dataset.source_of(shard, row) for row in range(len(sources))] == sources


def test_names_are_looked_up_by_one_read_a_shard(tmp_path: Path) -> None:
    dataset, store = watched(packed_folders(tmp_path))
    for _ in range(3):
        for row in range(4):
            dataset.source_of(1, row)
    assert store.read_files == [index_path(1)]


def test_a_stream_counts_what_it_reads_and_shares_what_is_held(tmp_path: Path) -> None:
    dataset, store = watched(packed_folders(tmp_path))
    reads = [RangeReads(ReadConfig()), RangeReads(ReadConfig())]
    first, second = (dataset.read_by(own) for own in reads)
    assert first.sample_rows(1) is second.sample_rows(1) is dataset.sample_rows(1)
    assert store.read_files == [index_path(1)]
    assert second.read_shard(0, 0, 100) == dataset.read_shard(0, 0, 100)
    counts = [traffic.counts() for traffic in (reads[0].traffic, reads[1].traffic, store.traffic)]
    assert [(one.requests, one.bytes) for one in counts] == [(1, store.size(index_path(1))), (1, 100), (1, 100)]
    for own in reads:
        own.close()
    with pytest.raises(CancelledError):
        first.sample_rows(2)
    assert first.fingerprint == dataset.fingerprint


def test_an_index_that_came_wrong_once_is_read_again(tmp_path: Path) -> None:
    dataset, store = watched(packed_folders(tmp_path))
    store.spoiled_files.extend([False, True])
    assert dataset.sample_rows(1).offset.size == 4
    store.spoiled_files.extend([True, True])
    with pytest.raises(UserError, match="is damaged: its sha256"):
        dataset.sample_rows(2)
    assert store.read_files == [index_path(1)] * 2 + [index_path(2)] * 2


def test_a_dataset_that_vanished_is_no_damaged_dataset(dataset: Dataset) -> None:
    dataset.store.delete(index_path(1))
    dataset.store.delete(MANIFEST_PATH)
    with pytest.raises(StorageError, match=r"manifest\.json.* any more.*is the storage mounted"):
        dataset.sample_rows(1)


def test_one_missing_tar_is_told_from_a_missing_folder(tmp_path: Path) -> None:
    dataset, store = watched(packed_folders(tmp_path))
    store.delete(dataset.shard_path(1))
    for _ in range(3):
        dataset.check_others_than(1)
    assert len(store.seen) == 1, "it is looked for once"
    store.write(dataset.shard_path(0), b"")
    store.delete(dataset.shard_path(2))
    dataset.check_others_than(2)  # an empty tar is one
    for shard in (0, 3):
        store.delete(dataset.shard_path(shard))
    with pytest.raises(StorageError, match=r"shard-000003\.tar is not there, nor is any of 3 other tars.*mounted"):
        dataset.check_others_than(3)


def test_tars_that_were_never_there_are_a_wrong_address(tmp_path: Path) -> None:
    dataset, store = watched(packed_folders(tmp_path))
    for shard in range(4):
        store.delete(dataset.shard_path(shard))
    with pytest.raises(UnreachableError, match=r"nor is any of 3 other tars.*is the storage mounted\? Try again once"):
        dataset.check_others_than(3)
    store.write(MANIFEST_PATH, replace(dataset.manifest, shards_url=str(tmp_path / "moved")).to_bytes())
    with pytest.raises(UnreachableError, match=r"moved/shards.* is shards_url in .*manifest\.json right, and is"):
        read_sample(open_dataset(dataset.url), 0)


def test_a_folder_without_manifest_is_no_dataset(tmp_path: Path) -> None:
    for folder, said in ((tmp_path, r"has no manifest\.json"), (tmp_path / "not there", "there is nothing at")):
        with pytest.raises(UserError, match=rf"{said}.*patchline pack .* --out "):
            open_dataset(str(folder))


def test_a_bucket_without_manifest_and_no_bucket_are_told_apart(s3_bucket: str) -> None:
    with pytest.raises(UserError, match=rf"s3://{s3_bucket}/x has no manifest"):
        open_dataset(f"s3://{s3_bucket}/x")
    with pytest.raises(UserError, match="there is no bucket"):
        open_dataset(f"s3://{s3_bucket}-other/x")


def test_another_format_version_is_refused(dataset: Dataset) -> None:
    manifest = dataset.store.read(MANIFEST_PATH).replace(b'"format_version": 2', b'"format_version": 1')
    dataset.store.write(MANIFEST_PATH, manifest)
    with pytest.raises(UserError, match="format version 1, this version reads 2"):
        open_dataset(dataset.url)


@pytest.mark.parametrize("path", [BLOCKS_PATH, index_path(1)])
@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_damaged_tables_are_never_used(dataset: Dataset, path: str, damage: str) -> None:
    if damage == "changed":
        dataset.store.write(path, dataset.store.read(path)[:-1] + b"\xff")
    else:
        dataset.store.delete(path)
    with pytest.raises(UserError, match=r"patchline verify"):
        _ = dataset.blocks if path == BLOCKS_PATH else dataset.sample_rows(1)
    with pytest.raises(UserError, match=r"patchline verify"):
        _ = dataset.blocks if path == BLOCKS_PATH else dataset.source_of(1, 0)
