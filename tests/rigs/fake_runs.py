"""Runs that are over at once, for tests of what starts several: their files are written, and nothing is trained."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import exit_codes
from jobs.cli import _overridden as override
from jobs.record import write_record
from jobs.submittable import job_of_words
from pipeline.training.settings.job import TrainingJob

__all__ = ["finish", "override", "runs_are_over_at_once"]


def finish(words: list[str], accuracy: float, **scores: float) -> None:
    """Writes what a run with these words leaves, once it is done, with these scores."""
    job = job_of_words(words, override)
    run_dir = Path(job.run_dir)
    write_record(run_dir, stage=words[0], job=job)
    line = {"step": job.steps, "test_accuracy": accuracy, **scores}
    (run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (run_dir / "DONE").write_text(json.dumps({"step": job.steps}))
    (run_dir / "weights").mkdir(exist_ok=True)
    (run_dir / "weights" / "model.safetensors").touch()


def runs_are_over_at_once(monkeypatch: pytest.MonkeyPatch, accuracy: Callable[[TrainingJob], float]) -> list[str]:
    """Instead of starting ranks; the folders of the runs that would have been started, in order."""
    started: list[str] = []

    def run_ranks(words: list[str], *, run_dir: str, **_: Any) -> int:
        started.append(run_dir)
        finish(words, accuracy(job_of_words(words, override)))
        return exit_codes.DONE

    monkeypatch.setattr("jobs.train.trials.run_ranks", run_ranks)
    return started
