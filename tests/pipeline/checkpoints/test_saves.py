"""A save from its layout to its commit, agreed by the sums of a step: each decision, and one and two real ranks."""

import errno
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load

from jobs.recipes.pretrain import digits_smoke
from pipeline.checkpoints.checkpoint import Fragment
from pipeline.checkpoints.commit import draft_manifest
from pipeline.checkpoints.config import CheckpointConfig, Retention
from pipeline.checkpoints.manifest import MANIFEST_NAME, CheckpointId, CheckpointManifest
from pipeline.checkpoints.rank_file_out import Piece
from pipeline.checkpoints.saves import (
    COMMITTED,
    FAILED,
    NAMES,
    OVERTAKEN,
    WRITTEN,
    RankFile,
    Saved,
    SavePhase,
    Saves,
    StepDecision,
    lay_out,
    verdict,
)
from pipeline.checkpoints.writer.client import Writer
from pipeline.checkpoints.writer.copies import choose_writer
from pipeline.models.weights.safetensors_head import FLOAT_BYTES
from pipeline.ranks.collectives import sums
from pipeline.ranks.world import World
from pipeline.training.saving.save import saved_job
from shards.errors import StorageError, WillNotSucceedError
from shards.store import LocalStore
from tests.rigs.checkpoints import checkpoints_of
from tests.rigs.positions import position_at
from tests.rigs.processes import run_ranks
from tests.rigs.writers import writers_of

_MOST_STEPS = 100_000


def saves_in(world: World, folder: Path, asynchronous: Literal["on", "off"] = "on") -> Saves:
    """Of a run that has just begun."""
    folder.mkdir(exist_ok=True)
    checkpoints = checkpoints_of(folder, world)
    assert checkpoints.newest() is None
    assert checkpoints.begin_attempt(None)
    config = CheckpointConfig(asynchronous=asynchronous)
    writer = Writer() if asynchronous == "on" else None
    chosen = choose_writer(config, writer, checkpoints.store, world, num_bytes=1000)
    return Saves(checkpoints, chosen, Retention(keep_newest=1))


def state_of(world: World, value: float = 1.0) -> RankFile:
    views = {"master": torch.full((2,), float(value)), "exp_avg": torch.full((2,), -float(value))}
    return lay_out([Fragment(name="a", start=2 * world.rank, length=2, slots=views)])


def draft_of(saves: Saves, step: int) -> CheckpointManifest:
    return draft_manifest(
        CheckpointId(step=step, attempt=saves.checkpoints.attempt.token),
        shapes={"a": (2 * saves.checkpoints.world.num_ranks,)},
        position=position_at(step),
        num_updates=step,
        job=saved_job(digits_smoke()),
        record={},
    )


def trained_until_the_end(saves: Saves) -> tuple[Saved, int]:
    """The end of a save, and the number of steps, each of which reduces once, as training does."""
    unread: list[Mapping[str, float]] = []
    for step in range(_MOST_STEPS):
        flags = saves.flags()
        unread.append(dict(zip(NAMES, sums([flags[n] for n in NAMES], device=torch.device("cpu")), strict=True)))
        ended = saves.advance(unread.pop(0)) if len(unread) > 1 else None  # one step late
        if ended:
            return ended, step
    raise TimeoutError("the save does not end")


def counted(function: Any, counts: list[str]) -> Any:
    def counting(*arguments: Any, **named: Any) -> Any:
        counts.append(function.__name__)
        return function(*arguments, **named)

    return counting


