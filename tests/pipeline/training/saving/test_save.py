"""Saving while a run trains, on one real rank: what is committed, what failures do, and what a checkpoint records.

A run that continues where bits differ says so, and names everything that has changed.
"""

import errno
import json
import logging
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from jobs.recipes.pretrain import digits_smoke
from pipeline.checkpoints.checkpoint import Fragment
from pipeline.checkpoints.config import CheckpointConfig, Retention
from pipeline.checkpoints.manifest import CheckpointId
from pipeline.checkpoints.saves import Saves, lay_out
from pipeline.checkpoints.writer.client import Writer
from pipeline.checkpoints.writer.copies import choose_writer
from pipeline.ranks.world import World
from pipeline.training.controls import Controls
from pipeline.training.gradients import Gradients
from pipeline.training.reporting.ledger import Ledger
from pipeline.training.saving import save
from pipeline.training.saving.save import (
    BITS,
    Saving,
    bits_of,
    describe,
    differences_in_bits,
    fingerprint,
    say_bits,
    state_bytes,
    words_of_choice,
)
from pipeline.training.settings.job import EngineConfig
from pipeline.training.watchdog.stopping import Signals, Stopping, StopRequest
from pipeline.training.zero.batch_plan import plan_batch
from shards.errors import TransientError, WillNotSucceedError
from shards.store import LocalStore
from tests.rigs.checkpoints import checkpoints_of
from tests.rigs.positions import position_at
from tests.rigs.processes import one_world, run_ranks
from tests.rigs.writers import writers_of

JOB = replace(digits_smoke(), checkpoint=CheckpointConfig(keep_newest=1, asynchronous="off"))
PLAN = plan_batch(JOB.global_batch, micro_batch=16, num_ranks=1, lanes=JOB.data.lanes)
GPU_WORLD = replace(one_world(8, 16), device=torch.device("cuda", 0), local_rank=0, num_local_ranks=8)
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024"
ENGINE = {"zero_stage": 1, "precision": "bf16", "reduce_precision": "fp32", "micro_batch": 8, "is_compiled": False}
ENGINE |= {"is_tuned": False, "is_selective": False}
NOW: dict[str, Any] = {"engine": ENGINE | {"reduce_bucket": 7_500_000}, "versions": {"deepspeed": "0.19.8"}}


class _Engine:
    """Two elements of one tensor on each of two ranks, or on one."""

    def __init__(self) -> None:
        self.num_ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.shapes = {"a": (2 * self.num_ranks,)}
        self.before_update: Any = None

    def fragments(self) -> list[Fragment]:
        return [Fragment(name="a", start=2 * self.rank, length=2, slots={"master": torch.tensor([1.0, 2.0])})]


def saving_in(world: World, folder: Path, *, config: CheckpointConfig = JOB.checkpoint) -> Saving:
    """Of a run that has just begun its first attempt."""
    folder.mkdir(exist_ok=True)
    checkpoints = checkpoints_of(folder, world)
    assert checkpoints.newest() is None
    assert checkpoints.begin_attempt(None)
    controls = Controls(signals=Signals(folder, watch_markers=True), stopping=Stopping(), ledger=Ledger(folder))
    engine: Any = _Engine()
    job = replace(JOB, checkpoint=config)
    writer = Writer() if config.asynchronous != "off" else None
    chosen = choose_writer(config, writer, checkpoints.store, world, num_bytes=state_bytes(job, engine))
    record = describe(job, world, plan=PLAN, is_compiled=False)
    saves = Saves(checkpoints, chosen, Retention(keep_newest=config.keep_newest))
    return Saving(Gradients(job, PLAN, engine, world), saves, controls, saved=None, record=record, reporter=None)


