"""The first and last lines of a run fit 80 columns and give the next command."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jobs.cli import _overridden
from jobs.recipes import pretrain
from jobs.recipes.pretrain import digits_smoke
from jobs.recipes.shorter import smoke
from jobs.settings.models import WeightsJob
from jobs.submittable import job_of_words
from pipeline.checkpoints.stored import Best, write_best
from pipeline.data.config import DataConfig
from pipeline.evaluation.config import EvaluationConfig
from pipeline.models.loss import classification_loss
from pipeline.training.settings.job import InitialConfig, TrainingJob
from pipeline.training.summary import (
    Opening,
    Score,
    closing_words,
    first_sigmoid_loss,
    next_command,
    num_parameters,
    scores_of,
)
from pipeline.training.zero.batch_plan import plan_batch
from tests.rigs.processes import one_world

SECONDS = {"compute": 60.0, "data_wait": 4.0, "total": 90.0}
WIDTH = 80 - len("12:34:56 ")


def job(**fields: object) -> TrainingJob:
    base = digits_smoke()
    model = replace(base.model, num_classes=10)
    return replace(base, run_dir="runs/digits", data=replace(base.data, url="data/digits"), model=model, **fields)  # type: ignore[arg-type]


def opening(job: TrainingJob, *, num_ranks: int = 1, resumed_step: int = 0, device: str = "cpu") -> list[str]:
    plan = plan_batch(job.global_batch, micro_batch=job.micro_batch, num_ranks=num_ranks, lanes=job.data.lanes)
    world = replace(one_world(0, num_ranks), num_threads=2, device=torch.device(device))
    words = Opening(
        job=job,
        world=world,
        plan=plan,
        resumed_step=resumed_step,
        num_parameters=822_000,
        num_images=1438,
        labels_per_image=1.0,
        most_read_ahead_bytes=10_000_000,
    ).words()
    return words.split("\n")


def test_a_run_begins_with_four_short_lines() -> None:
    lines = opening(replace(job(), engine=replace(job().engine, precision="fp32")))
    assert lines[:4] == [
        "runs/digits: from scratch, seed 0",
        "vit, 822 k parameters, 32 px, 10 classes; fp32, ZeRO-1",
        "300 steps of 128 images, 26.7 epochs of the 1,438 in data/digits",
        "1 process on cpu with 2 threads, up to 0.01 GB read ahead",
    ]
    assert all(len(line) <= WIDTH for line in lines[:4])


@pytest.mark.parametrize(
    ("line", "text"),
    [
        pytest.param(opening(job(), resumed_step=1150)[0], "runs/digits: continuing from step 1,150", id="continued"),
        pytest.param(
            opening(job(initial=InitialConfig(weights="runs/a/weights")))[0],
            "runs/digits: from runs/a/weights",
            id="from weights",
        ),
        pytest.param(
            opening(job(micro_batch=16), num_ranks=4)[2].split(",")[0],
            "300 steps of 128 images (16 x 2 x 4 processes)",
            id="how a batch is made up",
        ),
        pytest.param(opening(job(), num_ranks=2)[3].split(",")[0], "2 processes on cpu with 2 threads each", id="2"),
        pytest.param(opening(job(), num_ranks=2, device="cuda")[3].split(",")[0], "2 processes on cuda", id="GPUs"),
        pytest.param(
            opening(replace(job(), run_dir="runs/\x1b[31m"))[0], "runs/\\x1b[31m: from scratch, seed 0", id="a bad name"
        ),
        pytest.param(
            opening(replace(job(), data=replace(job().data, url="", mix=(("a", 1.0), ("b", 2.0)))))[2],
            "300 steps of 128 images, of 2 mixed datasets",
            id="a mix has no epochs",
        ),
    ],
)
def test_what_the_lines_say(line: str, text: str) -> None:
    assert line == text


def sigmoid_job(*, num_classes: int, head_bias: float, smoothing: float = 0.0) -> TrainingJob:
    model = replace(job().model, num_classes=num_classes, head_bias=head_bias)
    return replace(job(), loss="sigmoid", label_smoothing=smoothing, model=model)


@pytest.mark.parametrize(
    ("num_classes", "head_bias", "smoothing", "shown"),
    [
        pytest.param(21_843, -10.0, 0.0, "10.99", id="the paper's head on ImageNet-21k"),
        pytest.param(1000, -6.9, 0.0, "7.907", id="the paper's head on ImageNet-1k"),
        pytest.param(10, 0.0, 0.0, "6.931", id="no constant: K ln 2"),
        pytest.param(10, -10.0, 0.1, "18", id="smoothing turns a tenth of every target round"),
        pytest.param(10, 2.0, 0.0, "19.27", id="a positive constant"),
    ],
)
def test_the_opening_has_the_loss_that_a_sigmoid_starts_at(
    num_classes: int, head_bias: float, smoothing: float, shown: str
) -> None:
    own = sigmoid_job(num_classes=num_classes, head_bias=head_bias, smoothing=smoothing)
    line = opening(own)[2]
    assert line == f"sigmoid loss summed over {num_classes:,} classes: starts near {shown}"
    assert len(line) <= WIDTH
    logits = torch.full((4, num_classes), head_bias)
    labels = torch.tensor([[1, 3], [2, -1], [4, 5], [0, -1]])  # 1.5 labels of each image
    loss = classification_loss(logits, labels, name="sigmoid", smoothing=smoothing).item()
    assert first_sigmoid_loss(own, labels_per_image=1.5) == pytest.approx(loss, rel=1e-5)
    for other in (
        opening(own, resumed_step=5),
        opening(replace(own, initial=InitialConfig(weights="w"))),
        opening(job()),
    ):
        assert not any("starts near" in line for line in other)


def test_a_tiny_model_is_called_one() -> None:
    recipe = smoke(pretrain.RECIPES["vit_h14_jft"]())
    lines = opening(replace(recipe, model=replace(recipe.model, num_classes=10)))
    assert lines[1].startswith("vit_h14_smoke, 822 k parameters")
    assert lines[2] == "a tiny model: it shows that the recipe runs, not how well it trains"
    assert len(lines[2]) <= WIDTH


def write_scores(run_dir: Path, *accuracies: float) -> None:
    lines = [json.dumps({"step": 5, "loss": 1.0})]
    for number, accuracy in enumerate(accuracies, start=1):
        lines.append(json.dumps({"step": 10 * number, "loss": 1.0, "test_accuracy": accuracy, "test_loss": 0.5}))
    (run_dir / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 99, "test_accuracy": 0.9']))


def test_a_run_ends_with_its_accuracy_its_weights_and_the_next_command(tmp_path: Path) -> None:
    write_scores(tmp_path, 0.25, 0.75, 0.5)
    own = job(evaluation=EvaluationConfig(url="data/digits-test"))
    words = closing_words(replace(own, run_dir=str(tmp_path)), steps=300, seconds=SECONDS, weights=tmp_path / "weights")
    assert words.split("\n") == [
        "done: 300 steps in 1 min 30 s, 600 images/s while training",
        "test accuracy 0.500, loss 0.5; best 0.750 at step 20",
        f"weights: {tmp_path}/weights, of step 300",
        f"curves: tensorboard --logdir {tmp_path}",
        f"next: patchline predict {tmp_path}/weights IMAGE",
    ]


def test_a_run_ends_with_what_is_better_than_its_end(tmp_path: Path) -> None:
    """Chance stands beside the accuracy; averaged weights count with their own."""
    own = replace(job(evaluation=EvaluationConfig(url="data/digits-test")), run_dir=str(tmp_path))

    def words(*scores: dict[str, float]) -> list[str]:
        lines = [json.dumps({"loss": 1.0, "test_loss": 0.5, "test_chance": 0.125} | line) for line in scores]
        (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
        return closing_words(own, steps=300, seconds=SECONDS, weights=tmp_path / "weights").split("\n")

    earlier, last = {"step": 200, "test_accuracy": 0.75}, {"step": 300, "test_accuracy": 0.5}
    assert not [line for line in words(earlier, last) if "better" in line], "it was not kept"
    kept = Best(
        step=200, checkpoint="step-00000200/attempt-0001-0123abcd", accuracy=0.75, loss=0.5, images=9, dataset=""
    )
    write_best(tmp_path, kept)
    found = words(earlier, last)
    assert found[1] == "test accuracy 0.500 (chance 0.125), loss 0.5; best 0.750 at step 200"
    assert found[3] == "better: step 200, accuracy 0.750 against 0.500; its weights:"
    command = shlex.split("\n".join(found[4:]).partition("\ncurves")[0].replace("\\\n", " "))
    assert command == ["patchline", "weights", str(tmp_path), "--best", "--out", str(tmp_path / "best")]
    taken = job_of_words(command[1:], _overridden)
    assert taken == WeightsJob(run=str(tmp_path), best=True, out=str(tmp_path / "best"))
    found = words(earlier, last | {"test_ema_accuracy": 0.8})
    assert found[2] == "test accuracy 0.800 with the averaged weights, which are kept"
    assert not [line for line in found if "better" in line]
    found = words(earlier, last | {"test_accuracy": 0.9, "test_ema_accuracy": 0.6})
    assert found[4] == "better: step 200, accuracy 0.750 against 0.600; its weights:", "those that are kept count"
    assert "--best --raw" in " ".join(found[5:]), "the raw weights have that score"


def test_a_run_that_lost_its_ledger_has_no_speed() -> None:
    lost = SECONDS | {"compute": 0.0, "data_wait": 0.0}
    words = closing_words(job(), steps=300, seconds=lost, weights=Path("w"))
    assert words.partition("\n")[0] == "done: 300 steps in 1 min 30 s"


def test_a_run_without_scores_is_to_be_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "digits-test").mkdir(parents=True)
    words = closing_words(replace(job(), run_dir="r"), steps=1, seconds=SECONDS, weights=Path("r/weights"))
    assert "accuracy" not in words
    assert words.split("\n")[-1:] == [
        "next: patchline evaluate r/weights --data.url data/digits-test",
    ]
    assert next_command(job(loss="sigmoid", label_smoothing=0.0), Path("w")) == [
        *("patchline", "evaluate", "w", "--data.url", "data/digits-test"),
    ]
    masked = replace(job(), model=replace(job().model, num_classes=512, masked_patches=True), label_smoothing=0.0)
    found = next_command(replace(masked, evaluation=EvaluationConfig(), data=DataConfig(url="digits")), Path("w"))
    assert found == ["patchline", "fewshot", "w", "--data.url", "digits"]
    assert next_command(replace(job(), data=DataConfig(mix=(("a", 1.0),))), Path("w"))[-1] == "URL"
    assert next_command(replace(job(), data=DataConfig(url="elsewhere")), Path("w"))[-1] == "URL", "nothing is there"
    remote = replace(job(), data=DataConfig(url="s3://bucket/digits"))
    assert next_command(remote, Path("w"))[-1] == "s3://bucket/digits-test", "asking would take time"


def test_scores_are_read_without_a_half_written_line(tmp_path: Path) -> None:
    assert scores_of(tmp_path) == []
    write_scores(tmp_path, 0.25)
    assert scores_of(tmp_path) == [Score(step=10, accuracy=0.25, loss=0.5)]


@pytest.mark.parametrize(
    "bad", [b'{"test_accuracy": 0.5}', b'{"step": 1, "test_accuracy": "x", "test_loss": 1}', b"\xff"]
)
def test_scores_are_read_between_unusable_lines(tmp_path: Path, bad: bytes) -> None:
    write_scores(tmp_path, 0.25)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(bad + b'"test_accuracy"\n' + bad + b"\n" + path.read_bytes())
    assert scores_of(tmp_path) == [Score(step=10, accuracy=0.25, loss=0.5)]


def test_parameters_are_counted() -> None:
    assert num_parameters([(2, 3), (), (4,)]) == 11
