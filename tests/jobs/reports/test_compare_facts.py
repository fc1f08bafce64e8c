"""The points of a comparison, from records and metrics that are written here: what is drawn, joined and told apart."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.recipes import finetune, pretrain
from jobs.record import write_record
from jobs.reports.compare import loss_plots, render
from jobs.reports.points import Point, gather, point_json, point_of, repeated, told_apart
from pipeline.evaluation.config import EvaluationConfig
from pipeline.training.settings.job import OptimizerConfig, TrainingJob


def written(
    folder: Path,
    lines: Sequence[dict[str, Any]] = ({"test_accuracy": 0.5},),
    *,
    stage: str = "pretrain",
    weights: str = "",
    model: dict[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """A run of digits_smoke or digits_48 whose metrics have these lines, at steps 1, 2 and so on."""
    recipe: TrainingJob = (finetune if stage == "finetune" else pretrain).RECIPES[
        "digits_48" if stage == "finetune" else "digits_smoke"
    ]()
    sized = replace(recipe.model, num_classes=10, **(model or {}))
    job = replace(recipe, model=sized, initial=replace(recipe.initial, weights=weights), **fields)
    folder.mkdir(parents=True, exist_ok=True)
    write_record(folder, stage=stage, job=job)
    metrics = [{"step": step, "loss": 1.0, "epoch": step / 2, **line} for step, line in enumerate(lines, start=1)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in metrics))
    return folder


@pytest.mark.parametrize(
    ("weights", "has_compute", "reason"),
    [
        ("base", True, ""),
        ("base/weights", True, ""),
        ("base/weights/", True, ""),
        ("base/best", False, "may be of any checkpoint of their run, so its compute is not known"),
        ("base/deep/weights", False, "is not there, so its compute and data are not known"),
    ],
)
def test_only_final_weights_have_the_compute_of_their_run(
    tmp_path: Path, weights: str, has_compute: bool, reason: str
) -> None:
    base = point_of(written(tmp_path / "base"), name="base")
    tuned = point_of(written(tmp_path / "tuned", stage="finetune", weights=f"{tmp_path}/{weights}"), name="tuned")
    assert (tuned.exaflops is not None) is has_compute
    assert tuned.num_images == (None if "deep" in weights else base.num_images)
    assert reason in " ".join(tuned.reasons)


def points_in(root: Path) -> dict[str, Point]:
    points, notes = gather([record.parent for record in sorted(root.rglob("job.yaml"))], root=root)
    assert notes == []
    return {one.name: one for one in told_apart(points)}


def test_models_of_one_name_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    written(tmp_path / "shallow", model={"depth": 2})
    written(tmp_path / "deep", model={"depth": 4})
    written(tmp_path / "deep again", model={"depth": 4})
    written(tmp_path / "deep tuned", stage="finetune", weights="gone", model={"depth": 4})
    lines = {name: one.line for name, one in points_in(tmp_path).items()}
    assert lines == {
        "shallow": "vit, depth 2",
        "deep": "vit, depth 4",
        "deep again": "vit, depth 4",
        "deep tuned": "vit, depth 4, fine-tuned",
    }


def test_optimizers_of_one_model_are_told_apart(tmp_path: Path) -> None:
    """As for Table 7 of the paper; otherwise both would be one line. Fine-tuning by SGD adds no name to the others."""
    written(tmp_path / "adam")
    written(tmp_path / "tuned", stage="finetune", weights="gone")
    assert {one.line for one in points_in(tmp_path).values()} == {"vit", "vit, fine-tuned"}
    written(tmp_path / "muon", optimizer=OptimizerConfig(name="muon"))
    lines = {name: one.line for name, one in points_in(tmp_path).items()}
    assert lines == {"adam": "vit, AdamW", "muon": "vit, Muon", "tuned": "vit, fine-tuned"}


def test_fine_tuned_models_are_told_apart_by_the_optimiser_of_their_pre_training(tmp_path: Path) -> None:
    """Table 7 of the paper: the optimisers of pre-training are compared after fine-tuning."""
    for name in ("adamw", "sgd"):
        written(tmp_path / name, optimizer=OptimizerConfig(name=name))
        written(tmp_path / f"{name} tuned", stage="finetune", weights=f"{tmp_path}/{name}/weights")
    written(tmp_path / "sgd tuned again", stage="finetune", weights=f"{tmp_path}/sgd tuned/weights")
    lines = {name: one.line for name, one in points_in(tmp_path).items()}
    assert lines == {
        "adamw": "vit, AdamW",
        "sgd": "vit, SGD",
        "adamw tuned": "vit, pre-trained by AdamW, fine-tuned",
        "sgd tuned": "vit, pre-trained by SGD, fine-tuned",
        "sgd tuned again": "vit, pre-trained by SGD, fine-tuned",
    }


def test_what_differs_is_said_of_each_run(tmp_path: Path) -> None:
    """Among runs of one stage; not where they compute, how they are scored, or what other columns show."""
    written(tmp_path / "a", steps=300, device="cpu", model={"dropout": 0.1})
    written(tmp_path / "b", steps=200, optimizer=OptimizerConfig(name="sgd", weight_decay=0.05), model={"depth": 2})
    written(tmp_path / "tuned", stage="finetune", weights="gone")
    differs = {name: one.differs for name, one in points_in(tmp_path).items()}
    assert differs == {
        "a": ("dropout 0.1", "steps 300", "optimizer.name adamw"),
        "b": ("dropout 0.0", "steps 200", "optimizer.name sgd"),
        "tuned": (),
    }
    points = [point_of(tmp_path / name, name=name) for name in "ab"]
    (both,) = told_apart([repeated(points, name="sweep")])
    assert both.differs == ()
    assert not {"dropout", "steps"} & {name.rpartition(".")[2] for name in both.settings}
    assert point_json(both)["differs"] == ()


def test_losses_are_means_over_columns_and_drawn_by_run(tmp_path: Path) -> None:
    noisy = [{"loss": 2.0 + (-1) ** step / 2} for step in range(1200)]
    written(tmp_path / "a", noisy)
    written(tmp_path / "b", [{"loss": 1.0}, {"loss": float("nan")}, {"loss": 0.5}], global_batch=64)
    written(tmp_path / "sigmoid", [{"loss": 9.0}, {"loss": 8.0}], loss="sigmoid")
    written(tmp_path / "one line")
    points = points_in(tmp_path)
    assert len(points["a"].losses) == 200
    assert {loss for _, loss in points["a"].losses} == {2.0}
    assert points["b"].losses == ((1, 1.0), (3, 0.5))
    sigmoid, softmax = loss_plots(list(points.values()))
    assert (sigmoid.title, softmax.title) == ("Training loss, sigmoid", "Training loss, softmax")
    assert [name for _, name in softmax.keys] == ["b", "a"]
    assert "over images trained on: b ends at 0.5; a ends at 2." in softmax.picture
    assert "over step: sigmoid ends at 8." in sigmoid.picture
    many = [replace(points["b"], name=str(number)) for number in range(19)]
    (plot,) = loss_plots(many)
    assert (len(plot.keys), plot.keys[8][0], plot.words) == (
        16,
        "line-0 dashed",
        "3 more runs not drawn: compare fewer to see them.",
    )


def test_an_accuracy_is_only_drawn_beside_those_on_the_same_dataset(tmp_path: Path) -> None:
    on = {name: EvaluationConfig(url=f"data/{name}") for name in ("pets-test", "digits-test")}
    written(tmp_path / "a", evaluation=on["pets-test"])
    written(tmp_path / "b", evaluation=on["digits-test"])
    points = points_in(tmp_path)
    assert [points[name].dataset for name in "ab"] == ["pets-test", "digits-test"]
    page = render(list(points.values()), []).decode()
    for name in on:
        for axis in ("compute", "data"):
            plot = page.partition(f"Accuracy on {name} over {axis}</h3>")[2].partition("</svg>")[0]
            assert plot.count("<circle") == 1
    assert "<polyline" not in page


def test_pre_training_is_drawn_at_its_best_and_fine_tuning_at_its_end(tmp_path: Path) -> None:
    """Section 4.3 of the paper; the accuracy of a run stays its last one."""
    lines = [{"test_accuracy": 0.5}, {"test_accuracy": 0.75}, {"test_accuracy": 0.25}]
    trained, tuned = written(tmp_path / "a", lines), written(tmp_path / "b", lines, stage="finetune", weights="gone")
    points = [point_of(folder, name=folder.name) for folder in (trained, tuned)]
    assert [(one.accuracy, one.best_accuracy, one.drawn[0]) for one in points] == [
        (0.25, 0.75, 0.75),
        (0.25, 0.75, 0.25),
    ]


@pytest.mark.parametrize(
    ("lines", "accuracy", "best", "is_averaged", "has_reason"),
    [
        ([{"test_accuracy": 0.75}, {"test_accuracy": 0.5, "test_ema_accuracy": 0.625}], 0.625, 0.625, True, False),
        ([{"test_accuracy": 0.75}, {"test_accuracy": 0.5}], 0.5, 0.75, False, True),
        (  # extended, and not at its end
            [{"test_accuracy": 0.5, "test_ema_accuracy": 0.625}, {"test_accuracy": 0.375}], 0.375, 0.5, False, True
        ),
        ([{"test_accuracy": 0.5, "test_ema_accuracy": 0.625}, {}], 0.625, 0.625, True, False),
    ],
)  # fmt: skip
def test_the_accuracy_is_that_of_the_averaged_weights_if_it_is_known(
    tmp_path: Path,
    lines: list[dict[str, float]],
    accuracy: float,
    best: float,
    is_averaged: bool,
    has_reason: bool,
) -> None:
    point = point_of(written(tmp_path / "run", lines, ema_decay=0.9), name="run")
    assert (point.accuracy, point.best_accuracy, point.is_averaged) == (accuracy, best, is_averaged)
    assert ("its accuracy is of the raw weights" in " ".join(point.reasons)) is has_reason


def test_every_score_of_repetitions_is_a_mean_with_a_deviation(tmp_path: Path) -> None:
    few = "fewshot/5_shots"
    lines = [
        [{"test_accuracy": 0.75}, {"test_accuracy": 0.5, few: 0.25, "fewshot/10_shots": 0.5}],
        [{"test_accuracy": 0.25}, {"test_accuracy": 0.25, few: 0.75}],
    ]
    runs = [point_of(written(tmp_path / str(seed), found), name="") for seed, found in enumerate(lines)]
    point = repeated(runs, name="sweep")
    spread = statistics.stdev([0.25, 0.75])
    assert (point.accuracy, point.deviation) == (0.375, spread / 2)
    assert (point.best_accuracy, point.best_deviation) == (0.5, spread)
    assert (point.fewshot, point.fewshot_deviation) == ({5: 0.5, 10: 0.5}, {5: spread})
    assert point.reasons == ("1 of 2 repetitions have no 10-shot accuracy",)
    assert point.drawn == (0.5, spread)