def saved_twice(world: World, folder: Path, config: CheckpointConfig) -> tuple[list[int | None], int, list[str]]:
    """(newest step after each of two saves, updates in the last manifest, folders left by retention)."""
    saving, steps = saving_in(world, folder, config=config), []
    for step in (3, 6):
        saving.save(position_at(step), num_updates=step - 1)
        saving.settle()
        steps.append(saving.saved_step)
    found = saving.checkpoints.newest()
    assert found == saving.manifest()
    assert found.position == position_at(6)
    assert saving.controls.stopping.saved_step == 6
    return steps, found.num_updates, sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("asynchronous", ["on", "off"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_newest_is_the_one_that_was_saved(
    tmp_path: Path, num_ranks: int, asynchronous: Literal["on", "off"]
) -> None:
    config = replace(JOB.checkpoint, asynchronous=asynchronous)
    found = run_ranks(saved_twice, tmp_path, config, num_ranks=num_ranks)
    assert found == [([3, 6], 5, ["step-00000006"])] * num_ranks


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


def result_of(saving: Saving) -> Any:
    """The outcome of a step that adds up this one rank's flags."""
    (source,) = saving.sources
    return SimpleNamespace(sums=dict(source.read()))


def until_committed(saving: Saving, step: int) -> int:
    """Steps that are read until the save of `step` is known to be committed."""
    for number in range(1, 1_000_000):
        saving.advance(result_of(saving))
        if saving.saved_step == step:
            return number
    raise TimeoutError(f"step {step} is not committed")


def saves_while_busy(
    world: World, folder: Path, when_busy: Literal["wait", "skip"], may_be_skipped: bool
) -> list[int | None]:
    """The newest checkpoint after a save of step 1 that is held up, after one of step 2, and after both."""
    config = CheckpointConfig(asynchronous="on", when_busy=when_busy)
    saving = saving_in(world, folder, config=config)
    (pid,) = writers_of(os.getpid())
    os.kill(pid, signal.SIGSTOP)
    saving.save(position_at(1), num_updates=1)
    saving.advance(result_of(saving))
    steps = [saving.saved_step]
    if when_busy == "wait" or not may_be_skipped:
        threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()
    saving.save(position_at(2), num_updates=2, may_be_skipped=may_be_skipped)
    steps.append(saving.saved_step)
    os.kill(pid, signal.SIGCONT)
    saving.wait()
    assert (saving.stall_seconds > 0, saving.commit_seconds > 0) == (True, True)
    return [*steps, saving.saved_step]


@pytest.mark.parametrize(
    ("when_busy", "may_be_skipped", "steps"),
    [
        pytest.param("wait", True, [None, 1, 2], id="the second waits for the first"),
        pytest.param("skip", True, [None, None, 1], id="the second is left out"),
        pytest.param("skip", False, [None, 1, 2], id="the second must not be left out"),
    ],
)
def test_a_save_during_a_save(tmp_path: Path, when_busy: str, may_be_skipped: bool, steps: list[int | None]) -> None:
    assert run_ranks(saves_while_busy, tmp_path, when_busy, may_be_skipped, num_ranks=1) == [steps]


def warnings_while_busy(world: World, folder: Path) -> list[str]:
    """The warnings of three saves that are skipped during one."""
    saving = saving_in(world, folder, config=CheckpointConfig(asynchronous="on", when_busy="skip"))
    saving.reporter = mock.Mock()
    (pid,) = writers_of(os.getpid())
    os.kill(pid, signal.SIGSTOP)
    saving.save(position_at(1), num_updates=1)
    with mock.patch("pipeline.training.saving.save.log") as log:
        for step in (2, 3, 4):
            saving.save(position_at(step), num_updates=step)
    os.kill(pid, signal.SIGCONT)
    saving.settle()
    return [text % words for (text, *words), _ in log.warning.call_args_list for words in [tuple(words)]]


def test_skipped_saves_are_said_once_for_each_that_is_written(tmp_path: Path) -> None:
    (said,) = run_ranks(warnings_while_busy, tmp_path, num_ranks=1)
    assert said == ["checkpoint of step 2 skipped: that of step 1 is still being written"]


def failed_beside_training(world: World, folder: Path) -> tuple[list[int | None], int, str]:
    """(newest after each of four saves, failures, how the last one ends): their writers are killed but for the third's,
    and two failures in a row are too many."""
    saving = saving_in(world, folder, config=CheckpointConfig(asynchronous="on", max_failed=2))
    steps: list[int | None] = []
    for step in (1, 2, 3, 4):
        for pid in writers_of(os.getpid()) if step != 2 else ():
            os.kill(pid, signal.SIGSTOP)
        saving.save(position_at(step), num_updates=step)
        for pid in writers_of(os.getpid()) if step != 2 else ():
            os.kill(pid, signal.SIGKILL)
        try:
            saving.wait()
        except TransientError as error:
            return steps, saving.num_failed, str(error)
        steps.append(saving.saved_step)
    return steps, saving.num_failed, ""


def test_failures_in_a_row_are_counted_and_end_the_run(tmp_path: Path) -> None:
    ((steps, num_failed, end),) = run_ranks(failed_beside_training, tmp_path, num_ranks=1)
    assert (steps, num_failed) == ([None, 2, 2], 3)
    assert end.startswith(
        f"2 checkpoints in a row could not be written to {tmp_path}/checkpoints: the checkpoint writer"
    )
    assert end.endswith("was killed by SIGKILL")


def fulfilled_at_the_commit(world: World, folder: Path) -> list[bool]:
    """Whether RUN/SAVE is there: while its checkpoint is written, and once it is committed."""
    saving = saving_in(world, folder, config=CheckpointConfig(asynchronous="on"))
    (folder / "SAVE").touch()
    saving.save(position_at(1), num_updates=1)
    there = [(folder / "SAVE").exists()]
    assert saving.controls.request() == StopRequest.NOTHING
    assert until_committed(saving, 1) > 1
    return [*there, (folder / "SAVE").exists()]


def test_a_request_to_save_is_fulfilled_by_the_commit(tmp_path: Path) -> None:
    assert run_ranks(fulfilled_at_the_commit, tmp_path, num_ranks=1) == [[True, False]]


def expected_bytes(world: World, folder: Path) -> tuple[int, int]:
    """Of a rank's file with all moments, expected and real."""
    saving = saving_in(world, folder)
    (one,) = saving.engine.fragments()
    full = replace(one, slots=dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), one.slots["master"]))
    return state_bytes(saving.job, saving.engine), lay_out([full]).head.num_bytes


