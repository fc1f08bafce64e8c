"""The loop under mixup and RandAugment, its data counters, and a run on two datasets: real runs on real processes."""

import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jobs.recipes.pretrain import digits_smoke
from jobs.record import read_record
from pipeline.data.batches import COUNT_NAMES
from pipeline.data.config import DataConfig, MixupConfig, RandAugmentConfig
from pipeline.data.mixup import mix_weights
from pipeline.data.stream import train_batches
from pipeline.models import build_model
from pipeline.models.weights.folder import filled_model, open_weights, save_weights
from pipeline.training.reporting.metrics import read_metrics
from pipeline.training.settings.job import TrainingJob
from shards.dataset import open_dataset
from tests.rigs.datasets import packed_folders
from tests.rigs.kills import run_and_kill
from tests.rigs.training import TINY, FinishedRuns, losses, pretrain_words, resumed_steps, run

pytestmark = pytest.mark.slow

STEPS, BATCH = 6, 32  # the batch is TINY's
ALPHA, OPERATIONS = MixupConfig(alpha=0.5), RandAugmentConfig(num_ops=1, magnitude=2)
SHORT = ("--steps", str(STEPS), "--checkpoint.every-steps", "2", "--engine.precision", "fp32")
AUGMENTED = (
    *("--data.mixup.alpha", "0.5", "--data.randaugment.num-ops", "1", "--data.randaugment.magnitude", "2"),
    *SHORT,
)
ACCUMULATED = ("--micro-batch", "8")


