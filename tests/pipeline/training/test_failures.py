"""What a run does when its data, an evaluation or a side output fails: nothing that was trained is lost by it."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from jobs import exit_codes
from jobs.recipes.pretrain import digits_smoke
from pipeline.checkpoints.config import CheckpointConfig
from pipeline.data.batches import Batch
from pipeline.data.stream import BatchStream
from pipeline.evaluation.scores import Scores
from pipeline.ranks.world import World
from pipeline.training.controls import Controls
from pipeline.training.loop import Loop, open_loop
from pipeline.training.prepare import prepare
from pipeline.training.reporting.ledger import Ledger
from pipeline.training.reporting.metrics import read_metrics
from pipeline.training.scoring import HeldOut
from pipeline.training.settings.job import EngineConfig, TrainingJob
from pipeline.training.settings.schedule import ScheduleConfig
from pipeline.training.watchdog.stopping import Signals, Stopping
from shards.errors import InvalidDataError, StorageError, WillNotSucceedError
from shards.files.local_files import read_lines
from tests.rigs.checkpoints import checkpoints_of
from tests.rigs.datasets import packed_folders
from tests.rigs.forked_ranks import GOES_ON
from tests.rigs.kills import step_at_least, wait_until
from tests.rigs.processes import run_ranks
from tests.rigs.training import losses, pretrain_words, resumed_steps, run, start

FAILS, STEPS = 5, 8  # the data of the step after FAILS cannot be had
FAULTS = {
    "a store that stays away": StorageError("the store is away"),
    "a terminal fault": WillNotSucceedError("too many samples"),
    "a damaged file": InvalidDataError("no tar"),
    "an error that nobody expects": OSError(5, "Input/output error"),
}


def job_of(url: str, run_dir: Path, *, zero_stage: int, precision: str, every_steps: int) -> TrainingJob:
    base = digits_smoke()
    return replace(
        base,
        run_dir=str(run_dir),
        model=replace(base.model, width=16, depth=1, mlp_width=32, num_heads=2),
        data=replace(base.data, url=url, num_threads=1),
        steps=STEPS,
        global_batch=32,
        schedule=ScheduleConfig(),
        ema_decay=0.9,
        engine=EngineConfig(compile="off", precision=precision, zero_stage=zero_stage),  # type: ignore[arg-type]
        checkpoint=CheckpointConfig(asynchronous="off", every_steps=every_steps),
    )


def trained(world: World, job: TrainingJob, fault: Exception | None) -> tuple[str, str, int]:
    """Trains until the data of the last rank fails: the error's class and text on this rank, and the loop's step."""
    take = BatchStream.__next__

    def failing(stream: BatchStream) -> Batch:
        if fault and world.rank == world.num_ranks - 1 and stream.typed_position.next_step == FAILS:
            raise fault
        return take(stream)

    BatchStream.__next__ = failing  # type: ignore[assignment,method-assign]
    try:
        with opened(world, job) as loop:
            try:
                loop.run()
            except Exception as error:
                return type(error).__name__, str(error), loop.step
            return "", "", loop.step
    finally:
        BatchStream.__next__ = take  # type: ignore[method-assign]


@contextmanager
def opened(world: World, job: TrainingJob) -> Iterator[Loop]:
    """The loop of a new run."""
    run_dir = Path(job.run_dir)
    run_dir.mkdir(exist_ok=True)
    prepared, checkpoints = prepare(job, world), checkpoints_of(run_dir, world)
    checkpoints.begin_attempt(None)
    controls = Controls(signals=Signals(run_dir, watch_markers=True), stopping=Stopping(), ledger=Ledger(run_dir))
    with open_loop(prepared, checkpoints, controls, None, None, before=None) as loop:
        yield loop


def states(run_dir: Path) -> dict[str, str]:
    """The hash of each rank's file of the checkpoint of step FAILS."""
    (folder,) = (run_dir / "checkpoints").glob(f"step-{FAILS:08d}/*")
    assert (folder / "MANIFEST.json").exists()
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("rank-*")}


@pytest.mark.parametrize(
    ("num_ranks", "zero_stage", "precision", "what"),
    [
        (2, 3, "fp32", "a store that stays away"),
        pytest.param(1, 1, "fp32", "a terminal fault", marks=pytest.mark.long),
        pytest.param(2, 1, "bf16", "a damaged file", marks=pytest.mark.long),
        pytest.param(2, 2, "fp32", "an error that nobody expects", marks=pytest.mark.long),
    ],
)
def test_the_last_finished_step_is_saved_before_data_that_fails_ends_the_run(
    digits_url: str, tmp_path: Path, num_ranks: int, zero_stage: int, precision: str, what: str
) -> None:
    """On all ranks, with the weights of an unbroken run; the error keeps its family."""
    job = partial(job_of, digits_url, zero_stage=zero_stage, precision=precision)
    fault = FAULTS[what]
    *others, own = run_ranks(trained, job(tmp_path / "broken", every_steps=0), fault, num_ranks=num_ranks)
    assert own == (type(fault).__name__, str(fault), FAILS)
    family = WillNotSucceedError if isinstance(fault, WillNotSucceedError | InvalidDataError) else "TransientError"
    for kind, text, step in others:
        assert (kind, step) == (getattr(family, "__name__", family), FAILS)
        assert text == f"the data of rank {num_ranks - 1} failed: {fault}"
    run_ranks(trained, job(tmp_path / "whole", every_steps=FAILS), None, num_ranks=num_ranks)
    assert states(tmp_path / "broken") == states(tmp_path / "whole")


