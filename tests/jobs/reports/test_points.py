"""The points of a comparison, from records and metrics that are written here: what is drawn, joined and told apart, and
the further scores of a run on other datasets and from `patchline fewshot`."""

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.recipes import finetune, pretrain
from jobs.record import write_record
from jobs.reports.compare import accuracy_plots, loss_plots, point_table, render
from jobs.reports.points import Point, gather, point_json, point_of, repeated, told_apart
from jobs.settings.models import FewshotJob
from pipeline.evaluation.config import EvaluationConfig, FewshotImages, FewshotInTraining
from pipeline.training.settings.job import OptimizerConfig, TeacherConfig, TrainingJob
from shards.config import HeldOutConfig

ALSO = EvaluationConfig(url="d/a-test", also=("d/b-test", "d/c-test"))
HELD = {"test_accuracy": 0.5, "eval/a-test/accuracy": 0.625, "eval/b-test/accuracy": 0.25}


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
    sized = replace(recipe.model, **{"num_classes": 10, **(model or {})})
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
        ("base/deep/weights", False, "are not there: what their training took is not known"),
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
        "deep tuned": "vit, depth 4, fine-tuned, its own compute",
    }


def test_optimizers_of_one_model_are_told_apart(tmp_path: Path) -> None:
    """As for Table 7 of the paper; otherwise both would be one line. Fine-tuning by SGD adds no name to the others."""
    written(tmp_path / "adam")
    written(tmp_path / "tuned", stage="finetune", weights="gone")
    assert {one.line for one in points_in(tmp_path).values()} == {"vit", "vit, fine-tuned, its own compute"}
    written(tmp_path / "muon", optimizer=OptimizerConfig(name="muon"))
    lines = {name: one.line for name, one in points_in(tmp_path).items()}
    assert lines == {"adam": "vit, AdamW", "muon": "vit, Muon", "tuned": "vit, fine-tuned, its own compute"}


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


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        pytest.param({}, "softmax", id="labels"),
        pytest.param(
            {"teacher": TeacherConfig(weights="w")}, "of a teacher", id="a KL divergence, not a cross-entropy"
        ),
        pytest.param(
            {"teacher": TeacherConfig(weights="w", share=0.5, temperature=2.0)},
            "of a teacher, share 0.5, temperature 2",
            id="a sum of two kinds, of another scale",
        ),
        pytest.param(
            {"teacher": TeacherConfig(weights="w", target="hard")}, "of a teacher, target hard", id="hard targets"
        ),
        pytest.param(
            {"model": {"masked_patches": True, "num_classes": 512}}, "masked patches", id="classes of mean colours"
        ),
        pytest.param(
            {"model": {"masked_patches": True, "masked_target": "pixels", "num_classes": 192}},
            "masked patches, target pixels",
            id="a squared error",
        ),
    ],
)
def test_each_kind_of_loss_has_a_name(tmp_path: Path, fields: dict[str, Any], name: str) -> None:
    assert point_of(written(tmp_path / "a", **fields), name="a").loss_name == name


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


def test_accuracies_over_steps_are_drawn_by_dataset_and_equal_ones_are_named(tmp_path: Path) -> None:
    on = {name: EvaluationConfig(url=f"data/{name}") for name in ("pets-test", "digits-test")}
    equal = [{"loss": 1.0, "test_accuracy": value} for value in (0.2, 0.4)]
    written(tmp_path / "a", equal, evaluation=on["pets-test"])
    written(tmp_path / "b", equal, evaluation=on["pets-test"])
    written(tmp_path / "c", [*equal[:1], {"loss": 1.0, "test_accuracy": 0.6}], evaluation=on["digits-test"])
    written(tmp_path / "one score", equal[:1], evaluation=on["pets-test"])
    digits, pets = accuracy_plots(list(points_in(tmp_path).values()))
    assert (digits.title, pets.title) == ("Accuracy on digits-test", "Accuracy on pets-test")
    assert pets.keys == (("line-0", "a"), ("line-1 dashed", "b, equal to a"))
    assert "a ends at 40; b, equal to a ends at 40." in pets.picture
    assert digits.keys == (("line-0", "c"),)


