"""A store that goes away while a command works ends it with one line and code 74; the same command then continues."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from jobs import exit_codes
from jobs.data import pack
from jobs.recipes.pack import digits
from shards.storage import local, s3
from shards.storage.retries import RetryConfig
from shards.store import open_store
from tests.conftest import new_bucket, use_s3
from tests.rigs.images import class_folders
from tests.rigs.interrupting import Command, started
from tests.rigs.s3 import moto_server
from tests.rigs.training import losses, pretrain_words

ENDLESS = ("--steps", "40000", "--checkpoint.every-steps", "40000", "--engine.precision", "fp32")


def lose_patience() -> None:
    """For the command's process: a store that has answered is waited for ten seconds instead of two minutes. On a busy
    machine an answer of the simulated store may take several."""
    s3.RETRIES = RetryConfig(backoff_seconds=0.01, deadline_seconds=10.0)


@dataclass(frozen=True, kw_only=True)
class KilledServer:
    """An S3 server of this test's own, and its bucket."""

    endpoint: str
    bucket: str
    running: ExitStack

    def kill(self) -> None:
        """From now on nobody answers at its port."""
        self.running.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[KilledServer]:
    """Its endpoint and credentials are in the environment."""
    with ExitStack() as running:
        endpoint = use_s3(monkeypatch, running.enter_context(moto_server()), access_key="test", secret_key="test")
        yield KilledServer(endpoint=endpoint, bucket=new_bucket(endpoint), running=running)


def assert_one_line(command: Command, *texts: str) -> None:
    """Code 74, and what has gone wrong in the last line; before it, only progress and the reads that are retried."""
    code = command.end(seconds=240)  # a worker process may wait for the whole two minutes
    assert code == exit_codes.CRASH, command.said
    *others, last = command.said.splitlines()
    assert last.startswith("error: ")
    assert last.endswith("; run the same command to continue")
    assert all(text in last for text in texts), last
    assert "Traceback" not in command.said
    assert not [line for line in others if "error:" in line], command.said


BAD = "00002.tar"


def fail_shard(ending: str) -> None:
    """For the command's process: reads of tars with this ending fail with EIO, and its patience is a second."""
    local.RETRIES = RetryConfig(backoff_seconds=0.01, deadline_seconds=1.0)

    def failing(read: Callable[..., Any]) -> Callable[..., Any]:
        def fails(descriptor: int, *arguments: Any) -> Any:
            if str(Path(f"/proc/self/fd/{descriptor}").readlink()).endswith(ending):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(descriptor, *arguments)

        return fails

    os.pread, os.preadv = failing(os.pread), failing(os.preadv)


def fail_all_shards() -> None:
    """No tar can be read."""
    fail_shard(".tar")


def fail_one_shard() -> None:
    """One of fifteen tars cannot be read."""
    fail_shard(BAD)


def test_a_shard_that_stays_unreadable_is_named_in_the_last_line(digits_url: str, tmp_path: Path) -> None:
    """It is never given up if it has more samples than may be lost, or while no other shard can be read."""
    words = pretrain_words(digits_url, tmp_path / "run", *ENDLESS)
    with started(tmp_path / "said", *words, before=fail_one_shard) as command:
        assert_one_line(command, f"Input/output error at {digits_url}/", f"{BAD}; check the disk")
    with started(tmp_path / "again", *words, before=fail_one_shard) as command:
        assert_one_line(
            command, "are in shards that cannot be read, more than the allowed 0.10%", f"{BAD}; check the disk"
        )
    with started(tmp_path / "worse", *words, before=fail_all_shards) as command:
        assert_one_line(command, f"storage cannot read {digits_url}/", f"{BAD}, nor any other shard of this dataset;")


def test_a_run_goes_on_without_a_shard_that_stays_unreadable(tmp_path: Path) -> None:
    """Each time with the same samples, and in later starts though it can be read again."""
    url, runs = str(tmp_path / "digits"), [tmp_path / "one", tmp_path / "two"]
    assert pack.run(replace(digits(), out=url, samples_per_shard=100, samples_per_block=20)) == 0
    for run_dir in runs:
        words = pretrain_words(url, run_dir, "--data.max-quarantined", "0.1", "--engine.precision", "fp32")
        words += ["--checkpoint.every-steps", "100", "--steps", "50"]
        with started(run_dir.with_suffix(".first"), *words, before=fail_one_shard) as command:
            assert_one_line(command, f"Input/output error at {url}/", BAD)
        with started(run_dir.with_suffix(".second"), *words, before=fail_one_shard) as command:
            assert command.end(seconds=240) == exit_codes.DONE, command.said
            assert f"{BAD} could not be read and is left out" in command.said
        if run_dir == runs[0]:
            first = losses(run_dir)
            shutil.rmtree(run_dir / "checkpoints")
            for name in ("DONE", "ledger.jsonl", "metrics.jsonl"):
                (run_dir / name).unlink()
            with started(run_dir.with_suffix(".third"), *words) as command:
                assert command.end(seconds=240) == exit_codes.DONE, command.said
                assert f"{BAD} could not be read and is left out" in command.said
        assert losses(run_dir) == first
        (recorded,) = map(json.loads, (run_dir / "quarantine" / "shards.jsonl").open())
        assert recorded["shard"].endswith(BAD)
        assert recorded["reason"] == "Input/output error"
        replaced = [json.loads(line) for line in (run_dir / "quarantine" / "rank-00000.jsonl").open()]
        assert len({line["sample_id"] for line in replaced}) > 50
        assert all(BAD in line["reason"] for line in replaced)


@pytest.mark.long
def test_training(server: KilledServer, digits_url: str, tmp_path: Path) -> None:
    url, run_dir = f"s3://{server.bucket}/digits", tmp_path / "run"
    for path in Path(digits_url).rglob("*"):
        if path.is_file():
            open_store(url).write(path.relative_to(digits_url).as_posix(), path.read_bytes())
    words = pretrain_words(url, run_dir, *ENDLESS)
    with started(tmp_path / "said", *words, before=lose_patience) as command:
        command.wait_until(lambda: (run_dir / "metrics.jsonl").exists() and len(losses(run_dir)) > 2)
        server.kill()
        assert_one_line(command, "steps: reading s3://", "the deadline is 10 s")
    with started(tmp_path / "again", *words, before=lose_patience) as command:
        assert_one_line(command, f"S3 is unreachable for {url} at {server.endpoint}")


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_packing(server: KilledServer, tmp_path: Path, workers: str) -> None:
    root = class_folders(tmp_path / "images", num_classes=10, images_a_class=50)
    words = ("pack", "folder", "--source.root", str(root), "--out", f"s3://{server.bucket}/packed")
    options = ("--samples-per-shard", "1", "--samples-per-block", "1", "--workers", workers)
    with started(tmp_path / "said", *words, *options, before=lose_patience) as command:
        command.wait_until_said("plan: 500 images")
        server.kill()
        assert_one_line(command, f"s3://{server.bucket}/packed")
