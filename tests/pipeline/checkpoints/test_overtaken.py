"""When an attempt is over, by the names of the records alone."""

import shutil
from pathlib import Path

import pytest

from pipeline.checkpoints.overtaken import why_over
from shards.store import open_store

OWN = "0002-aaaaaaaa"


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


@pytest.mark.parametrize("gone", ["run", "checkpoints"])
def test_what_was_deleted_is_named(tmp_path: Path, gone: str) -> None:
    for name in ("run", "checkpoints"):
        (tmp_path / name).mkdir()
    store = open_store(str(tmp_path / "checkpoints"))
    store.write(f"attempts/{OWN}.json", b"")
    shutil.rmtree(tmp_path / gone)
    assert why_over(store, OWN, run_dir=tmp_path / "run").startswith(f"{tmp_path}/{gone}")
