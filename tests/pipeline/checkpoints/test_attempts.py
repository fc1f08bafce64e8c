"""What a store lists counts, and what the ledger vouches for."""

from pathlib import Path

from pipeline.checkpoints.attempt_record import Attempt, attempt_to_json, record_path
from pipeline.checkpoints.attempts import list_committed, read_attempts
from pipeline.checkpoints.manifest import MANIFEST_NAME, CheckpointId
from shards.store import Store, open_store

FIRST = Attempt(token="0001-aaaaaaaa", resumed_from=None)
SAVED = CheckpointId(step=8, attempt=FIRST.token)
UNLISTED = CheckpointId(step=12, attempt="0002-bbbbbbbb")
NAMED_OTHERWISE = CheckpointId(step=12, attempt="7-x")


def store_with_one(tmp_path: Path) -> Store:
    store = open_store(str(tmp_path))
    store.write(record_path(FIRST.token), attempt_to_json(FIRST))
    store.write(f"{SAVED.folder}/{MANIFEST_NAME}", b"manifest")
    return store


def test_a_checkpoint_on_record_counts_once_listed_or_not(tmp_path: Path) -> None:
    store = store_with_one(tmp_path)
    assert list_committed(store) == [SAVED]
    assert list_committed(store, recorded=SAVED) == [SAVED]
    assert list_committed(store, recorded=UNLISTED) == [SAVED, UNLISTED]


def test_the_attempt_of_a_checkpoint_on_record_counts_though_its_own_record_is_lost(tmp_path: Path) -> None:
    store = store_with_one(tmp_path)
    assert read_attempts(store) == read_attempts(store, recorded=SAVED) == [FIRST]
    lost = Attempt(token=UNLISTED.attempt, resumed_from=None, is_unreadable=True)
    assert read_attempts(store, recorded=UNLISTED) == [FIRST, lost]
    assert read_attempts(store, recorded=NAMED_OTHERWISE) == [FIRST]