def agreed_in_steps(world: World, folder: Path) -> tuple[list[int], list[str]]:
    """(steps committed, collectives beside one reduction a step) of two saves."""
    saves, committed, others = saves_in(world, folder), [], list[str]()
    for name in ("all_gather", "broadcast", "barrier"):
        setattr(dist, name, counted(getattr(dist, name), others))
    for step in (4, 8):
        saves.begin(state_of(world, step), draft_of(saves, step))
        assert saves.phase is SavePhase.WRITING
        ended, _ = trained_until_the_end(saves)
        assert ended.fault == ""
        assert ended.seconds > 0
        committed.append(ended.id.step)
    saves.settle()
    found = saves.checkpoints.manifest(ended.id)
    assert found.id.step == 8
    if world.is_first:  # which retires the first
        assert len(list((folder / "checkpoints").glob("step-*"))) == 1
    return committed, others


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_ranks_agree_in_the_sums_of_their_steps(tmp_path: Path, num_ranks: int) -> None:
    """No barrier, and no collective of its own."""
    assert run_ranks(agreed_in_steps, tmp_path, num_ranks=num_ranks) == [([4, 8], [])] * num_ranks


def waited(world: World, folder: Path, asynchronous: Literal["on", "off"]) -> tuple[str, list[Piece]]:
    saves = saves_in(world, folder, asynchronous)
    assert saves.wait() is None
    saves.begin(state_of(world), draft_of(saves, 4))
    ended = saves.wait()
    assert ended
    assert not saves.is_under_way
    return ended.fault, sorted(saves.checkpoints.manifest(ended.id).files)  # type: ignore[arg-type]


@pytest.mark.parametrize("asynchronous", ["on", "off"])
def test_waiting_ends_with_the_commit(tmp_path: Path, asynchronous: str) -> None:
    files = ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert run_ranks(waited, tmp_path, asynchronous, num_ranks=2) == [("", files)] * 2


def killed_writer(world: World, folder: Path) -> tuple[str, str]:
    """How a save ends whose second rank's writer is killed, and how the next one does."""
    saves = saves_in(world, folder)
    (pid,) = writers_of(os.getpid())
    os.kill(pid, signal.SIGSTOP)
    saves.begin(state_of(world), draft_of(saves, 4))
    os.kill(pid, signal.SIGKILL if world.rank else signal.SIGCONT)
    failed, _ = trained_until_the_end(saves)
    saves.begin(state_of(world), draft_of(saves, 8))
    ended = saves.wait()
    assert ended
    return failed.fault.replace(str(pid), "PID"), ended.fault


def test_all_ranks_know_why_a_save_failed_and_the_next_one_succeeds(tmp_path: Path) -> None:
    first, second = run_ranks(killed_writer, tmp_path, num_ranks=2)
    assert first[0].startswith("the checkpoint writer (process ")
    assert first[0].endswith(" was killed by SIGKILL")
    assert (first[1], second[1]) == ("", "")
    assert second[0] == "the checkpoint writer (process PID) was killed by SIGKILL"
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000008"]


def room_after_a_failure(world: World, folder: Path) -> list[list[str]]:
    """The files of checkpoints after a save whose second rank fails, and after the next one, which fails alike."""
    saves, found = saves_in(world, folder, "off"), []
    for step in (4, 8):
        if world.rank:
            (folder / "checkpoints" / f"step-{step:08d}" / f"attempt-{saves.checkpoints.attempt.token}").mkdir(
                parents=True, exist_ok=True
            )
            (folder / "checkpoints" / draft_of(saves, step).id.folder / "rank-00001.safetensors").mkdir()
        saves.begin(state_of(world), draft_of(saves, step))
        ended = saves.wait()
        assert ended
        assert ended.fault.startswith("rank 1: ")
        dist.barrier()
        found.append(sorted(f"{path.parts[-3]}/{path.name}" for path in (folder / "checkpoints").rglob("rank-00000.*")))
        dist.barrier()
    return found


def test_a_save_first_deletes_the_files_of_one_that_failed(tmp_path: Path) -> None:
    """On a full disk they would make the next one fail, too, and each one more."""
    found, _ = run_ranks(room_after_a_failure, tmp_path, num_ranks=2)
    names = ["rank-00000.json", "rank-00000.safetensors"]
    assert found == [[f"step-{step:08d}/{name}" for name in names] for step in (4, 8)]


