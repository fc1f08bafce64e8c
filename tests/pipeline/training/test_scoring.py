"""When held-out scores are due, and what a request to stop does to them; whole runs are in test_loop.py."""

import json
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from jobs.models import weights
from jobs.recipes.pretrain import digits_smoke
from jobs.settings.models import WeightsJob
from pipeline.evaluation.config import EvaluationConfig, FewshotInTraining
from pipeline.evaluation.fewshot import features_of
from pipeline.evaluation.scores import Scores
from pipeline.models import ModelConfig, build_model
from pipeline.ranks.world import World
from pipeline.shared_settings import EvaluationTransform
from pipeline.training.controls import Controls
from pipeline.training.reporting.ledger import Ledger
from pipeline.training.reporting.metrics import read_metrics
from pipeline.training.scoring import HeldOut
from pipeline.training.settings.schedule import ScheduleConfig
from pipeline.training.watchdog.heartbeat_files import Place
from pipeline.training.watchdog.stopping import Signals, Stopping, WaitGivenUpError
from shards.dataset import open_dataset
from tests.rigs.datasets import packed_folders
from tests.rigs.lazy_streams import LazyStreams
from tests.rigs.processes import one_world, patchline, run_ranks
from tests.rigs.scores import scores_with
from tests.rigs.training import STEPS, FinishedRuns, pretrain_words, run

SCORES = scores_with(num_images=4, accuracy=0.5, loss=1.0)


LABELS = ("c0", "c1", "c2")
TINY = ModelConfig(name="vit", image_size=8, patch=4, depth=1, width=8, mlp_width=8, num_heads=2, num_classes=3)


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


def computes_on(streams: LazyStreams) -> None:
    """Gives this process's evaluations these streams."""
    for module in ("training.scoring", "evaluation.scores", "evaluation.fewshot"):
        pytest.MonkeyPatch().setattr(f"pipeline.{module}.streams_of", lambda _: streams)


def measured(world: World, url: str, folder: Path, streams: LazyStreams | None, stop_at: int) -> dict[str, Any]:
    """Scores a dataset of 15 images on ranks with batches of two. The model has a collective in each forward pass, as
    under ZeRO-3. Rank 0 is asked to stop while the model sees batch `stop_at`, from 1 on."""
    engine, places, log = _Engine(), list[Place](), list[str]()
    if streams:
        log = streams.log
        computes_on(streams)
    torch.manual_seed(0)
    engine.module = build_model(TINY)  # type: ignore[assignment]
    torch.nn.init.normal_(engine.module.head.weight)  # type: ignore[attr-defined]

    def see(*_: object) -> None:
        places.append(found.controls.stopping.progress.place)
        log.append("the model is launched")
        dist.all_reduce(torch.zeros(7))
        if world.is_first and len(places) == stop_at:
            (folder / "STOP").touch()

    engine.module.register_forward_pre_hook(see)  # type: ignore[attr-defined]
    found = held_out(url, folder, engine, every_steps=0)
    found.world, found.labels = world, LABELS
    evaluation = replace(found.job.evaluation, batch_size=2)
    found.job = replace(found.job, run_dir=str(folder), evaluation=evaluation, loss="softmax")
    result = {"scores": found.scores(10), "num_seen": len(places), "num_failed": found.num_failed}
    return result | {"was_given_up": found.was_given_up, "places": places, "log": list(log)}


@pytest.fixture(scope="module")
def fifteen(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(packed_folders(tmp_path_factory.mktemp("fifteen"), num_classes=3, images_a_class=5))


def launches_before_waits(log: Sequence[str]) -> list[int]:
    """How often the model was launched between the record of each event that the host waits for and the wait."""
    found = []
    for place, said in enumerate(log):
        if said.startswith("the host waits"):
            recorded = log.index(f"compute records {said.split()[-1]}")
            found.append(log[recorded:place].count("the model is launched"))
    return found


def test_the_host_reads_a_batch_late(fifteen: str, tmp_path: Path) -> None:
    """Twice for each of the eight batches: what the ranks agreed, and the logits. The device has another batch to
    compute in every wait but those for the first agreement and the last logits; and the scores have the same bits."""
    (expected,) = run_ranks(measured, fifteen, tmp_path, None, 0, num_ranks=1)
    (found,) = run_ranks(measured, fifteen, tmp_path, LazyStreams(), 0, num_ranks=1)
    assert found["scores"] == expected["scores"] is not None
    assert [place.batch for place in found["places"]] == list(range(1, 9)), "the watchdog knows what the model sees"
    assert found["places"][0].is_first, "it may have to compile"
    assert launches_before_waits(found["log"]) == [0, *[1] * 14, 0]


@pytest.mark.parametrize("stop_at", [1, 2])
def test_ranks_leave_an_evaluation_together_when_one_is_asked_to_stop(
    fifteen: str, tmp_path: Path, stop_at: int
) -> None:
    """After the batch that was launched meanwhile."""
    ranks = run_ranks(measured, fifteen, tmp_path, None, stop_at, num_ranks=2)
    assert [one["was_given_up"] for one in ranks] == [True] * 2
    assert [(one["scores"], one["num_seen"], one["num_failed"]) for one in ranks] == [(None, stop_at + 1, 0)] * 2


def test_a_rank_that_cannot_read_a_batch_takes_part_in_the_one_before_it(fifteen: str, tmp_path: Path) -> None:
    """Sample 10 is in the third batch of rank 1. All ranks learn why there are no scores."""
    url = spoiled(fifteen, tmp_path, sample=10)
    ranks = run_ranks(measured, url, tmp_path, None, 0, num_ranks=2)
    assert [(one["scores"], one["num_seen"], one["num_failed"]) for one in ranks] == [(None, 2, 1)] * 2
    (alarm,) = map(json.loads, (tmp_path / "guard.jsonl").read_text().splitlines())
    assert alarm["kind"] == "evaluation_failed"
    assert f"{url}: sample 10 (" in alarm["reason"]


def spoiled(url: str, folder: Path, *, sample: int) -> str:
    """A copy of a dataset with shards of four samples, one of which has other bytes."""
    out = shutil.copytree(url, folder / "spoiled")
    shard = out / "shards" / f"shard-{sample // 4:06d}.tar"
    with tarfile.open(shard) as archive:
        images = [member for member in archive.getmembers() if not member.name.endswith((".cls", ".json"))]
    with shard.open("r+b") as file:
        file.seek(images[sample % 4].offset_data + 100)
        file.write(b"spoiled")
    return str(out)


def late_features(world: World, url: str) -> bool:
    """Whether the features have the same bits when the device does its work late."""
    model, dataset, streams = build_model(TINY).eval(), open_dataset(url), LazyStreams()
    ids, found = np.arange(dataset.num_samples), list[torch.Tensor]()
    model.register_forward_pre_hook(lambda *_: streams.log.append("the model is launched"))
    for is_late in (False, True):
        if is_late:
            streams.log.clear()
            computes_on(streams)
        found.append(features_of(model, dataset, ids, transform=EvaluationTransform(), batch_size=2, world=world))
    return torch.equal(*found) and launches_before_waits(streams.log) == [1, 1, 1, 0]


def test_features_are_read_a_batch_late(fifteen: str) -> None:
    assert run_ranks(late_features, fifteen, num_ranks=2) == [True] * 2
