"""The further scores of a run in a comparison: on other datasets, and what `patchline fewshot` has measured of it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.recipes import pretrain
from jobs.record import write_record
from jobs.reports.compare import point_table, render
from jobs.reports.points import Point, gather, point_json, point_of, repeated, told_apart
from jobs.settings.models import FewshotJob
from pipeline.evaluation.config import EvaluationConfig, FewshotImages, FewshotInTraining
from shards.config import HeldOutConfig
from tests.jobs.reports.test_compare_facts import written

ALSO = EvaluationConfig(url="d/a-test", also=("d/b-test", "d/c-test"))
HELD = {"test_accuracy": 0.5, "eval/a-test/accuracy": 0.625, "eval/b-test/accuracy": 0.25}


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
    on_b = drawn(points, "Accuracy on b-test over data")
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