def test_the_buffer_has_its_size_before_the_optimiser_has_its_moments(tmp_path: Path) -> None:
    ((expected, real),) = run_ranks(expected_bytes, tmp_path, num_ranks=1)
    assert expected == real


def save_after(world: World, folder: Path, gone: str, has_another: bool) -> tuple[str, list[str]]:
    """How a save ends after `gone` was deleted, and another run began there, and what is in the run directory then."""
    saving = saving_in(world, folder / "run")
    saving.save(position_at(1), num_updates=1)
    shutil.rmtree(folder / "run" / gone)
    (folder / "run" / gone).mkdir() if has_another else None
    with pytest.raises(WillNotSucceedError) as caught:
        saving.save(position_at(2), num_updates=2)
    return str(caught.value), [path.name for path in folder.rglob("*")]


def save_again_after(world: World, folder: Path) -> list[str]:
    """The committed checkpoints of a run whose checkpoints were deleted, after each of two more saves, and whether it
    is asked for the second one."""
    saving = saving_in(world, folder / "run")
    saving.save(position_at(1), num_updates=1)
    shutil.rmtree(folder / "run" / "checkpoints")
    saving.save(position_at(2), num_updates=2)
    found = [str(saving.num_failed), saving.controls.request().name]
    saving.save(position_at(3), num_updates=3)
    resumed = saving.checkpoints.newest()
    return [*found, saving.controls.request().name, str(saving.saved_step), str(resumed and resumed.id.step)]


def test_deleted_checkpoints_are_saved_again_from_memory(tmp_path: Path) -> None:
    ((num_failed, then, after, saved, resumed),) = run_ranks(save_again_after, tmp_path, num_ranks=1)
    assert (num_failed, then, after) == ("1", "SAVE", "NOTHING")
    assert (saved, resumed) == ("3", "3")


