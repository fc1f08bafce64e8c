"""When held-out scores are due, and what a request to stop does to them; whole runs are in test_loop.py."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from jobs.models import weights
from jobs.recipes.pretrain import digits_smoke
from jobs.settings.models import WeightsJob
from pipeline.evaluation.config import EvaluationConfig, FewshotInTraining
from pipeline.evaluation.scores import Scores
from pipeline.training.controls import Controls
from pipeline.training.reporting.ledger import Ledger
from pipeline.training.reporting.metrics import read_metrics
from pipeline.training.scoring import HeldOut
from pipeline.training.settings.schedule import ScheduleConfig
from pipeline.training.watchdog.stopping import Signals, Stopping, WaitGivenUpError
from shards.dataset import open_dataset
from tests.rigs.processes import one_world, patchline
from tests.rigs.scores import scores_with
from tests.rigs.training import STEPS, FinishedRuns, pretrain_words, run

SCORES = scores_with(num_images=4, accuracy=0.5, loss=1.0)


class _Engine:
    """Notes whether dropout is on, and whether the model has its averaged weights."""

    module = None

    def __init__(self, *, has_averages: bool = False) -> None:
        self.trains: list[bool] = []
        self.has_averages, self.is_averaged = has_averages, False

    def swap_averages(self) -> None:
        self.is_averaged = not self.is_averaged

    def train(self, training: bool) -> None:
        self.trains.append(training)


def held_out(digits_url: str, folder: Path, engine: _Engine, *, every_steps: int) -> HeldOut:
    evaluation = EvaluationConfig(url="t", every_steps=every_steps)
    job = replace(digits_smoke(), steps=10, schedule=ScheduleConfig(), evaluation=evaluation)
    controls = Controls(signals=Signals(folder, watch_markers=True), stopping=Stopping(), ledger=Ledger(folder))
    prepared = SimpleNamespace(
        job=job,
        world=one_world(),
        held_out={"": open_dataset(digits_url)},
        stream=SimpleNamespace(data=SimpleNamespace(label_names=())),
        fewshot=None,
    )
    return HeldOut(prepared, engine, controls)  # type: ignore[arg-type]


@pytest.mark.parametrize(("every_steps", "expected"), [(0, [10]), (4, [4, 8, 10]), (5, [5, 10])])
def test_scores_are_due_as_asked_and_at_the_end(
    digits_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_steps: int, expected: list[int]
) -> None:
    monkeypatch.setattr("pipeline.training.scoring.evaluate", lambda *_, **__: (SCORES, None))
    engine = _Engine()
    found = held_out(digits_url, tmp_path, engine, every_steps=every_steps)
    assert [step for step in range(1, 11) if found.scores(step) == SCORES] == expected
    assert engine.trains == [False, True] * len(expected)
    assert found.controls.ledger.seconds["evaluation"] > 0


def test_few_shot_scores_have_steps_of_their_own(
    digits_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.training.scoring.evaluate", lambda *_, **__: (SCORES, None))
    monkeypatch.setattr(HeldOut, "_fewshot_scores", lambda *_: {"fewshot/10_shots": 0.5})
    found = held_out(digits_url, tmp_path, _Engine(), every_steps=4)
    found.fewshot = object()  # type: ignore[assignment]
    found.job = replace(found.job, fewshot=FewshotInTraining(url="f", every_steps=3))
    seen = [(found.is_due(step), found.scores(step) is not None, bool(found.of_others)) for step in range(1, 11)]
    assert [step for step, (is_due, _, _) in enumerate(seen, start=1) if is_due] == [3, 4, 6, 8, 9, 10]
    assert [step for step, (_, is_scored, _) in enumerate(seen, start=1) if is_scored] == [4, 8, 10]
    assert [step for step, (_, _, has_shots) in enumerate(seen, start=1) if has_shots] == [3, 6, 9, 10]


def test_without_a_dataset_none_are(tmp_path: Path, digits_url: str) -> None:
    found = held_out(digits_url, tmp_path, _Engine(), every_steps=1)
    found.dataset = None
    assert [found.scores(step) for step in (1, 10)] == [None, None]


def test_an_evaluation_that_was_given_up_is_remembered(
    digits_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the engine trains on as before."""

    def stopped(*_: Any, **__: Any) -> Scores:
        raise WaitGivenUpError("evaluating")

    monkeypatch.setattr("pipeline.training.scoring.evaluate", stopped)
    engine = _Engine()
    found = held_out(digits_url, tmp_path, engine, every_steps=0)
    assert found.scores(9) is None
    assert not found.was_given_up, "none was due"
    assert found.scores(10) is None
    assert found.was_given_up
    assert engine.trains == [False, True]