def broken(what: str, url: str) -> None:
    """Takes the dataset away, or all but the head of its last shard, until it is called again."""
    dataset, aside = Path(url), Path(f"{url}-aside")
    if what == "it vanishes":
        dataset, aside = (dataset, aside) if dataset.exists() else (aside, dataset)
        dataset.rename(aside)
        return
    shard = max(dataset.rglob("*.tar"))
    if aside.exists():
        aside.replace(shard)
    else:
        aside.write_bytes(shard.read_bytes())
        os.truncate(shard, 512)


def scored(world: World, job: TrainingJob, what: str, at: int) -> int:
    """Trains while the evaluation after step `at` cannot read its dataset; the number of failures on this rank."""

    def scores(held_out: HeldOut, step: int) -> Scores | None:
        for is_before in (True, False):
            if step == at and world.is_first:
                broken(what, job.evaluation.url)
            dist.barrier()
            if is_before:
                found = measured(held_out, step)
        return found

    measured, HeldOut.scores = HeldOut.scores, scores  # type: ignore[assignment,method-assign]
    try:
        with opened(world, job) as loop:
            loop.run()
            return loop.held_out.num_failed
    finally:
        HeldOut.scores = measured  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("what", "at", "num_failed"),
    [
        pytest.param("it vanishes", 4, 1, id="it vanishes"),
        pytest.param("one shard is short", STEPS, 2, id="one shard is short at the end, for the averages as well"),
    ],
)
def test_an_evaluation_that_fails_is_left_out_with_an_alarm_and_the_next_one_is_made(
    tmp_path: Path, what: str, at: int, num_failed: int
) -> None:
    """Even if only one of the ranks cannot read its images."""
    url, run_dir = str(packed_folders(tmp_path, images_a_class=12)), tmp_path / "run"
    job = job_of(url, run_dir, zero_stage=2, precision="fp32", every_steps=0)
    job = replace(
        job,
        data=replace(job.data, lanes=4),
        evaluation=replace(job.evaluation, url=f"{url}-test", every_steps=2, batch_size=4),
    )
    shutil.copytree(url, job.evaluation.url)
    assert run_ranks(scored, job, what, at, num_ranks=2) == [num_failed] * 2
    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines if "test_accuracy" in line] == [one for one in (2, 4, 6, 8) if one != at]
    assert [(line["step"], line["evaluation/failed"]) for line in lines if "evaluation/failed" in line] == [
        (at, num_failed)
    ]
    alarms = read_lines(run_dir / "guard.jsonl", is_usable=lambda _: True).objects
    assert [(one["step"], one["kind"], one["action"]) for one in alarms] == [
        (at, "evaluation_failed", "skipped")
    ] * num_failed
    assert all(job.evaluation.url in one["reason"] for one in alarms)
    assert len(list((run_dir / "checkpoints").glob(f"step-{STEPS:08d}/*/MANIFEST.json"))) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "code", "family"),
    [
        ("its shards are cut off", exit_codes.WILL_NOT_SUCCEED, "could not be used"),
        ("it is removed", exit_codes.CRASH, "run the same command to continue"),
    ],
)
def test_a_run_whose_dataset_breaks_ends_saved_and_continues_once_it_is_whole(
    digits_url: str, tmp_path: Path, what: str, code: int, family: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both ranks, with a writer of checkpoints beside each."""
    url, run_dir = tmp_path / "digits", tmp_path / "run"
    shutil.copytree(digits_url, url)
    options = ("--steps", "90", "--checkpoint.every-steps", "0", "--data.window-blocks", "1", "--data.lanes", "2")
    words = pretrain_words(str(url), run_dir, *options)
    ranks = start(words, num_ranks=2, log_dir=tmp_path, stands_after=6)
    assert wait_until(ranks, step_at_least(6), run_dir)
    if what == "it is removed":
        url.rename(tmp_path / "aside")
    else:
        for shard in url.rglob("*.tar"):
            os.truncate(shard, 512)
    (tmp_path / GOES_ON).touch()
    assert ranks.wait() == code
    assert [process.returncode for process in ranks.processes] == [code] * 2
    said = " ".join(capfd.readouterr().err.split()) + (tmp_path / "rank-1.log").read_text()
    assert family in said
    saved = [int(path.parent.parent.name.removeprefix("step-")) for path in run_dir.rglob("MANIFEST.json")]
    assert saved == [max(losses(run_dir))]
    assert 6 <= saved[0] < 90
    shutil.rmtree(url, ignore_errors=True)
    shutil.copytree(digits_url, url)
    assert run(words, num_ranks=2, log_dir=tmp_path) == 0
    assert resumed_steps(run_dir) == [0, *saved]
    assert list(losses(run_dir)) == list(range(1, 91))
