"""A whole dataset: nothing wrong in a good one, and the place of whatever is wrong."""

from pathlib import Path

import pytest

from shards.errors import UserError
from shards.manifest import BLOCKS_PATH, MANIFEST_PATH, QUARANTINE_PATH, Manifest, index_path, shard_path
from shards.plan import PLAN_PATH
from shards.store import Store, open_store
from shards.verify import verify_dataset
from tests.rigs.datasets import packed_folders


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(packed_folders(tmp_path)))


def test_a_good_dataset_has_no_faults(store: Store) -> None:
    assert verify_dataset(store.url) == []
    assert verify_dataset(store.url, deep=True) == []


def test_a_corrupted_byte_in_a_tar_is_found_and_placed(store: Store) -> None:
    data = bytearray(store.read(shard_path(2)))
    data[700] ^= 1
    store.write(shard_path(2), bytes(data))
    faults = verify_dataset(store.url)
    assert {fault.where for fault in faults} == {shard_path(2)}
    assert any("sha256" in fault.what for fault in faults)
    assert any("crc32 of row 0" in fault.what for fault in faults)


@pytest.mark.parametrize("path", [BLOCKS_PATH, QUARANTINE_PATH, PLAN_PATH, index_path(1), "plan/samples-00000.parquet"])
@pytest.mark.parametrize("damage", ["changed", "missing", "emptied"])
def test_every_other_file_is_covered(store: Store, path: str, damage: str) -> None:
    if damage == "missing":
        store.delete(path)
    else:
        store.write(path, b"" if damage == "emptied" else store.read(path).replace(b"a", b"b", 1))
    assert path in {fault.where for fault in verify_dataset(store.url)}


@pytest.mark.parametrize("path", [shard_path(1), index_path(3)])
def test_a_missing_shard_or_index_is_found_once(store: Store, path: str) -> None:
    store.delete(path)
    assert [(fault.where, fault.what) for fault in verify_dataset(store.url)] == [(path, "is missing")]


def test_a_shard_that_nobody_knows_is_found(store: Store) -> None:
    store.write("shards/shard-000099.tar", b"")
    (fault,) = verify_dataset(store.url)
    assert fault.where == "shards/shard-000099.tar"


def test_sample_ids_must_run_on(store: Store) -> None:
    text = store.read(MANIFEST_PATH)
    store.write(MANIFEST_PATH, text.replace(b'"first_sample_id": 8', b'"first_sample_id": 9'))
    Manifest.from_bytes(store.read(MANIFEST_PATH))
    assert MANIFEST_PATH in {fault.where for fault in verify_dataset(store.url)}


def test_many_faults_of_one_kind_are_counted_not_listed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.verify.MAX_FAULTS_A_CHECK", 1)
    store.write(shard_path(0), bytes(store.size(shard_path(0))))
    assert "and 3 more of this kind" in {fault.what for fault in verify_dataset(store.url)}


def test_no_dataset_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no manifest"):
        verify_dataset(str(tmp_path))
