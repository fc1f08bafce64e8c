"""What is done already: runs that need no job, markers that vouch for them, and results of other settings."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.chains.done import is_scored_by, missing_tasks, refuse_changed, refuse_stopped
from jobs.chains.steps import Unit
from jobs.cli import _overridden as overridden
from jobs.data.pack import run
from jobs.recipes.pretrain import RECIPES
from jobs.record import write_record
from jobs.settings.models import EvaluateJob
from jobs.submittable import job_of_words
from pipeline.shared_settings import EvaluationTransform
from shards.errors import UserError
from tests.jobs.cluster.test_slurm import programs
from tests.rigs.images import class_folders
from tests.rigs.processes import patchline
from tests.rigs.training import FinishedRuns, pretrain_words


def missing(*words: str, state: Path) -> list[int]:
    return missing_tasks(Unit(name="u", step="u", stage=words[0], words=(words,)), state=state, override=overridden)


def test_a_run_that_is_done_is_that_of_the_same_words_alone(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    words = pretrain_words(finished_runs.url, finished_runs.get(1))
    assert missing(*words, state=tmp_path) == []
    assert missing(*words, "--threads=3", "--data.num-threads=2", "--log-every-steps=7", state=tmp_path) == []
    for flag, change in (
        ("--schedule.learning-rate=0.5", "schedule.learning_rate: before "),
        ("--seed=5", "seed: before 0, now 5"),
        ("--data.lanes=32", "data.lanes: before "),
        ("--steps=1000", "steps: before "),
        ("--steps=8", "steps: before "),
        ("--data.url=elsewhere", "data.url: before "),
    ):
        with pytest.raises(UserError, match=f"holds a run that finished with other values: .*{change}"):
            missing(*words, flag, state=tmp_path)
    assert missing(*words, "--steps=1000", "--extend", state=tmp_path) == [0]
    with pytest.raises(UserError, match=r"data\.url: before .*; data\.mix: before "):
        missing(*words, "--data.url=", "--data.mix", finished_runs.url, "1", state=tmp_path)


def test_a_dataset_may_move(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    shutil.copytree(finished_runs.url, tmp_path / "moved")
    words = pretrain_words(str(tmp_path / "moved"), finished_runs.get(1))
    refuse_changed("pretrain", words, job_of_words(words, overridden))


def test_a_path_may_be_written_differently(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    words = pretrain_words(f"{finished_runs.url}/../digits", finished_runs.get(1))
    assert missing(*words, state=tmp_path) == []


def test_a_dataset_that_was_planned_with_other_settings(digits_url: str) -> None:
    words = ["pack", "digits", f"--out={digits_url}"]
    refuse_changed("pack", words, job_of_words(words, overridden))
    words.append("--samples-per-shard=77")
    with pytest.raises(UserError, match="is planned with other settings"):
        refuse_changed("pack", words, job_of_words(words, overridden))


@pytest.mark.parametrize("more", [(), ("--split-test=0.5",)])
def test_a_refused_packing_is_scanned_and_planned_again(tmp_path: Path, more: tuple[str, ...]) -> None:
    root = class_folders(tmp_path / "images")
    next(root.rglob("*.JPEG")).write_bytes(b"")
    words = ("pack", "folder", f"--source.root={root}", f"--out={tmp_path}/out", *more)
    units = [
        Unit(name=phase, step="u", stage="pack", words=((*words, f"--phase={phase}"),), num_parts=num_parts)
        for phase, num_parts in (("scan", 2), ("plan", 1), ("shards", 2), ("merge", 1))
    ]
    run(job_of_words([*units[0].words[0], "--part=0/1"], overridden))
    with pytest.raises(UserError, match="cannot be packed"):
        run(job_of_words(list(units[1].words[0]), overridden))
    missing = [missing_tasks(unit, state=tmp_path, override=overridden) for unit in units]
    assert missing == [[0, 1], [0], [0, 1], [0]]


def test_scores_are_of_the_settings_that_were_recorded_with_them(tmp_path: Path) -> None:
    job = EvaluateJob(weights="w", run_dir=str(tmp_path))
    assert not is_scored_by("evaluate", job, tmp_path)
    write_record(tmp_path, stage="evaluate", job=job)
    assert is_scored_by("evaluate", replace(job, threads=3, json=True), tmp_path)
    data = replace(job.data, transform=EvaluationTransform(mode="central_crop"))
    for other in (replace(job, weights="v"), replace(job, loss="sigmoid"), replace(job, data=data)):
        assert not is_scored_by("evaluate", other, tmp_path)


def test_scores_that_are_older_than_their_record_are_of_another_job(tmp_path: Path) -> None:
    """The record of the new job was written, and the job was killed."""
    words = ("evaluate", "w", "--data.url=d", f"--run-dir={tmp_path}")
    write_record(tmp_path, stage="evaluate", job=job_of_words(list(words), overridden))
    (tmp_path / "scores.json").write_text("{}")
    assert missing(*words, state=tmp_path) == []
    assert missing(*words, "--data.transform.mode=central_crop", state=tmp_path) == [0]
    before = (tmp_path / "job.yaml").stat().st_mtime - 10
    os.utime(tmp_path / "scores.json", (before, before))
    assert missing(*words, state=tmp_path) == [0]
    (tmp_path / "scores.json").unlink()
    os.mkfifo(tmp_path / "scores.json")
    assert missing(*words, state=tmp_path) == [0], "a pipe in its place is not waited for"


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """An sbatch that accepts every job, and leaves a file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    settings = tmp_path / "cluster.yaml"
    settings.write_text("command: [patchline]\n")
    sbatch = f'case "$*" in *--test-only*) ;; *) touch "{tmp_path}/submitted";; esac; echo 12'
    return programs(folder, sbatch=sbatch, squeue="true", sinfo="true", scontrol="true")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ([], 0, "is done; nothing was submitted"),
        (["--steps=17"], 2, "steps: before 16, now 17"),
        (["--steps=17", "--extend"], 0, "job 12"),
        (["--steps=17", "--extend", "--schedule.warmup-steps=1"], 0, "job 12"),
        (["--extend"], 0, "is done; nothing was submitted"),
        (["--schedule.learning-rate=0.5"], 2, "schedule.learning_rate: before 0.001, now 0.5"),
        (["--seed=7"], 2, "seed: before 0, now 7"),
        (["--data.window-blocks=3"], 2, "data.window_blocks: before 2, now 3"),
        (["--data.num-threads=1"], 0, "is done; nothing was submitted"),
    ],
)
def test_a_run_that_is_done(
    finished_runs: FinishedRuns, tmp_path: Path, slurm: dict[str, str], more: list[str], code: int, said: str
) -> None:
    """More steps are submitted only with --extend; other values are refused as a chain refuses them."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished_runs.get(1), run_dir)
    words = ["submit", *pretrain_words(finished_runs.url, run_dir), f"--cluster={tmp_path}/cluster.yaml", *more]
    ended = patchline(*words, environ=slurm)
    assert (ended.code, said in ended.errors) == (code, True), ended.errors
    assert (tmp_path / "submitted").exists() == (said == "job 12")
    if not more:
        weights = run_dir / "weights" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"?")
        assert "job 12" in patchline(*words, environ=slurm).errors, "DONE vouches for other weights"


def test_a_run_that_is_stopped(tmp_path: Path, slurm: dict[str, str]) -> None:
    run_dir = tmp_path / "my run"
    run_dir.mkdir()
    refuse_stopped(replace(RECIPES["digits_smoke"](), run_dir=str(run_dir)))
    (run_dir / "STOP").touch()
    words = ["pretrain", "digits_smoke", "--data.url=d", f"--run-dir={run_dir}", f"--cluster={tmp_path}/cluster.yaml"]
    ended = patchline("submit", *words, "--no-check", environ=slurm)
    assert (ended.code, f"to continue it, first: rm '{run_dir}/STOP'" in ended.errors) == (2, True), ended.errors
    assert not (tmp_path / "submitted").exists()
    assert not (run_dir / "submit").exists()


@pytest.mark.slow
def test_only_a_marker_that_vouches_for_the_last_step_counts(digits_url: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert patchline("__done", str(run_dir)).code == 1
    assert patchline(*pretrain_words(digits_url, run_dir, "--steps", "6", "--engine.precision", "fp32")).code == 0
    assert patchline("__done", str(run_dir)).code == 0
    record, weights = run_dir / "job.yaml", run_dir / "weights" / "model.safetensors"
    text, data = record.read_text(), weights.read_bytes()
    record.write_text(text.replace("steps: 6\n", "steps: 7\n"))
    longer = patchline("__done", str(run_dir))
    assert (longer.code, "is of step 6, and the run has 7 steps" in longer.errors) == (1, True), longer.errors
    record.write_text(text)
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    changed = patchline("__done", str(run_dir))
    assert (changed.code, "does not vouch for the weights" in changed.errors) == (1, True), changed.errors
    assert patchline("__done").code == 2