def test_averaged_weights_are_scored_at_the_end(
    digits_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each dataset; an evaluation that is given up leaves the weights as they were."""
    engine, averaged = _Engine(has_averages=True), scores_with(num_images=4, accuracy=0.75, loss=0.5)
    monkeypatch.setattr(
        "pipeline.training.scoring.evaluate", lambda *_, **__: (averaged if engine.is_averaged else SCORES, None)
    )
    found = held_out(digits_url, tmp_path, engine, every_steps=5)
    found.also = {"real": open_dataset(digits_url)}
    assert (found.scores(5), found.of_others["eval/real/accuracy"]) == (SCORES, 0.5)
    assert not any("ema" in name for name in found.of_others)
    assert found.scores(10) == SCORES
    names = ("eval/real/accuracy", "eval/real/ema_accuracy", "test_ema_accuracy", "test_ema_loss")
    assert [found.of_others[name] for name in names] == [0.5, 0.75, 0.75, 0.5]
    assert not engine.is_averaged

    def stopped(*_: Any, **__: Any) -> tuple[Scores, None]:
        if engine.is_averaged:
            raise WaitGivenUpError("evaluating")
        return SCORES, None

    monkeypatch.setattr("pipeline.training.scoring.evaluate", stopped)
    assert found.scores(10) is None
    assert found.was_given_up
    assert found.of_others == {}
    assert not engine.is_averaged


@pytest.mark.parametrize(("stage", "precision"), [(2, "fp32"), pytest.param(3, "fp32", marks=pytest.mark.long)])
def test_the_score_of_averaged_weights_is_that_of_the_runs_weights(
    digits_url: str, tmp_path: Path, finished_runs: FinishedRuns, stage: int, precision: str
) -> None:
    """And nothing else changes: neither the weights, averaged or raw, nor a loss."""
    options = ("--engine.zero-stage", str(stage), "--engine.precision", precision, "--ema-decay", "0.9")
    plain, scored = finished_runs.get(2, *options), tmp_path / "scored"
    evaluation = ("--evaluation.url", digits_url, "--evaluation.every-steps", "8")
    words = pretrain_words(digits_url, scored, *options, *evaluation)
    assert run(words, num_ranks=2, log_dir=tmp_path) == 0
    lines = read_metrics(scored)
    assert [line["loss"] for line in lines] == [line["loss"] for line in read_metrics(plain)]
    for name in ("averaged", "raw"):
        jobs = [
            WeightsJob(run=str(run_dir), out=str(tmp_path / f"{name}-{run_dir.name}"), raw=name == "raw")
            for run_dir in (plain, scored)
        ]
        assert [weights.run(job) for job in jobs] == [0, 0]
        expected, found = (load_file(Path(job.out) / "model.safetensors") for job in jobs)
        assert all(torch.equal(expected[each], found[each]) for each in expected)
        ended = patchline("evaluate", "--weights", jobs[1].out, "--data.url", digits_url, "--json")
        assert ended.code == 0, ended.errors
        accuracy = lines[-1]["test_ema_accuracy" if name == "averaged" else "test_accuracy"]
        assert json.loads(ended.output)["accuracy"] == accuracy
    assert lines[-1]["test_ema_loss"] != lines[-1]["test_loss"]
    assert [line["step"] for line in lines if "test_ema_accuracy" in line] == [STEPS]