@pytest.mark.parametrize(
    ("gone", "has_another"),
    [
        (".", False),
        pytest.param(".", True, id="another run, whose folder may have the same inode"),
        ("checkpoints/attempts", False),
    ],
)
def test_a_run_directory_that_was_deleted_ends_the_run(tmp_path: Path, gone: str, has_another: bool) -> None:
    """What would be saved into a new folder could not be continued: nothing says which attempt wrote it."""
    ((message, left),) = run_ranks(save_after, tmp_path, gone, has_another, num_ranks=1)
    assert f"{tmp_path}/run" in message
    assert "was deleted or moved while the run was using it" in message
    assert "step-00000002" not in left
    assert "attempts" not in left or not has_another


def test_the_hash_of_a_job_is_of_all_but_where_it_runs() -> None:
    own = fingerprint(JOB)
    assert fingerprint(replace(JOB, run_dir="elsewhere", device="cpu", threads=3)) == own
    assert fingerprint(replace(JOB, seed=9)) != own


def test_the_record_is_plain_and_has_the_micro_batch_that_was_taken() -> None:
    record = describe(JOB, one_world(), plan=PLAN, is_compiled=True)
    assert json.loads(json.dumps(record)) == record
    assert set(record) == {"topology", "engine", "job_sha256", "versions"}
    assert (JOB.micro_batch, record["engine"]["micro_batch"]) == (0, 16)


def seconds_of_a_save(world: World, folder: Path) -> tuple[float, float]:
    """(the ledger's seconds of a save that training waits for, those that passed)."""
    saving, began = saving_in(world, folder), time.monotonic()
    saving.save(position_at(1), num_updates=1)
    return saving.controls.ledger.seconds["checkpoint"], time.monotonic() - began


def test_the_ledger_counts_a_save_that_is_waited_for_once(tmp_path: Path) -> None:
    ((counted, passed),) = run_ranks(seconds_of_a_save, tmp_path, num_ranks=1)
    assert 0 < counted <= passed


def stalls_of_two_saves(world: World, folder: Path) -> tuple[float, float, float]:
    """(how long the first of two saves took, its stall, the stall of the second, which waits for the first's end)."""
    saving = saving_in(world, folder, config=CheckpointConfig(asynchronous="on"))
    (pid,) = writers_of(os.getpid())
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    saving.save(position_at(1), num_updates=1)
    passed, wait = time.monotonic() - began, saving.saves.wait

    def wait_for_a_stopped_writer() -> Any:
        threading.Event().wait(0.6)
        os.kill(pid, signal.SIGCONT)
        return wait()

    with mock.patch.object(saving.saves, "wait", wait_for_a_stopped_writer):
        saving.save(position_at(2), num_updates=2)
    first = saving.stall_seconds
    until_committed(saving, 2)
    return passed, first, saving.stall_seconds


def test_the_stall_of_a_checkpoint_is_its_own(tmp_path: Path) -> None:
    """The interval between checkpoints is computed from it."""
    ((passed, first, second),) = run_ranks(stalls_of_two_saves, tmp_path, num_ranks=1)
    assert 0 < first <= passed
    assert second >= 0.5


def errors_of_a_failed_save(world: World, folder: Path) -> list[str]:
    """What a rank logs about a save that fails on the second one."""
    saving = saving_in(world, folder)
    if world.rank:
        draft = CheckpointId(step=1, attempt=saving.checkpoints.attempt.token)
        (folder / "checkpoints" / draft.folder / "rank-00001.safetensors").mkdir(parents=True)
    with mock.patch("pipeline.training.saving.save.log") as log:
        saving.save(position_at(1), num_updates=1)
    return [text % tuple(words) for (text, *words), _ in log.error.call_args_list]