def evaluated(url: str) -> tuple[str, ...]:
    """Options of a run that evaluates in its middle and at its end."""
    return ("--evaluation.url", url, "--evaluation.every-steps", str(STEPS // 2))


def record_of(run_dir: Path) -> TrainingJob:
    return read_record(run_dir / "job.yaml", stage="pretrain", kind=TrainingJob)


def test_mixup_and_randaugment_are_the_same_run_on_any_ranks_and_micro_batches(
    digits_url: str, finished_runs: FinishedRuns
) -> None:
    whole = losses(finished_runs.get(1, *AUGMENTED, *evaluated(digits_url)))

    assert list(whole) == list(range(1, STEPS + 1))
    assert losses(finished_runs.get(1, *AUGMENTED, *ACCUMULATED)) == pytest.approx(whole, abs=1e-5)
    assert losses(finished_runs.get(2, *AUGMENTED)) == pytest.approx(whole, abs=1e-5)


def test_the_loss_is_that_of_the_mixed_and_augmented_batch(digits_url: str, tmp_path: Path) -> None:
    """Two ranks that accumulate, from a head that is not zero, against the formula over the whole batch."""
    run_dir, weights = tmp_path / "run", tmp_path / "weights"
    save_random_weights(weights, labels=open_dataset(digits_url).label_names)
    words = pretrain_words(digits_url, run_dir, *AUGMENTED, *ACCUMULATED, "--steps", "1")
    words += ["--schedule.warmup-steps", "0", "--initial.weights", str(weights), "--initial.no-new-head"]
    assert run(words, num_ranks=2, log_dir=tmp_path) == 0

    (loss,) = losses(run_dir).values()
    data = record_of(run_dir).data
    assert (data.mixup, data.randaugment) == (ALPHA, OPERATIONS)
    assert loss == pytest.approx(first_loss(data, weights), abs=1e-5)
    assert abs(loss - first_loss(replace(data, mixup=MixupConfig()), weights)) > 0.1
    assert abs(loss - first_loss(replace(data, randaugment=RandAugmentConfig()), weights)) > 0.1


def save_random_weights(folder: Path, *, labels: tuple[str, ...]) -> None:
    """Weights of TINY's model with a head that says something and positions that leave it to the pixels."""
    config = replace(digits_smoke().model, width=32, depth=2, mlp_width=64, num_heads=2, num_classes=len(labels))
    config = replace(config, position_std=0.02)
    state = build_model(config).state_dict()
    state["head.weight"].normal_(generator=torch.Generator().manual_seed(1))
    save_weights(folder, config=config, labels=labels, tensor=lambda name: state[name])


def first_loss(data: DataConfig, weights: Path) -> float:
    """Mean loss of the first global batch, mixed by the definition: w of one image, 1 - w of its partner."""
    with train_batches(global_batch=BATCH, image_size=32, config=replace(data, mixup=MixupConfig())) as batches:
        (batch,) = islice(batches, 1)
        images_BHW3 = batch.images.float()
        targets_BK = torch.eye(10)[batch.labels[:, 0]]
    places = np.arange(BATCH)
    if data.mixup.alpha:
        own_B = torch.from_numpy(mix_weights(0, places, seed=0, alpha=data.mixup.alpha))
        partner_B = torch.from_numpy(places ^ 1)
        images_BHW3 = (
            own_B[:, None, None, None] * images_BHW3 + (1 - own_B)[:, None, None, None] * images_BHW3[partner_B]
        )
        targets_BK = own_B[:, None] * targets_BK + (1 - own_B)[:, None] * targets_BK[partner_B]
    with torch.no_grad():
        logits_BK = filled_model(open_weights(str(weights)))(images_BHW3)
    return float(-(targets_BK * logits_BK.log_softmax(dim=1)).sum(dim=1).mean())


def test_killed_and_continued_is_the_unbroken_run_bit_for_bit(
    digits_url: str, finished_runs: FinishedRuns, tmp_path: Path
) -> None:
    unbroken, killed = finished_runs.get(1, *AUGMENTED, *evaluated(digits_url)), tmp_path / "killed"
    words = pretrain_words(digits_url, killed, *AUGMENTED)  # and evaluating on the way leaves no trace in the training

    def first_is_committed(run_dir: Path) -> bool:
        return any((run_dir / "checkpoints").glob("step-00000002/*/MANIFEST.json"))

    assert run_and_kill(words, killed, moment=first_is_committed, num_ranks=1, log_dir=tmp_path)
    assert not (killed / "DONE").exists()
    assert run(words, num_ranks=1, log_dir=tmp_path) == 0

    assert resumed_steps(killed)[-1] >= 2
    assert losses(killed) == losses(unbroken)
    weights = [(folder / "weights" / "model.safetensors").read_bytes() for folder in (unbroken, killed)]
    assert weights[0] == weights[1]


def test_held_out_scores_are_those_of_the_weights_without_mixup(
    digits_url: str, finished_runs: FinishedRuns, tmp_path: Path
) -> None:
    run_dir, scores_dir = finished_runs.get(1, *AUGMENTED, *evaluated(digits_url)), tmp_path / "scores"
    words = ["evaluate", "--weights", str(run_dir / "weights"), "--data.url", digits_url]
    assert run([*words, "--run-dir", str(scores_dir), "--device", "cpu"], num_ranks=1, log_dir=tmp_path) == 0

    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines if "test_accuracy" in line] == [STEPS // 2, STEPS]
    scores = json.loads((scores_dir / "scores.json").read_text())
    assert lines[-1]["test_accuracy"] == scores["accuracy"]
    assert lines[-1]["test_loss"] == pytest.approx(scores["loss"], abs=1e-6)


def test_what_all_ranks_read_is_counted_in_both_curves(finished_runs: FinishedRuns) -> None:
    run_dir = finished_runs.get(2, *AUGMENTED)
    lines = read_metrics(run_dir)
    board = EventAccumulator(str(run_dir)).Reload()
    tags = sorted([*board.Tags()["scalars"], *board.Tags()["images"]])
    assert tags[0] == "train/loss", "TensorBoard, which sorts its cards, opens on it"
    assert sorted({tag.partition("/")[0] for tag in tags}) == ["train", "weights", "work"]

    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for name in COUNT_NAMES:
        values = [line[f"data/{name}"] for line in lines]
        points = board.Scalars(f"work/data/{name}")
        assert [point.step for point in points] == list(range(1, STEPS + 1)), name
        assert [point.value for point in points] == pytest.approx(values, rel=1e-6), name  # points are float32
        assert name == "held_bytes" or values == sorted(values), f"{name} goes back: {values}"
    assert max(line["data/held_bytes"] for line in lines) > 0
    for line in lines:
        # Up to the last batch in flight; the lower bound is more than one rank alone can have read by the last step.
        most = line["step"] + record_of(run_dir).data.steps_ahead
        assert line["step"] * BATCH <= line["data/samples"] <= most * BATCH
        assert line["data/requests"] > 0
        assert line["data/bytes"] > 0
        assert line["data/seconds"] > 0
        faults = ("retries", "broken_bodies", "throttled", "hedges", "hedges_won", "wasted_bytes", "replaced")
        assert [line[f"data/{name}"] for name in faults] == [0.0] * len(faults)


def test_two_datasets_train_together_and_the_record_replays_it(digits_url: str, tmp_path: Path) -> None:
    """By the command line on two ranks, then by its job.yaml on one."""
    run_dir, again = tmp_path / "run", tmp_path / "again"
    other = str(packed_folders(tmp_path, num_classes=3, images_a_class=8))
    words = ["pretrain", "digits_smoke", "--run-dir", str(run_dir), *TINY, *SHORT, "--steps", "3"]
    assert run([*words, "--data.mix", digits_url, "3", other, "1"], num_ranks=2, log_dir=tmp_path) == 0

    job = record_of(run_dir)
    assert (job.data.url, job.data.mix) == ("", ((digits_url, 3.0), (other, 1.0)))
    assert job.model.num_classes == 13
    labels = (*open_dataset(digits_url).label_names, *open_dataset(other).label_names)
    assert open_weights(str(run_dir / "weights")).labels == labels
    assert losses(run_dir)[1] == pytest.approx(math.log(13), abs=1e-6)  # the head begins at zero
    assert all(math.isfinite(loss) for loss in losses(run_dir).values())
    manifest = next((run_dir / "checkpoints").glob("step-00000003/*/MANIFEST.json"))
    assert json.loads(manifest.read_text())["position"]["mix"]["quotas"] == [3, 1]

    assert run(["pretrain", str(run_dir / "job.yaml"), "--run-dir", str(again)], num_ranks=1, log_dir=tmp_path) == 0
    assert record_of(again) == replace(job, run_dir=str(again))
    assert losses(again) == pytest.approx(losses(run_dir), abs=1e-5)
    assert len(losses(again)) == 3