def test_each_of_several_equal_curves_can_be_seen(tmp_path: Path) -> None:
    """Later curves lie on earlier ones, so each leaves some of the line to every other."""
    for name in "abc":
        written(tmp_path / name, [{"loss": 2.0}, {"loss": 1.0}])
    (plot,) = loss_plots(list(points_in(tmp_path).values()))
    dashes = re.findall(r"<g style=\"stroke-dasharray:(\d+) (\d+);stroke-dashoffset:-(\d+)\"><polyline", plot.picture)
    on = [set(range(int(start), int(start) + int(length))) for length, _, start in dashes]
    period, *others = {int(length) + int(gap) for length, gap, _ in dashes}
    assert (len(on), others) == (2, []), "the first of the three is whole, and lies below"
    assert not on[0] & on[1]
    assert on[0] | on[1] < set(range(period))


def test_an_accuracy_is_only_drawn_beside_those_on_the_same_dataset(tmp_path: Path) -> None:
    on = {name: EvaluationConfig(url=f"data/{name}") for name in ("pets-test", "digits-test")}
    for name, dataset in zip("abcd", [*on, *on], strict=True):
        written(tmp_path / name, evaluation=on[dataset])
    written(tmp_path / "e", evaluation=EvaluationConfig(url="data/flowers-test"))
    points = points_in(tmp_path)
    assert [points[name].dataset for name in "ab"] == ["pets-test", "digits-test"]
    page = render(list(points.values()), []).decode()
    for name in on:
        plot = page.partition(f"Accuracy on {name} over compute</h3>")[2].partition("</svg>")[0]
        assert plot.count("<circle") == 2
    assert " over data</h3>" not in page, "all have the same data"
    assert "Accuracy on flowers-test" not in page, "a plot of one point"
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


def measured(run: Path, *, weights: str = "best", url: str = "d/few", ridge: Sequence[float] = (0.25, 0.75)) -> Path:
    """What `patchline fewshot RUN/best --data.url d/few --shots 5 --run-dir RUN/fewshot` leaves."""
    folder = run / "fewshot"
    job = FewshotJob(weights=str(run / weights), shots=(5,), data=FewshotImages(url=url))
    write_record(folder, stage="fewshot", job=job)
    result = {"shots": 5, "ridge": ridge, "ridge_mean": sum(ridge) / len(ridge), "ridge_deviation": 0.125}
    facts = {"results": [result], "weights": job.weights, "data_url": url, "test_url": f"{url}-test"}
    (folder / "fewshot.json").write_text(json.dumps(facts))
    return run


def also(run: Path) -> list[str]:
    return [one.words() for one in point_of(run, name="run").also]


def test_other_datasets_are_scored_beside_a_part_that_is_held_out(tmp_path: Path) -> None:
    """Of pre-training after the step with the best accuracy on that part, of fine-tuning after the last."""
    lines = [HELD | {"test_accuracy": 0.75, "eval/b-test/accuracy": 0.375}, HELD, {"loss": 1.0}]
    run = written(tmp_path / "run", lines, evaluation=ALSO)
    assert also(run) == ["b-test: 0.3750"], "the first is its own accuracy; the last has no score"
    data = replace(pretrain.RECIPES["digits_smoke"]().data, held_out=HeldOutConfig(share=0.1))
    trained = written(tmp_path / "a", lines, evaluation=ALSO, data=data)
    tuned = written(tmp_path / "b", lines, evaluation=ALSO, data=data, stage="finetune", weights="gone")
    assert also(trained) == ["a-test: 0.6250", "b-test: 0.3750"]
    assert also(tuned) == ["a-test: 0.6250", "b-test: 0.2500"]


def test_beside_an_averaged_accuracy_the_others_are_averaged(tmp_path: Path) -> None:
    last = HELD | {"test_ema_accuracy": 0.25, "eval/b-test/ema_accuracy": 0.125}
    run = written(tmp_path / "run", [HELD, last], evaluation=ALSO, ema_decay=0.9)
    assert also(run) == ["b-test: 0.1250"]


