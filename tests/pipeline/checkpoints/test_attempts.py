"""Attempts: which count, by what a store lists and what the ledger vouches for, and when one is over."""

import errno
import os
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoints.attempts import Attempt, attempt_to_json, list_committed, read_attempts, record_path, why_over
from pipeline.checkpoints.manifest import MANIFEST_NAME, CheckpointId
from shards.storage.retries import RetryConfig
from shards.store import Store, open_store

FIRST = Attempt(token="0001-aaaaaaaa", resumed_from=None, skipped=())
SAVED = CheckpointId(step=8, attempt=FIRST.token)
UNLISTED = CheckpointId(step=12, attempt="0002-bbbbbbbb")
NAMED_OTHERWISE = CheckpointId(step=12, attempt="7-x")
OWN = "0002-aaaaaaaa"


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
    lost = Attempt(token=UNLISTED.attempt, resumed_from=None, skipped=(), is_unreadable=True)
    assert read_attempts(store, recorded=UNLISTED) == [FIRST, lost]
    assert read_attempts(store, recorded=NAMED_OTHERWISE) == [FIRST]


@pytest.mark.parametrize("can_list", [True, False])
def test_a_record_with_a_bad_sector_is_unreadable_if_the_store_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_list: bool
) -> None:
    store, pread, scandir = store_with_one(tmp_path), os.pread, os.scandir
    lost = replace(FIRST, token="0002-cccccccc")
    store.write(record_path(lost.token), attempt_to_json(lost))
    is_failing = False

    def failing(descriptor: int, count: int, offset: int) -> bytes:
        nonlocal is_failing
        if str(Path(f"/proc/self/fd/{descriptor}").readlink()).endswith(record_path(lost.token)):
            is_failing = True
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(descriptor, count, offset)

    def listed(folder: bytes) -> Any:
        if is_failing and not can_list:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return scandir(folder)

    monkeypatch.setattr(os, "pread", failing)
    monkeypatch.setattr(os, "scandir", listed)
    monkeypatch.setattr("shards.storage.local.RETRIES", RetryConfig(deadline_seconds=0.1))
    with nullcontext() if can_list else pytest.raises(OSError, match="Input/output error"):
        assert read_attempts(store) == [FIRST, replace(lost, is_unreadable=True)]


@pytest.mark.parametrize(
    ("tokens", "later"),
    [
        ((OWN,), ""),
        (("0001-bbbbbbbb", OWN), ""),
        ((OWN, "0003-00000000"), "0003-00000000"),
        ((OWN, "0002-bbbbbbbb"), "0002-bbbbbbbb"),
        ((OWN, "0002-99999999"), ""),
        ((OWN, "0003-00000000", "10000-00000000", "9999-00000000"), "10000-00000000"),
        ((OWN, "0003-x"), ""),
    ],
)
def test_a_later_attempt_takes_over(tmp_path: Path, tokens: tuple[str, ...], later: str) -> None:
    store = open_store(str(tmp_path / "checkpoints"))
    for token in tokens:
        store.write(f"attempts/{token}.json", b"nobody reads it")
    reason = why_over(store, OWN, run_dir=tmp_path)
    assert reason.startswith(f"attempt {OWN} of {tmp_path} ends here: a later one, {later}," if later else "")
    assert bool(reason) == bool(later)


@pytest.mark.parametrize(
    ("gone", "todo"),
    [
        ("run", "put it back, or run the same command to start from the beginning"),
        ("checkpoints", "put it back, or start again in another --run-dir"),  # the ledger refuses the same command
    ],
)
def test_what_was_deleted_is_named_and_the_advice_works(tmp_path: Path, gone: str, todo: str) -> None:
    for name in ("run", "checkpoints"):
        (tmp_path / name).mkdir()
    store = open_store(str(tmp_path / "checkpoints"))
    store.write(f"attempts/{OWN}.json", b"")
    shutil.rmtree(tmp_path / gone)
    said = why_over(store, OWN, run_dir=tmp_path / "run")
    assert said.startswith(f"{tmp_path}/{gone}")
    assert said.endswith(todo)
