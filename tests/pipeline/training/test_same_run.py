"""Which fields make a run, and what more steps mean for its learning rate."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from jobs.recipes.pretrain import digits_smoke
from pipeline.data.config import DataConfig
from pipeline.evaluation.config import EvaluationConfig
from pipeline.training.config import CheckpointConfig, EngineConfig, InitialConfig, TrainingJob
from pipeline.training.same_run import extension, other_values
from pipeline.training.schedule import ScheduleConfig

JOB = digits_smoke()


def recorded(job: TrainingJob) -> dict[str, Any]:
    """As a checkpoint has it."""
    return dict(json.loads(json.dumps(asdict(job))))


@pytest.mark.parametrize(
    ("changed", "fields", "of_done"),
    [
        pytest.param(JOB, [], [], id="the same"),
        pytest.param(
            replace(JOB, schedule=replace(JOB.schedule, learning_rate=0.5)),
            ["schedule.learning_rate"],
            ["schedule.learning_rate"],
            id="another learning rate",
        ),
        pytest.param(replace(JOB, clip_norm=9.0), ["clip_norm"], ["clip_norm"], id="another bound of the gradient"),
        pytest.param(
            replace(JOB, initial=InitialConfig(weights="w")), ["initial.weights"], ["initial.weights"], id="initial"
        ),
        pytest.param(
            replace(JOB, evaluation=EvaluationConfig(url="t")), [], ["evaluation.url"], id="what is measured on the way"
        ),
        pytest.param(replace(JOB, run_dir="r", device="cpu", micro_batch=8, log_every_steps=9), [], [], id="where"),
        pytest.param(replace(JOB, checkpoint=CheckpointConfig(every_steps=7)), [], [], id="how often it is saved"),
        pytest.param(replace(JOB, engine=EngineConfig(zero_stage=3)), [], [], id="how it is computed"),
        pytest.param(replace(JOB, data=DataConfig(url="moved", lanes=1)), [], [], id="what the data state compares"),
        pytest.param(replace(JOB, seed=9, global_batch=64), [], [], id="this too"),
        pytest.param(replace(JOB, steps=10**6), [], [], id="the length, which has rules of its own"),
    ],
)
def test_fields_that_must_stay(changed: TrainingJob, fields: list[str], of_done: list[str]) -> None:
    for is_done, expected in ((False, fields), (True, of_done)):
        found = other_values(recorded(JOB), asdict(changed), is_done=is_done)
        assert [difference.field for difference in found] == expected


def test_a_finished_run_has_one_precision_unless_none_is_asked_for() -> None:
    was = {"engine": {"precision": "bf16"}}
    for asked, expected in (("fp32", ["engine.precision"]), ("bf16", []), ("auto", [])):
        found = other_values(was, {"engine": {"precision": asked}}, is_done=True)
        assert [difference.field for difference in found] == expected
    assert other_values(was, {"engine": {"precision": "fp32"}}, is_done=False) == []


def test_fields_of_other_versions_are_passed_over() -> None:
    assert other_values({"gone": 1}, {"new": 2}, is_done=True) == []
    assert other_values({}, asdict(JOB), is_done=True) == []


def test_more_steps_say_what_becomes_of_the_learning_rate() -> None:
    schedule = ScheduleConfig(learning_rate=1.0, decay="linear")
    job = replace(JOB, schedule=schedule, steps=600)
    assert extension({"steps": 300}, job, step=300) == (
        "extended from 300 to 600 steps: step 300 had the learning rate 0.00333, "
        "step 301 will have 0.5 (linear schedule over 600 steps)"
    )
    assert extension({"steps": 600}, job, step=300) == ""
    assert extension({}, job, step=300) == ""