def killed_committer(world: World, folder: Path) -> tuple[str, str]:
    """As `killed_writer`, for rank 0's writer while it is to commit."""
    saves = saves_in(world, folder)
    (pid,) = writers_of(os.getpid())
    saves.begin(state_of(world), draft_of(saves, 4))
    while saves.writer.is_busy:
        saves.flags()
    if world.is_first:
        os.kill(pid, signal.SIGSTOP)
    flags = saves.flags()
    found = sums([flags[name] for name in NAMES], device=world.device)
    assert saves.advance(dict(zip(NAMES, found, strict=True))) is None
    assert saves.phase is SavePhase.COMMITTING
    if world.is_first:
        os.kill(pid, signal.SIGKILL)
    failed, _ = trained_until_the_end(saves)
    saves.begin(state_of(world), draft_of(saves, 8))
    ended = saves.wait()
    assert ended
    return failed.fault, ended.fault


def test_a_writer_that_is_killed_before_its_commit_fails_the_save(tmp_path: Path) -> None:
    first, second = run_ranks(killed_committer, tmp_path, num_ranks=2)
    assert first == second
    assert (first[0].endswith(" was killed by SIGKILL"), first[1]) == (True, "")


def overtaken(world: World, folder: Path) -> str:
    """How a save ends during which a later attempt begins."""
    saves = saves_in(world, folder)
    saves.begin(state_of(world), draft_of(saves, 4))
    if world.is_first:
        saves.checkpoints.store.write("attempts/0002-ffffffff.json", b"{}")
    dist.barrier()
    with pytest.raises(WillNotSucceedError) as caught:
        trained_until_the_end(saves)
    return str(caught.value)


def test_all_ranks_of_an_overtaken_attempt_end_with_the_reason(tmp_path: Path) -> None:
    first, second = run_ranks(overtaken, tmp_path, num_ranks=2)
    assert first == second
    assert "ends here: a later one, 0002-ffffffff, took over the run" in first
    assert list((tmp_path / "checkpoints").rglob("MANIFEST.json")) == []


def begun_twice(world: World, folder: Path) -> str:
    saves = saves_in(world, folder)
    saves.begin(state_of(world), draft_of(saves, 4))
    with pytest.raises(AssertionError) as caught:
        saves.begin(state_of(world), draft_of(saves, 5))
    saves.wait()
    return str(caught.value)


def test_one_save_at_a_time(tmp_path: Path) -> None:
    (said,) = run_ranks(begun_twice, tmp_path, num_ranks=1)
    assert said.startswith("a save begins while that of step 4 is running")


def saved_again_after_a_lost_answer(world: World, folder: Path) -> tuple[list[str], int]:
    """(how three saves end, the newest step that verifies): the first is committed, but the store's answer is lost; the
    second, of the same step, and the third find no room."""
    saves, faults = saves_in(world, folder, "off"), list[str]()
    create, write = LocalStore.create, LocalStore.write

    def unanswered(store: LocalStore, path: str, data: bytes) -> None:
        write(store, path, data)
        if path.endswith(MANIFEST_NAME):
            raise StorageError("no answer")

    def full(store: LocalStore, path: str) -> Any:
        if path.endswith(".safetensors"):
            raise OSError(errno.ENOSPC, "No space left on device", path)
        return create(store, path)

    for step, name, function in ((4, "write", unanswered), (4, "create", full), (8, "create", full)):
        with mock.patch.object(LocalStore, name, function):
            saves.begin(state_of(world), draft_of(saves, step))
            ended = saves.wait()
        assert ended
        faults.append(ended.fault)
    newest = saves.checkpoints.newest()
    assert newest
    return faults, newest.id.step


def test_a_checkpoint_that_may_be_committed_is_not_cleaned_up(tmp_path: Path) -> None:
    """A run saves its last step again if the save has failed; that one may exist all the same."""
    ((faults, newest),) = run_ranks(saved_again_after_a_lost_answer, tmp_path, num_ranks=1)
    assert [fault.partition(":")[0] for fault in faults] == ["manifest", "rank 0", "rank 0"]
    assert newest == 4


