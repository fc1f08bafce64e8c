"""Means and deviations of VTAB-1k over seeds."""

import pytest

from jobs.recipes.paper_vtab import TASKS
from jobs.train.vtab import TaskRow, seed_facts, seed_table, task_facts
from tests.jobs.train.test_vtab import scored


def test_a_mean_of_each_seed_and_the_deviation_of_these() -> None:
    """Not the mean of the tasks' deviations: their differences cancel within a seed."""
    first = [scored(task.name, 0.5 + (0.25 if place % 2 else -0.25)) for place, task in enumerate(TASKS)]
    second = [scored(task.name, 0.5 - (0.25 if place % 2 else -0.25)) for place, task in enumerate(TASKS)]
    found = seed_facts({0: first, 1: second})
    means = [task_facts(rows)["mean"] for rows in (first, second)]
    assert found["mean"] == pytest.approx(0.5)
    assert found["deviations"]["mean"] == pytest.approx(abs(means[0] - means[1]) / 2**0.5)
    assert found["deviations"]["specialized"] == pytest.approx(0)
    assert [one["seed"] for one in found["seeds"]] == [0, 1]
    lines = seed_table({0: first, 1: second}).splitlines()
    assert lines[0] == "natural       caltech101            0.5000 ± 0.3536"
    assert lines[12] == "              mean of 4             0.5000 ± 0.0000"
    assert lines[-1] == "all           mean of 19            0.5000 ± 0.0186"


def test_no_mean_while_a_seed_lacks_a_task() -> None:
    lacking = TaskRow(task=TASKS[-1], lacks="x/smallnorb has no manifest")
    first, second = ([scored("dtd", 0.5), scored("eurosat", accuracy), lacking] for accuracy in (0.5, None))
    assert [line.split(None, 1)[-1] for line in seed_table({0: first, 1: second}).splitlines()] == [
        "dtd                   0.5000 ± 0.0000",
        "of 2 seeds have a score of all 7 tasks: no mean",
        "eurosat               1 of 2 seeds have a score: seed 1 stopped",
        "of 2 seeds have a score of all 4 tasks: no mean",
        "smallnorb_elevation   missing: x/smallnorb has no manifest",
        "of 2 seeds have a score of all 8 tasks: no mean",
        "0 of 2 seeds have a score of all 19 tasks: no mean",
    ]
    found = seed_facts({0: first, 1: second})
    assert (found["mean"], found["deviations"]["mean"]) == (None, None)


def test_one_seed_has_no_deviation() -> None:
    rows = [scored(task.name, 0.5) for task in TASKS]
    assert (
        seed_table({0: rows}).splitlines()[-1] == "all           mean of 19            0.5000 (one seed: no deviation)"
    )
    assert seed_facts({0: rows})["deviations"]["mean"] is None
