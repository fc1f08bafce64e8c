"""Saving while a run trains, on one real rank: what is committed, and what failures do."""

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from jobs.recipes.pretrain import digits_smoke
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.config import CheckpointConfig
from pipeline.training.ledger import Ledger
from pipeline.training.saving import Saving, describe, fingerprint
from pipeline.training.signals import Signals
from pipeline.training.stopping import Stopping
from pipeline.training.watch import Watch
from pipeline.training.zero_state import Fragment
from pipeline.world import World
from shards.errors import TransientError, WillNotSucceedError
from shards.store import LocalStore, open_store
from tests.rigs.positions import position_at
from tests.rigs.processes import one_world, run_ranks

JOB = replace(digits_smoke(), checkpoint=CheckpointConfig(keep_newest=1))


class _Engine:
    """Two elements of one tensor."""

    shapes = {"a": (2,)}  # noqa: RUF012

    def fragments(self) -> list[Fragment]:
        return [Fragment(name="a", start=0, length=2, slots={"master": torch.tensor([1.0, 2.0])})]


def saving_in(world: World, folder: Path) -> Saving:
    """Of a run that has just begun its first attempt."""
    folder.mkdir(exist_ok=True)
    checkpoints = Checkpoints(open_store(str(folder / "checkpoints")), world, run_dir=folder)
    assert checkpoints.newest() is None
    assert checkpoints.begin_attempt(None)
    watch = Watch(signals=Signals(folder, watch_markers=True), stopping=Stopping(), ledger=Ledger(folder))
    record = describe(JOB, world, is_compiled=False)
    engine: Any = _Engine()
    return Saving(JOB, engine, checkpoints, saved=None, record=record, watch=watch, reporter=None)


def saved_twice(world: World, folder: Path) -> tuple[list[int | None], int, list[str]]:
    """(newest step after each of two saves, updates in the last manifest, folders left by retention)."""
    saving, steps = saving_in(world, folder), []
    for step in (3, 6):
        saving.save(position_at(step), num_updates=step - 1)
        steps.append(saving.saved_step)
    assert saving.saved
    found = saving.checkpoints.newest()
    assert found == saving.saved
    assert found.position == position_at(6)
    assert saving.watch.stopping.saved_step == 6
    return steps, found.num_updates, sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def test_the_newest_is_the_one_that_was_saved(tmp_path: Path) -> None:
    assert run_ranks(saved_twice, tmp_path, num_ranks=1) == [([3, 6], 5, ["step-00000006"])]


def failed_saves(world: World, folder: Path) -> list[str]:
    """How each of four saves ends, where the second cannot be written, nor any after the third."""
    saving, ends = saving_in(world, folder), []
    for step in (1, 2, 3, 4, 5, 6):
        if step in (2, 4, 5, 6):
            (folder / "checkpoints" / f"step-{step:08d}").write_text("a file where a folder must be")
        try:
            saving.save(position_at(step), num_updates=step)
            ends.append(f"newest {saving.saved_step}")
        except TransientError as error:
            ends.append(str(error))
    return ends


def test_one_failure_costs_nothing_and_three_in_a_row_end_the_run(tmp_path: Path) -> None:
    (ends,) = run_ranks(failed_saves, tmp_path, num_ranks=1)
    assert ends[:5] == ["newest 1", "newest 1", "newest 3", "newest 3", "newest 3"]
    where = f"{tmp_path}/checkpoints"
    assert ends[5].startswith(f"3 checkpoints in a row could not be written to {where}: rank 0: cannot write {where}/")


def saves_on_a_full_disk(world: World, folder: Path) -> str:
    """How the third save ends."""
    saving = saving_in(world, folder)

    def full(_store: LocalStore, path: str) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", f"{folder}/checkpoints/{path}")

    with mock.patch.object(LocalStore, "create", full):
        saving.save(position_at(1), num_updates=1)
        saving.save(position_at(2), num_updates=2)
        with pytest.raises(TransientError) as caught:
            saving.save(position_at(3), num_updates=3)
    return str(caught.value)


def test_three_saves_on_a_full_disk_end_with_what_to_do(tmp_path: Path) -> None:
    (end,) = run_ranks(saves_on_a_full_disk, tmp_path, num_ranks=1)
    assert end.startswith(
        f"3 checkpoints in a row could not be written to {tmp_path}/checkpoints: rank 0: No space left"
    )
    assert end.endswith(".safetensors; make room there (a smaller --checkpoint.keep-newest needs less)")


def save_after(world: World, folder: Path, gone: str) -> tuple[str, list[str]]:
    """How a save ends after `gone` was deleted, and what is in the run directory then."""
    saving = saving_in(world, folder / "run")
    saving.save(position_at(1), num_updates=1)
    shutil.rmtree(folder / "run" / gone)
    with pytest.raises(WillNotSucceedError) as caught:
        saving.save(position_at(2), num_updates=2)
    return str(caught.value), [path.name for path in folder.rglob("*")]


@pytest.mark.parametrize("gone", [".", "checkpoints", "checkpoints/attempts"])
def test_a_run_directory_that_was_deleted_ends_the_run(tmp_path: Path, gone: str) -> None:
    """What would be saved into a new folder could not be continued: nothing says which attempt wrote it."""
    ((message, left),) = run_ranks(save_after, tmp_path, gone, num_ranks=1)
    assert f"{tmp_path}/run" in message
    assert "was deleted or moved while the run was using it" in message
    assert "step-00000002" not in left


def test_the_hash_of_a_job_is_of_all_but_where_it_runs() -> None:
    own = fingerprint(JOB)
    assert fingerprint(replace(JOB, run_dir="elsewhere", device="cpu", threads=3)) == own
    assert fingerprint(replace(JOB, seed=9)) != own


def test_the_record_is_plain_and_has_nothing_that_decides() -> None:
    record = describe(JOB, one_world(), is_compiled=True)
    assert json.loads(json.dumps(record)) == record
    assert set(record) == {"topology", "engine", "job_sha256", "versions"}
