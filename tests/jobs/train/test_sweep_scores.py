"""The scores of a sweep's runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.train.sweep import best_of, sweep_facts, sweep_json, sweep_table
from jobs.train.sweep_plan import SweepPlan
from jobs.train.trials import TrialScore

RATES = (".01", ".03", ".1")
PLAN = SweepPlan(
    stage="finetune",
    recipe="r",
    folder=Path("s"),
    fixed=(),
    grid=(("--rate", RATES),),
    select_on="h",
    seeds=2,
    first_seed=4,
)


def scores(*accuracies: float | None) -> list[TrialScore]:
    pairs = zip(PLAN.tries(), accuracies, strict=True)
    return [
        TrialScore(trial=trial, state="done" if a is not None else "failed", accuracy=a, why="NaN\x1b")
        for trial, a in pairs
    ]


def repeated(*accuracies: float | None) -> list[TrialScore]:
    trials = PLAN.repetitions((("--rate", ".03"),))
    pairs = zip(trials, accuracies, strict=False)
    return [TrialScore(trial=trial, state="done" if a is not None else "stopped", accuracy=a) for trial, a in pairs]


def test_the_table() -> None:
    assert sweep_table(PLAN, scores(0.5, 0.75, None), repeated(0.7, 0.8)) == (
        "tries/rate=.01  0.5000\n"
        "tries/rate=.03  0.7500  best\n"
        "tries/rate=.1   failed  NaN\\x1b\n"
        "seeds/4         0.7000\n"
        "seeds/5         0.8000\n"
        "mean of 2: 0.7500 ± 0.0707\n"
    )
    assert "mean" not in sweep_table(PLAN, scores(0.5, 0.75, None), repeated(0.7, None))
    assert "(one seed: no deviation)" in sweep_table(PLAN, [], repeated(0.7))


@pytest.mark.parametrize(
    ("accuracies", "hint"), [((0.9, 0.8, 0.7), "lowest that was tried; try lower"), ((0.1, 0.2, 0.3), "highest")]
)
def test_a_best_value_at_the_edge(accuracies: tuple[float, ...], hint: str) -> None:
    assert hint in sweep_table(PLAN, scores(*accuracies), [])


def test_the_best() -> None:
    assert best_of(scores(None, None, None)) is None
    best = best_of(scores(None, 0.5, 0.5))
    assert best
    assert best.trial.name == "tries/rate=.03", "the first of equals"
    zero = best_of(scores(None, 0.0, None))
    assert zero
    assert zero.accuracy == 0.0


def test_the_file() -> None:
    found = json.loads(sweep_json(sweep_facts(PLAN, scores(0.5, 0.75, None), repeated(0.7, 0.8))))
    assert found["best"] == {"--rate": ".03"}
    assert (found["mean"], round(found["deviation"], 4)) == (0.75, 0.0707)
    assert [one["seed"] for one in found["seeds"]] == [4, 5]
    assert found["tries"][0] == {
        "folder": "tries/rate=.01",
        "values": {"--rate": ".01"},
        "state": "done",
        "accuracy": 0.5,
        "command": "patchline finetune r --rate=.01 --run-dir=s/tries/rate=.01 --evaluation.url=h",
    }
    assert sweep_facts(PLAN, scores(0.5, 0.75, None), repeated(0.7, None))["mean"] is None


def test_the_metric_is_named() -> None:
    """A mean over classes is never called an accuracy."""
    plan = replace(PLAN, metric="mean_per_class")
    tries = [TrialScore(trial=one, state="done", accuracy=0.5) for one in plan.tries()]
    seeds = [TrialScore(trial=one, state="done", accuracy=0.5) for one in plan.repetitions(plan.first_values())]
    facts = sweep_facts(plan, tries, seeds)
    assert (facts["score"], facts["tries"][0]["mean_per_class"], facts["mean"]) == ("mean_per_class", 0.5, 0.5)
    assert "accuracy" not in facts["seeds"][0]
    assert sweep_table(plan, tries, seeds).endswith("mean of 2 by mean_per_class: 0.5000 ± 0.0000\n")
    assert sweep_facts(PLAN, scores(0.5, 0.75, None), [])["score"] == "accuracy"
    unscored = [replace(tries[0], accuracy=None, why="it has no score"), *tries[1:]]
    assert "done  it has no score\n" in sweep_table(plan, unscored, [])