@pytest.mark.parametrize(
    ("weights", "ridge", "words"),
    [
        ("best", (0.25, 0.75), "few-test: 0.5000 ± 0.1250 (5 shots, best)"),
        ("weights", (0.5,), "few-test: 0.5000 (5 shots, weights)"),
        ("", (0.5, 0.5), "few-test: 0.5000 ± 0.1250 (5 shots)"),
        ("../moved/best", (0.5, 0.5), "few-test: 0.5000 ± 0.1250 (5 shots, best)"),
    ],
)
def test_few_shot_accuracies_of_the_runs_weights(
    tmp_path: Path, weights: str, ridge: tuple[float, ...], words: str
) -> None:
    assert also(measured(written(tmp_path / "run"), weights=weights, ridge=ridge)) == [words]


def test_what_is_not_of_this_run_is_said_and_left_out(tmp_path: Path) -> None:
    written(tmp_path / "other")
    (tmp_path / "other" / "best").mkdir()
    point = point_of(measured(written(tmp_path / "run"), weights="../other/best"), name="run")
    assert point.also == ()
    assert f"fewshot/fewshot.json is of the weights '{tmp_path}/run/../other/best', not of this run's" in point.reasons
    run = measured(tmp_path / "run")
    write_record(run / "fewshot", stage="fewshot", job=FewshotJob(weights="w", data=FewshotImages(url="d/few")))
    assert "fewshot/fewshot.json is not of the job beside it: measure again" in point_of(run, name="run").reasons


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": 3, "weights": "W", "data_url": "d/few"}'])
def test_damaged_results_are_a_reason(tmp_path: Path, text: str) -> None:
    run = measured(written(tmp_path / "run"))
    (run / "fewshot" / "fewshot.json").write_text(text.replace("W", str(run / "best")))
    point = point_of(run, name="run")
    assert point.also == ()
    assert "fewshot/fewshot.json cannot be used" in " ".join(point.reasons)


def drawn(points: Sequence[Point], title: str) -> str:
    return render(points, []).decode().partition(f'<h3 class="words">{title}</h3>')[2].partition("</svg>")[0]


def test_further_scores_are_drawn_with_those_on_the_same_dataset(tmp_path: Path) -> None:
    """The few-shot accuracy of the best weights is drawn in place of the last of the run itself."""
    few = FewshotInTraining(url="d/few", shots=(5,))
    lines = [HELD | {"fewshot/5_shots": 0.125}]
    measured(written(tmp_path / "a", lines, evaluation=ALSO, fewshot=few))
    written(tmp_path / "b", lines, evaluation=EvaluationConfig(url="d/b-test"), fewshot=few)
    found, notes = gather([tmp_path / "a", tmp_path / "b"], root=tmp_path)
    points = told_apart(found)
    assert notes == []
    on_b = drawn(points, "Accuracy on b-test over compute")
    assert on_b.count("<circle") == 2
    assert "a 25.0 at" in on_b
    assert "b 50.0 at" in on_b
    few_shot = drawn(points, "5-shot accuracy on few-test over data")
    assert few_shot.count("<circle") == 2
    assert "a 50.0 at" in few_shot
    assert "b 12.5 at" in few_shot
    assert "b-test: 0.2500; few-test: 0.5000 ± 0.1250 (5 shots, best)" in point_table(points)
    assert [one["score"] for one in json.loads(json.dumps(point_json(points[0])))["also"]] == [0.25, 0.5]


def test_further_scores_of_repetitions_are_means(tmp_path: Path) -> None:
    runs = [measured(written(tmp_path / name, [HELD], evaluation=ALSO), ridge=(0.5, 0.5)) for name in "01"]
    third = written(tmp_path / "2", [HELD | {"eval/b-test/accuracy": 0.75}], evaluation=ALSO)
    point = repeated([point_of(run, name=run.name) for run in (*runs, third)], name="sweep")
    assert [one.words() for one in point.also] == [
        "b-test: 0.4167 ± 0.2887",
        "few-test: 0.5000 ± 0.0000 (5 shots, best)",
    ]
    assert point.reasons == ("1 of 3 repetitions have no 5-shot accuracy on few-test",)
