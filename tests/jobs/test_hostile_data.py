"""Data that cannot be right ends a command with one line: 2 before the first step, 78 after it, 1 from verify."""

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from jobs import exit_codes
from shards import dataset
from shards.manifest import index_path
from shards.store import open_store
from shards.tables import table_bytes
from tests.rigs.hostile_datasets import change_table, rehash, with_column
from tests.rigs.interrupting import Command, started
from tests.rigs.tables import read_table
from tests.rigs.training import losses, pretrain_words, start

ENDLESS = ("--steps", "40000", "--checkpoint.every-steps", "40000", "--engine.precision", "fp32")


def hold_nothing() -> None:
    """For the command's process: every index is read again for each window."""
    dataset.HELD_ROWS_BYTES = 0


@pytest.fixture
def url(digits_url: str, tmp_path: Path) -> str:
    return str(shutil.copytree(digits_url, tmp_path / "digits"))


def spoil_labels(url: str) -> None:
    """Every label is -5, and the hashes fit."""
    store = open_store(url)
    for path in list(store.list("index")):
        change_table(store, path, with_column("labels", lambda old: [[-5]] * len(old), pa.list_(pa.int32())))


def said_once(command: Command, *texts: str) -> None:
    *others, last = command.said.splitlines()
    assert last.startswith("error: ")
    assert all(text in last for text in texts), last
    assert "Traceback" not in command.said
    assert not [line for line in others if "error:" in line], command.said


def test_before_the_first_step(url: str, tmp_path: Path) -> None:
    spoil_labels(url)
    with started(tmp_path / "said", *pretrain_words(url, tmp_path / "run", *ENDLESS)) as command:
        assert command.end(seconds=240) == exit_codes.USER_MISTAKE, command.said
        said_once(command, "column labels has -5; allowed: 0 to 16,777,215", "patchline verify")


def test_the_same_data_in_card_and_verify(url: str, tmp_path: Path) -> None:
    spoil_labels(url)
    with started(tmp_path / "card", "card", "--url", url) as command:
        assert command.end() == exit_codes.USER_MISTAKE, command.said
        said_once(command, "column labels has -5")
    with started(tmp_path / "verify", "verify", url) as command:
        assert command.end() == exit_codes.FAULTS_FOUND, command.said
        assert "column labels has -5" in command.said
        assert "Traceback" not in command.said


@pytest.mark.long
def test_an_index_that_is_replaced_under_way(url: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = pretrain_words(url, run_dir, *ENDLESS)
    with started(tmp_path / "said", *words, before=hold_nothing) as command:
        command.wait_until(lambda: (run_dir / "metrics.jsonl").exists() and len(losses(run_dir)) > 2)
        spoil_labels(url)
        assert command.end(seconds=240) == exit_codes.WILL_NOT_SUCCEED, command.said
        said_once(command, " steps: ", "is damaged: its sha256 is not the manifest's", "patchline verify")


def test_no_rank_waits_for_one_whose_data_is_bad(url: str, tmp_path: Path) -> None:
    """The last shard alone is bad, so the ranks do not meet it at the same time."""
    store, path = open_store(url), index_path(len(list(open_store(url).list("index"))) - 1)
    rehash(store, path, table_bytes(read_table(store.read(path)).drop_columns("crc32")))
    ranks = start(pretrain_words(url, tmp_path / "run", *ENDLESS), num_ranks=2, log_dir=tmp_path / "logs")
    assert ranks.wait() in (exit_codes.USER_MISTAKE, exit_codes.WILL_NOT_SUCCEED)
    codes = [process.returncode for process in ranks.processes]
    assert exit_codes.OUR_BUG not in codes
    assert all(code > 0 for code in codes), "none was killed for waiting"
