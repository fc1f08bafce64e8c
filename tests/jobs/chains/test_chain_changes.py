"""A chain that is submitted again with other settings: what is there already is not taken for what was asked for."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.chains.checks import missing_tasks
from jobs.chains.done import is_scored_by, refuse_changed
from jobs.chains.units import Unit
from jobs.cli import _overridden as overridden
from jobs.record import write_record
from jobs.settings.models import EvaluateJob
from jobs.submittable import job_of_words
from pipeline.evaluation_transform import EvaluationTransform
from shards.errors import UserError
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
    words = ("evaluate", "resize", "--weights=w", "--data.url=d", f"--run-dir={tmp_path}")
    write_record(tmp_path, stage="evaluate", job=job_of_words(list(words), overridden))
    (tmp_path / "scores.json").write_text("{}")
    assert missing(*words, state=tmp_path) == []
    assert missing("evaluate", "central_crop", *words[2:], state=tmp_path) == [0]
    before = (tmp_path / "job.yaml").stat().st_mtime - 10
    os.utime(tmp_path / "scores.json", (before, before))
    assert missing(*words, state=tmp_path) == [0]