def test_a_failed_save_is_one_message(tmp_path: Path) -> None:
    """Under Slurm, all ranks write to one log."""
    first, second = run_ranks(errors_of_a_failed_save, tmp_path, num_ranks=2)
    assert [said.partition(": rank 1: ")[0] for said in first] == ["checkpoint of step 1 was not committed"]
    assert second == []


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A rank on the second node of two with eight GPUs."""
    (tmp_path / "version").write_text(f"{DRIVER}\nGCC version:  gcc version 12.2.0\n")
    monkeypatch.setattr(save, "_NVIDIA", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    return GPU_WORLD


def test_a_checkpoint_records_model_layout_driver_and_choice(gpu: World) -> None:
    assert bits_of(gpu, deterministic=True) == {
        "device_type": "cuda",
        "device": "NVIDIA H100 80GB HBM3",
        "driver": DRIVER,
        "torch": torch.__version__,
        "num_ranks": 16,
        "ranks_per_node": 8,
        "num_threads": 1,
        "deterministic": True,
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, "", id="the same"),
        pytest.param({"device": "NVIDIA A100"}, "device NVIDIA A100, now NVIDIA H100 80GB HBM3", id="GPU"),
        pytest.param({"driver": "535"}, f"driver 535, now {DRIVER}", id="driver"),
        pytest.param({"ranks_per_node": 4}, "ranks per node 4, now 8", id="layout"),
        pytest.param({"deterministic": False}, "engine.deterministic False, now True", id="choice"),
        pytest.param({"torch": "2.12.0"}, f"PyTorch 2.12.0, now {torch.__version__}", id="version"),
        pytest.param(
            {"num_ranks": 8, "num_threads": 2},
            "ranks 8, now 16; threads per rank 2, now 1",
            id="two",
        ),
    ],
)
def test_what_changed_is_said(gpu: World, changes: dict[str, Any], expected: str) -> None:
    now = bits_of(gpu, deterministic=True)
    line = differences_in_bits({BITS: now | changes}, {BITS: now})
    assert line == (f"this run will equal an unbroken one to rounding at best: {expected}" if expected else "")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"zero_stage": 3}, "engine.zero_stage 3, now 1"),
        ({"reduce_precision": "bf16"}, "engine.reduce_precision bf16, now fp32"),
        ({"micro_batch": 4, "is_compiled": True}, "images per pass 4, now 8; compiled blocks True, now False"),
        ({"activation_checkpointing": "full"}, ""),
        ({"is_selective": True}, "selective recomputation in compiled blocks True, now False"),
        ({"is_tuned": True}, ""),  # the same bits on a CPU
    ],
)
def test_so_is_what_changed_in_the_engine(changes: dict[str, Any], expected: str) -> None:
    line = differences_in_bits(NOW | {"engine": NOW["engine"] | changes}, NOW)
    assert line == (f"this run will equal an unbroken one to rounding at best: {expected}" if expected else "")


@pytest.mark.parametrize("record", [{}, {BITS: None}, {BITS: []}, {BITS: {}}])
def test_nothing_is_said_of_what_is_not_recorded(record: dict[str, Any]) -> None:
    assert differences_in_bits(record, {BITS: bits_of(one_world(), deterministic=False)}) == ""


def test_on_a_cpu_the_choice_and_the_nodes_change_nothing() -> None:
    before, now = (bits_of(one_world(), deterministic=choice) for choice in (False, True))
    assert differences_in_bits({BITS: before | {"ranks_per_node": 2}}, {BITS: now}) == ""
    assert words_of_choice(one_world(), deterministic=True) == ""
    assert now["device"], "the CPU's model"


def test_rank_0_says_it_once(gpu: World, caplog: pytest.LogCaptureFixture) -> None:
    record = {BITS: bits_of(gpu, deterministic=False)}
    with caplog.at_level(logging.INFO):
        on, off = (EngineConfig(deterministic=choice) for choice in (True, False))
        assert say_bits(gpu, on, {}, resumed=record) == bits_of(gpu, deterministic=True)
        assert not caplog.messages
        say_bits(replace(gpu, rank=0), on, {}, resumed=record)
        say_bits(replace(gpu, rank=0), off, {}, resumed={})
    assert caplog.messages == [
        "deterministic kernels: PyTorch promises the bits of an unbroken run on this GPU model and node layout",
        "this run will equal an unbroken one to rounding at best: engine.deterministic False, now True",
        "a resumed run will equal an unbroken one to rounding; --engine.deterministic asks PyTorch for equal bits",
    ]