@pytest.mark.parametrize(
    ("phase", "sums", "expected"),
    [
        pytest.param(SavePhase.NOTHING, {WRITTEN: 3, FAILED: 1}, StepDecision.OPEN, id="late flags of the save before"),
        pytest.param(SavePhase.WRITING, {WRITTEN: 2}, StepDecision.OPEN, id="one still writes"),
        pytest.param(SavePhase.WRITING, {WRITTEN: 3}, StepDecision.WRITTEN, id="all have written"),
        pytest.param(
            SavePhase.WRITING, {WRITTEN: 1, FAILED: 1}, StepDecision.OPEN, id="one failed, one may still read its copy"
        ),
        pytest.param(SavePhase.WRITING, {WRITTEN: 2, FAILED: 1}, StepDecision.FAILED, id="one failed"),
        pytest.param(
            SavePhase.WRITING, {WRITTEN: 1, FAILED: 1, OVERTAKEN: 1}, StepDecision.OVERTAKEN, id="the end comes first"
        ),
        pytest.param(SavePhase.COMMITTING, {WRITTEN: 3}, StepDecision.OPEN, id="late flags of the phase before"),
        pytest.param(SavePhase.COMMITTING, {COMMITTED: 1}, StepDecision.COMMITTED, id="rank 0 has committed"),
        pytest.param(SavePhase.COMMITTING, {FAILED: 1}, StepDecision.FAILED, id="the manifest could not be written"),
        pytest.param(SavePhase.COMMITTING, {OVERTAKEN: 1}, StepDecision.OVERTAKEN, id="a later attempt was found"),
    ],
)
def test_what_the_sums_decide(phase: SavePhase, sums: dict[str, float], expected: StepDecision) -> None:
    assert verdict(phase, dict.fromkeys(NAMES, 0.0) | sums, num_ranks=3) is expected


def fragment(name: str, start: int, values: list[float]) -> Fragment:
    tensor = torch.tensor(values)
    return Fragment(name=name, start=start, length=len(values), slots={"master": tensor, "exp_avg": -tensor})


def test_offsets_point_at_the_values() -> None:
    fragments = [fragment("a", 3, [1.0, 2.0]), fragment("b", 0, [5.0, 6.0, 7.0])]
    laid_out = lay_out(fragments)
    data = b"".join(laid_out.parts())
    assert len(data) == laid_out.head.num_bytes
    expected = {f"{f.name} {slot}": view for f in fragments for slot, view in f.slots.items()}
    assert len(laid_out.pieces) == len(expected)
    for name, slot, offset, _, length in laid_out.pieces:
        found = torch.frombuffer(bytearray(data[offset : offset + length * FLOAT_BYTES]), dtype=torch.float32)
        assert torch.equal(found, expected[f"{name} {slot}"])


@pytest.mark.parametrize("names", [["a"], ["a", "bc", "def"], [], ['ein\u00e9 "name"']])
def test_the_file_is_one_that_safetensors_reads(names: list[str]) -> None:
    fragments = [fragment(name, 0, [1.0, float(number)]) for number, name in enumerate(names)]
    laid_out = lay_out(fragments)
    assert len(laid_out.head.data) % 8 == 0
    found = load(b"".join(laid_out.parts()))
    assert set(found) == {f"{slot}:{name}" for name in names for slot in ("master", "exp_avg")}
    for one in fragments:
        assert torch.equal(found[f"exp_avg:{one.name}"], one.slots["exp_avg"])


def test_nothing_is_copied_before_it_is_written() -> None:
    one = fragment("a", 0, [1.0, 2.0])
    laid_out = lay_out([one])
    one.slots["master"].fill_(9.0)
    assert list(load(b"".join(laid_out.parts()))["master:a"]) == [9.0, 9.0]


def test_a_moment_in_bf16_is_widened() -> None:
    moment = torch.randn(5, generator=torch.Generator().manual_seed(1)).bfloat16()
    laid_out = lay_out([Fragment(name="a", start=0, length=5, slots={"master": torch.ones(5), "exp_avg": moment})])
    found = load(b"".join(laid_out.parts()))["exp_avg:a"]
    assert found.dtype == torch.float32
    assert torch.equal(found.bfloat16(), moment)
