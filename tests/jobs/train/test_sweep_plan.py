"""What a sweep runs, from its words."""

from pathlib import Path

import pytest

from jobs.resolve import default_job
from jobs.submittable import job_of_words
from jobs.train.sweep_plan import SweepPlan, plan_of
from shards.errors import UserError
from tests.rigs.fake_runs import override

DEFAULT = default_job("finetune", "digits_48")
RATES = ("--schedule.learning-rate", ".003", ".01", "--select-on", "data/held-out", "--run-dir", "s")


def plan(*words: str) -> SweepPlan:
    return plan_of(["finetune", "digits_48", *words], DEFAULT)


def test_a_try_for_each_point_of_the_grid() -> None:
    found = plan(*RATES, "--steps=10", "20", "--data.url", "data/x", "--processes=2")
    assert [one.name for one in found.tries()] == [
        "tries/learning-rate=.003,steps=10",
        "tries/learning-rate=.003,steps=20",
        "tries/learning-rate=.01,steps=10",
        "tries/learning-rate=.01,steps=20",
    ]
    first = found.tries()[0]
    assert first.words == (
        *("finetune", "digits_48", "--data.url", "data/x", "--processes", "2"),
        *("--schedule.learning-rate=.003", "--steps=10", "--run-dir=s/tries/learning-rate=.003,steps=10"),
        "--evaluation.url=data/held-out",
    )
    assert first.values == (("--schedule.learning-rate", ".003"), ("--steps", "10"))


def test_the_best_is_repeated_with_seeds_and_scored_elsewhere() -> None:
    found = plan(*RATES, "--evaluation.url=data/test", "--seeds", "2", "--seed=7")
    runs = found.repetitions((("--schedule.learning-rate", ".01"),))
    assert [(one.name, one.seed) for one in runs] == [("seeds/7", 7), ("seeds/8", 8)]
    assert runs[1].words[2:] == (
        *(
            "--evaluation.url",
            "data/test",
            "--seed",
            "7",
            "--schedule.learning-rate=.01",
            "--run-dir=s/seeds/8",
            "--seed=8",
        ),
    )
    assert plan("--run-dir", "s").tries() == []
    assert len(plan("--run-dir", "s").repetitions(())) == 3


def test_tries_are_compared_on_what_is_held_out_and_the_best_gets_all() -> None:
    words = ("--schedule.learning-rate", ".003", ".01", "--data.held_out.share", ".1", "--evaluation.url=data/test")
    found = plan(*words, "--run-dir", "s")
    assert found.tries()[0].words[-3:] == ("--evaluation.url=", "--data.held_out.share", ".1")
    for run in found.repetitions(found.first_values()):
        assert not any("held" in word for word in run.words)
        assert "data/test" in run.words


def test_other_datasets_are_scored_by_the_repetitions_alone() -> None:
    """Most are test sets, on which nothing is chosen."""
    words = ("--schedule.learning-rate", ".003", ".01", "--data.held-out.share=.1", "--evaluation.url=data/test")
    found = plan(*words, "--evaluation.also", "a", "b", "--run-dir", "s")
    assert not any("also" in word for one in found.tries() for word in one.words)
    for run in found.repetitions(found.first_values()):
        assert run.words[-4:-1] == ("--evaluation.also", "a", "b")
    for one in (*found.tries(), *found.repetitions(found.first_values())):
        job_of_words([*one.words, "--data.url=d", "--initial.weights=w"], override)


def test_flags_of_one_last_word_have_whole_names() -> None:
    found = plan("--global-batch", "1", "2", "--checkpoint.url", "a", "b", "--evaluation.url", "c", "d/e", *RATES[3:])
    assert found.tries()[0].folder.name == "global-batch=1,checkpoint.url=a,evaluation.url=c"
    assert found.tries()[-1].folder == Path("s/tries/global-batch=2,checkpoint.url=b,evaluation.url=d_e")


def test_the_tasks_of_an_array_share_the_tries() -> None:
    parts = [plan(*RATES, "--steps", "1", "2", "3", "--phase=tries", f"--part={part}/4") for part in range(4)]
    assert [len(one.own(one.tries())) for one in parts] == [2, 2, 1, 1]
    assert {trial.name for one in parts for trial in one.own(one.tries())} == {one.name for one in parts[0].tries()}


def test_values_of_text_may_look_like_one_number() -> None:
    assert plan("--data.url", "1", "1.0", *RATES).grid[0] == ("--data.url", ("1", "1.0"))


def test_what_runs_are_compared_by() -> None:
    found = plan(*RATES, "--score=mean_per_class")
    assert {one.metric for one in (*found.tries(), *found.repetitions(()))} == {"mean_per_class"}
    assert plan(*RATES).tries()[0].metric == "accuracy"
    with pytest.raises(UserError, match="--score is 'top5'; allowed: accuracy, mean_per_class"):
        plan(*RATES, "--score=top5")
