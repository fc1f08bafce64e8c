"""Packing that is killed by SIGKILL at 50 random moments, in a folder and on an S3-compatible store, loses nothing."""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.data.pack import PackJob, run
from shards.sources.kinds import FolderSource
from shards.store import open_store
from tests.rigs.datasets import file_hashes, object_hashes
from tests.rigs.held import held_at, hold
from tests.rigs.images import class_folders
from tests.rigs.interrupting import started
from tests.rigs.pack_kills import killed_often

NUM_KILLS = 50


@pytest.fixture
def job(tmp_path: Path) -> PackJob:
    """20 images into 5 shards."""
    root = class_folders(tmp_path / "images", num_classes=2, images_a_class=10)
    return PackJob(source=FolderSource(root=str(root)), samples_per_shard=4, samples_per_block=2)


@pytest.mark.parametrize("num_kills", [12, pytest.param(NUM_KILLS, marks=pytest.mark.long)])
def test_a_folder(job: PackJob, tmp_path: Path, num_kills: int) -> None:
    finished, in_work = killed_often(job, lambda n: str(tmp_path / f"out-{n}"), num_kills=num_kills, seed=1)
    expected = file_hashes(Path(finished[0]))
    assert "manifest.json" in expected
    assert all(file_hashes(Path(out)) == expected for out in finished)
    assert in_work >= num_kills // 2, "most kills must meet the command at work"


@pytest.mark.long
@pytest.mark.parametrize("num_kills", [4, NUM_KILLS])
def test_an_s3_compatible_store(job: PackJob, tmp_path: Path, s3_bucket: str, num_kills: int) -> None:
    local = tmp_path / "local"
    assert run(replace(job, out=str(local))) == 0
    finished, in_work = killed_often(job, lambda n: f"s3://{s3_bucket}/out-{n}", num_kills=num_kills, seed=2)
    expected = file_hashes(local)
    assert all(object_hashes(open_store(url)) == expected for url in finished)
    assert in_work >= num_kills // 2


def alive_in_group(group: int) -> list[int]:
    """Processes of a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has ended since
            continue
        if int(its_group) == group and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def test_workers_end_with_a_command_that_was_killed(job: PackJob, tmp_path: Path) -> None:
    """The parent of two workers is killed while it hands them the last of five shards: no worker survives, and the same
    command continues."""
    assert isinstance(job.source, FolderSource)
    out, held = tmp_path / "out", tmp_path / "held"
    words = ["--source.root", job.source.root, "--out", str(out), "--samples-per-shard", "4", "--workers", "2"]
    environ = held_at("jobs.data.pack:samples_of_shard", held, count=5)
    command_line = ("pack", "folder", *words, "--samples-per-block", "2")
    with started(tmp_path / "said", *command_line, environ=environ, before=hold) as command:
        command.wait_until(held.exists)
        group = command.process.pid
        assert group
        assert len(alive_in_group(group)) >= 3, "workers are there"
        os.kill(group, signal.SIGKILL)
        command.process.join()
        pause, deadline = threading.Event(), time.monotonic() + 120
        while alive_in_group(group) and time.monotonic() < deadline:
            pause.wait(0.05)
        assert alive_in_group(group) == []
    assert run(replace(job, out=str(out))) == 0
    assert run(replace(job, out=str(tmp_path / "one"))) == 0
    assert file_hashes(out) == file_hashes(tmp_path / "one")
