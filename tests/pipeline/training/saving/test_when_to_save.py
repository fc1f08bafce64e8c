"""Runs save by time, at a new best score, or only at the end; on real ranks, killed and resumed.

The best checkpoint is named after its commit, kept by retention, and found again by the next start.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs import exit_codes
from pipeline.checkpoints.config import CheckpointConfig, Retention
from pipeline.checkpoints.manifest import CheckpointManifest, manifest_from_json
from pipeline.checkpoints.saves import Saves
from pipeline.checkpoints.stored import Best, read_best, write_best
from pipeline.checkpoints.writer.copies import choose_writer
from pipeline.evaluation.config import EvaluationConfig
from pipeline.ranks.world import World
from pipeline.training.controls import Controls
from pipeline.training.gradients import Gradients
from pipeline.training.reporting.ledger import Ledger
from pipeline.training.reporting.metrics import read_metrics
from pipeline.training.saving.save import Saving, describe, state_bytes
from pipeline.training.saving.when_to_save import decide_when_to_save
from pipeline.training.settings.job import TrainingJob
from pipeline.training.summary import scores_of
from pipeline.training.watchdog.stopping import Signals, Stopping
from pipeline.training.zero.batch_plan import plan_batch
from shards.dataset import open_dataset
from shards.store import open_store
from tests.pipeline.training.saving.test_save import JOB, _Engine
from tests.rigs.checkpoints import checkpoints_of
from tests.rigs.kills import run_and_kill, step_at_least, wait_until
from tests.rigs.positions import position_at
from tests.rigs.processes import run_ranks
from tests.rigs.scores import scores_with
from tests.rigs.training import STEPS, FinishedRuns, losses, pretrain_words, run, start

SCORED = ("--evaluation.every-steps", "2", "--checkpoint.every-steps", "0", "--checkpoint.keep-newest", "1")


def saved_steps(run_dir: Path) -> list[int]:
    """Of the checkpoints that are there."""
    return sorted(int(path.parts[-3][5:]) for path in run_dir.glob("checkpoints/step-*/*/MANIFEST.json"))


def recorded_steps(run_dir: Path) -> list[int]:
    """Of all checkpoints that were ever committed."""
    ledger = run_dir / "ledger.jsonl"
    return [json.loads(line)["step"] for line in ledger.read_text().splitlines()] if ledger.exists() else []


def best_steps(run_dir: Path) -> list[int]:
    """The steps whose score was the best so far."""
    scores = scores_of(run_dir)
    keys = [(score.accuracy, -score.loss) for score in scores]
    return [score.step for number, score in enumerate(scores) if keys[number] > max(keys[:number], default=(-1.0, 0.0))]


def named(run_dir: Path) -> Best:
    """What RUN/best.json names."""
    best = read_best(run_dir)
    assert best
    return best


@pytest.mark.slow
def test_without_any_interval_only_the_end_saves(
    digits_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = pretrain_words(digits_url, tmp_path / "run", "--checkpoint.every-steps", "0")
    assert run(words, num_ranks=1, log_dir=tmp_path) == 0
    assert recorded_steps(tmp_path / "run") == [STEPS]
    said = capfd.readouterr().err
    assert said.count("checkpoints at the end only, or on request (a signal, RUN/STOP, RUN/SAVE)") == 1


@pytest.mark.slow
def test_ranks_save_together_by_the_clock_of_the_first(digits_url: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = pretrain_words(digits_url, run_dir, "--steps", "4000", "--checkpoint.every-steps", "0")
    ranks = start([*words, "--checkpoint.every-seconds", "0.3"], num_ranks=2, log_dir=tmp_path)
    assert wait_until(ranks, lambda folder: len(recorded_steps(folder)) >= 3, run_dir)
    (run_dir / "STOP").touch()
    assert ranks.wait() == exit_codes.CONTINUE
    assert all(line["checkpoint/interval_seconds"] == 0.3 for line in read_metrics(run_dir))


@pytest.fixture(scope="module")
def unbroken(finished_runs: FinishedRuns, digits_url: str) -> Path:
    """A run of two ranks that saves at each new best score and at the end."""
    return finished_runs.get(2, "--evaluation.url", digits_url, *SCORED)


@pytest.mark.slow
def test_no_interval_is_chosen_once_the_run_is_over(
    digits_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = pretrain_words(digits_url, tmp_path / "run", "--checkpoint.every-steps", "0", "--checkpoint.auto-interval")
    assert run(words, num_ranks=1, log_dir=tmp_path) == 0
    said = capfd.readouterr().err
    assert "checkpoints by time" in said
    assert "from now on" not in said


@pytest.mark.slow
def test_each_new_best_is_saved_and_the_last_of_them_named(unbroken: Path) -> None:
    best = best_steps(unbroken)
    assert recorded_steps(unbroken) == sorted({*best, STEPS})
    line = next(line for line in read_metrics(unbroken) if line["step"] == best[-1])
    found = named(unbroken)
    assert (found.step, found.accuracy, found.loss) == (best[-1], line["test_accuracy"], line["test_loss"])
    assert (unbroken / "checkpoints" / found.checkpoint / "MANIFEST.json").is_file()
    assert {best[-1], STEPS} <= set(saved_steps(unbroken))


@pytest.mark.slow
@pytest.mark.long
def test_a_run_killed_right_after_a_best_ends_like_the_unbroken_one(
    digits_url: str, tmp_path: Path, unbroken: Path
) -> None:
    run_dir = tmp_path / "run"
    words = pretrain_words(digits_url, run_dir, "--evaluation.url", digits_url, *SCORED)
    second = best_steps(unbroken)[1]

    def is_named(folder: Path) -> bool:
        return (folder / "best.json").exists() and named(folder).step == second

    assert run_and_kill(words, run_dir, moment=is_named, num_ranks=2, log_dir=tmp_path)
    assert run(words, num_ranks=2, log_dir=tmp_path) == 0
    assert losses(run_dir) == losses(unbroken)
    assert best_steps(run_dir) == best_steps(unbroken)
    ours, theirs = named(run_dir), named(unbroken)
    assert (ours.step, ours.accuracy, ours.loss) == (theirs.step, theirs.accuracy, theirs.loss)
    assert set(saved_steps(run_dir)) >= {ours.step, STEPS}


@pytest.mark.slow
def test_auto_says_what_it_does(digits_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    words = pretrain_words(
        digits_url, run_dir, "--steps", "4000", "--checkpoint.every-steps", "0", "--checkpoint.auto-interval"
    )
    ranks = start(words, num_ranks=1, log_dir=tmp_path)
    assert wait_until(ranks, step_at_least(2), run_dir)
    (run_dir / "SAVE").touch()
    assert wait_until(ranks, lambda folder: len(recorded_steps(folder)) == 1, run_dir)
    step = read_metrics(run_dir)[-1]["step"]
    assert wait_until(ranks, step_at_least(step + 3), run_dir)
    (run_dir / "STOP").touch()
    assert ranks.wait() == exit_codes.CONTINUE
    said = capfd.readouterr().err
    assert "checkpoints by time: the first after 1 min 0 s, then at an interval" in said
    assert "s and is committed after" in said
    assert "1 node with 0.0065 failures per node and day" in said
    intervals = [line["checkpoint/interval_seconds"] for line in read_metrics(run_dir)]
    assert intervals[0] == 60
    assert intervals[-1] > 60


def job_of(url: str, **checkpoint: Any) -> TrainingJob:
    """Saves every 2 steps, keeps the newest, is evaluated on the dataset at `url`."""
    config = CheckpointConfig(**{"every_steps": 2, "keep_newest": 1, "asynchronous": "off", **checkpoint})
    return replace(JOB, checkpoint=config, evaluation=EvaluationConfig(url=url, every_steps=2))


class _Run:
    """One start of a run: what the loop does around a save, without training."""

    def __init__(self, job: TrainingJob, world: World, folder: Path, *, from_step: int | None = None) -> None:
        folder.mkdir(exist_ok=True)
        checkpoints = checkpoints_of(folder, world)
        found = checkpoints.newest()
        if from_step is not None:  # the others are damaged, for this start
            found = manifest_at(folder, from_step)
        assert checkpoints.begin_attempt(found)
        controls = Controls(signals=Signals(folder, watch_markers=True), stopping=Stopping(), ledger=Ledger(folder))
        engine: Any = _Engine()
        writer = choose_writer(job.checkpoint, None, checkpoints.store, world, num_bytes=state_bytes(job, engine))
        plan = plan_batch(job.global_batch, micro_batch=0, num_ranks=1, lanes=job.data.lanes)
        saves = Saves(checkpoints, writer, Retention(keep_newest=job.checkpoint.keep_newest))
        record = describe(job, world, plan=plan, is_compiled=False)
        gradients = Gradients(job, plan, engine, world)
        self.saving = Saving(gradients, saves, controls, saved=found, record=record, reporter=None)
        dataset = open_dataset(job.evaluation.url)
        self.when = decide_when_to_save(self.saving, dataset=dataset, resumed_from=found)
        self.best = self.when.best

    def step(self, step: int, accuracy: float, loss: float = 1.0) -> bool:
        """An evaluated step, and the save after it if one is due; whether it was."""
        self.when.scored(step, scores_with(num_images=4, accuracy=accuracy, loss=loss))
        if is_due := self.when.is_due(step):
            self.when.begins(step)
            self.saving.save(position_at(step), num_updates=step)
            self.when.began()
        return is_due


def manifest_at(folder: Path, step: int) -> CheckpointManifest:
    (path,) = (folder / "checkpoints").glob(f"step-{step:08d}/*/MANIFEST.json")
    return manifest_from_json(path.read_bytes())


def named_in(folder: Path) -> tuple[int, float]:
    """Step and accuracy in RUN/best.json, whose checkpoint is there."""
    best = json.loads((folder / "best.json").read_text())
    assert (folder / "checkpoints" / best["checkpoint"] / "MANIFEST.json").is_file()
    return best["step"], best["accuracy"]


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


def best_survives_retention(world: World, folder: Path, url: str) -> tuple[list[bool], list[Any], list[int]]:
    run, due, named = _Run(job_of(url, every_steps=4), world, folder), [], []
    for step, accuracy, loss in (
        (2, 0.5, 1.0),
        (3, 0.7, 1.0),
        (4, 0.7, 1.0),
        (6, 0.7, 0.9),
        (8, 0.1, 1.0),
        (12, 0.1, 1),
    ):
        due.append(run.step(step, accuracy, loss))
        named.append(named_in(folder)[0])
    return due, named, steps_in(folder)


def test_each_new_best_is_saved_named_and_kept(tmp_path: Path, digits_url: str) -> None:
    found = run_ranks(best_survives_retention, tmp_path / "run", digits_url, num_ranks=1)
    assert found == [([True, True, True, True, True, True], [2, 3, 3, 6, 6, 6], [6, 12])]


def switched_off(world: World, folder: Path, url: str) -> tuple[list[bool], list[str]]:
    run = _Run(job_of(url, keep_best=False, every_steps=4), world, folder)
    return [run.step(step, step / 10) for step in (2, 3, 4)], [path.name for path in folder.glob("best*")]


def test_it_can_be_switched_off(tmp_path: Path, digits_url: str) -> None:
    assert run_ranks(switched_off, tmp_path / "run", digits_url, num_ranks=1) == [([False, False, True], [])]


def a_save_that_fails(world: World, folder: Path, url: str) -> list[Any]:
    """What is named, and whether a save was due, where that of the best score fails."""
    run = _Run(job_of(url, every_steps=0), world, folder)
    found = [(run.step(2, 0.5), named_in(folder))]
    (folder / "checkpoints" / "step-00000004").write_text("a file where a folder must be")
    found.append((run.step(4, 0.9), named_in(folder)))
    found.append((run.step(6, 0.95), named_in(folder)))
    found.append((run.step(8, 0.93), named_in(folder)))
    found.append((run.step(10, float("nan"), float("nan")), named_in(folder)))
    return found


def test_what_could_not_be_saved_is_not_named(tmp_path: Path, digits_url: str) -> None:
    assert run_ranks(a_save_that_fails, tmp_path / "run", digits_url, num_ranks=1) == [
        [
            (True, (2, 0.5)),
            (True, (2, 0.5)),
            (True, (6, 0.95)),
            (False, (6, 0.95)),
            (False, (6, 0.95)),
        ]
    ]


def after_a_failed_best(world: World, folder: Path, url: str) -> list[Any]:
    """Whether a save was due and what is named, for scores below the one whose save has failed."""
    run = _Run(job_of(url, every_steps=0), world, folder)
    found = [(run.step(2, 0.5), named_in(folder))]
    (folder / "checkpoints" / "step-00000004").write_text("a file where a folder must be")
    found.append((run.step(4, 0.9), named_in(folder)))
    found.append((run.step(6, 0.8), named_in(folder)))
    return found


def test_a_score_that_could_not_be_saved_stands_in_no_other_ones_way(tmp_path: Path, digits_url: str) -> None:
    assert run_ranks(after_a_failed_best, tmp_path / "run", digits_url, num_ranks=1) == [
        [(True, (2, 0.5)), (True, (2, 0.5)), (True, (6, 0.8))]
    ]


def after_a_restart(world: World, folder: Path, url: str, from_step: int | None) -> tuple[Any, bool, bool]:
    """(What the second start takes for the best, whether .65 and .95 are new bests for it)."""
    run = _Run(job_of(url, keep_newest=9), world, folder)
    for step, accuracy in ((2, 0.6), (4, 0.9), (6, 0.5)):
        run.step(step, accuracy)
    again = _Run(job_of(url, keep_newest=9, every_steps=0), world, folder, from_step=from_step)
    best = again.best.best
    return best and best.step, again.step(7, 0.65), again.step(8, 0.95)


@pytest.mark.parametrize(
    ("from_step", "expected"),
    [
        pytest.param(None, (4, False, True), id="the newest"),
        pytest.param(4, (4, False, True), id="the best itself"),
        pytest.param(2, (None, True, True), id="before it: that branch no longer counts"),
    ],
)
def test_a_restart_knows_it(
    tmp_path: Path, digits_url: str, from_step: int | None, expected: tuple[Any, bool, bool]
) -> None:
    assert run_ranks(after_a_restart, tmp_path / "run", digits_url, from_step, num_ranks=1) == [expected]


def after_damage(world: World, folder: Path, url: str, damage: str) -> Any:
    """What a second start takes for the best after something has happened to it."""
    run = _Run(job_of(url, keep_newest=9), world, folder)
    for step, accuracy in ((2, 0.6), (4, 0.9), (6, 0.5)):
        run.step(step, accuracy)
    if damage == "its checkpoint is gone":
        shutil.rmtree(folder / "checkpoints" / "step-00000004")
    elif damage == "a folder":
        (folder / "best.json").unlink()
        (folder / "best.json").mkdir()
    elif damage == "half a file":
        (folder / "best.json").write_text('{"step": 4, "check')
    elif damage == "another dataset":
        named = read_best(folder)
        assert named
        write_best(folder, replace(named, dataset="ab" * 32))
    again = _Run(job_of(url), world, folder)
    found = again.best.best and again.best.best.step
    assert again.step(8, 0.95), "and the run goes on"
    return found


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ("none", 4),
        ("its checkpoint is gone", None),
        ("half a file", None),
        ("a folder", None),
        ("another dataset", None),
    ],
)
def test_what_no_longer_holds_is_ignored(tmp_path: Path, digits_url: str, damage: str, expected: int | None) -> None:
    assert run_ranks(after_damage, tmp_path / "run", digits_url, damage, num_ranks=1) == [expected]


def killed_before_it_was_named(world: World, folder: Path, url: str, is_same_data: bool) -> Any:
    """The commit of step 4 is there, its score in metrics.jsonl, but best.json names step 2."""
    run = _Run(job_of(url, keep_newest=9), world, folder)
    run.step(2, 0.6)
    before = (folder / "best.json").read_text()
    run.step(4, 0.9)
    (folder / "best.json").write_text(before)
    lines = [{"step": step, "loss": 1.0, "test_accuracy": step / 10, "test_loss": 1.0} for step in (2, 4)]
    lines[1]["test_accuracy"] = 0.9
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    job = job_of(url)
    if not is_same_data:
        job = replace(job, evaluation=replace(job.evaluation, url=f"{url}/."))
    again = _Run(job, world, folder)
    return again.best.best and again.best.best.step, named_in(folder)


@pytest.mark.parametrize(("is_same_data", "expected"), [(True, (4, (4, 0.9))), (False, (2, (2, 0.6)))])
def test_a_run_that_was_killed_before_it_named_its_best_does_so_later(
    tmp_path: Path, digits_url: str, is_same_data: bool, expected: Any
) -> None:
    found = run_ranks(killed_before_it_was_named, tmp_path / "run", digits_url, is_same_data, num_ranks=1)
    assert found == [expected]


def scored_after_it_was_saved(world: World, folder: Path, url: str) -> tuple[bool, tuple[int, float]]:
    """The last step's evaluation was given up; the next start scores what is saved already."""
    job = job_of(url)
    _Run(job, world, folder).saving.save(position_at(10), num_updates=10)
    again = _Run(job, world, folder)
    again.when.scored(10, scores_with(num_images=4, accuracy=0.8, loss=1.0))
    return open_store(f"{folder}/checkpoints").exists(again.best.best.checkpoint + "/MANIFEST.json"), named_in(folder)  # type: ignore[union-attr]


def test_a_late_score_names_the_checkpoint_that_is_there(tmp_path: Path, digits_url: str) -> None:
    found = run_ranks(scored_after_it_was_saved, tmp_path / "run", digits_url, num_ranks=1)
    assert found == [(True, (10, 0.8))]
