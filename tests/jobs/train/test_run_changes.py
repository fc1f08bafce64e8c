"""Whether a run that is there has a job's own values."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from jobs.recipes.pretrain import digits_smoke
from jobs.train.trials import run_changes
from pipeline.data.config import AugmentConfig, DataConfig
from pipeline.evaluation.config import EvaluationConfig
from pipeline.training.settings.job import InitialConfig, TeacherConfig, TrainingJob
from shards.config import ReadConfig

DATA = DataConfig(url="d", lanes=8)
JOB = replace(digits_smoke(), data=DATA, steps=60)
RUN = replace(JOB, model=replace(JOB.model, num_classes=10))  # as its dataset has


def changed(now: TrainingJob, *, run: TrainingJob = RUN, is_done: bool = True, extends: bool = False) -> list[str]:
    """The fields that differ, the run as its checkpoints and its DONE marker have it."""
    recorded: dict[str, Any] = json.loads(json.dumps(asdict(run)))
    return [each.field for each in run_changes(recorded, asdict(now), is_done=is_done, extends=extends)]


@pytest.mark.parametrize(
    ("now", "fields"),
    [
        pytest.param(RUN, [], id="the same"),
        pytest.param(JOB, [], id="as many classes as the dataset"),
        pytest.param(replace(RUN, model=replace(RUN.model, num_classes=9)), ["model.num_classes"], id="other classes"),
        pytest.param(replace(RUN, threads=3, run_dir="elsewhere"), [], id="where and how it is run"),
        pytest.param(replace(RUN, loss="sigmoid"), ["loss"], id="the loss"),
        pytest.param(replace(RUN, seed=5, global_batch=64), ["global_batch", "seed"], id="outside the data"),
        pytest.param(
            replace(RUN, data=replace(DATA, lanes=16, augment=AugmentConfig(flip=False))),
            ["data.lanes", "data.augment.flip"],
            id="which batches",
        ),
        pytest.param(
            replace(
                RUN,
                data=replace(
                    DATA,
                    reading=ReadConfig(connections=3),
                    num_threads=3,
                    steps_ahead=9,
                    memory_limit_bytes=1,
                    max_quarantined=0.5,
                    allow_other_decoder=True,
                    huffman_decoder="libjpeg-turbo",
                ),
            ),
            [],
            id="how the data is read",
        ),
        pytest.param(replace(RUN, data=replace(DATA, url="./d")), ["data.url"], id="the caller asks for its content"),
        pytest.param(
            replace(RUN, data=replace(DATA, url="", mix=(("d", 1.0),))), ["data.url", "data.mix"], id="now a mix"
        ),
    ],
)
def test_what_makes_it_another_run(now: TrainingJob, fields: list[str]) -> None:
    assert changed(now) == fields


def test_the_number_of_classes_is_that_of_the_dataset_only_for_the_job() -> None:
    assert changed(RUN, run=JOB) == ["model.num_classes"]


@pytest.mark.parametrize(
    ("steps", "warmup", "fields", "extended"),
    [
        pytest.param(70, 6, ["steps"], [], id="more steps"),
        pytest.param(50, 6, ["steps"], ["steps"], id="fewer are another run, also with --extend"),
        pytest.param(60, 7, ["schedule.warmup_steps"], [], id="the run keeps its warm-up if it is extended"),
        pytest.param(70, 7, ["schedule.warmup_steps", "steps"], [], id="both"),
    ],
)
def test_its_length(steps: int, warmup: int, fields: list[str], extended: list[str]) -> None:
    run = replace(RUN, schedule=replace(RUN.schedule, warmup_steps=6))
    now = replace(run, steps=steps, schedule=replace(run.schedule, warmup_steps=warmup))
    assert changed(now, run=run) == fields
    assert changed(now, run=run, extends=True) == extended


@pytest.mark.parametrize(
    ("before", "now", "is_same"),
    [
        (f"{Path.cwd()}/a/weights", "b/../a/weights", True),
        ("s3://b/weights", "s3://b/weights/", True),
        ("s3://b/a/../weights", "s3://b/weights", False),  # two keys
        ("a/weights", "b/weights", False),
        ("", ".", False),
        (".", "", False),
    ],
)
def test_a_path_may_be_written_differently(before: str, now: str, is_same: bool) -> None:
    run, other = (replace(RUN, initial=InitialConfig(weights=path)) for path in (before, now))
    assert changed(other, run=run) == ([] if is_same else ["initial.weights"])
    run, other = (replace(RUN, evaluation=EvaluationConfig(url=path)) for path in (before, now))
    assert changed(other, run=run) == ([] if is_same else ["evaluation.url"])


@pytest.mark.parametrize(
    ("now", "fields"),
    [
        pytest.param(TeacherConfig(weights="w"), [], id="planned: a run fills in the digest"),
        pytest.param(TeacherConfig(weights="./w"), [], id="the same path, spelled differently"),
        pytest.param(TeacherConfig(weights="moved", sha256=64 * "a"), [], id="moved"),
        pytest.param(TeacherConfig(weights="w", sha256=64 * "b"), ["teacher.sha256"], id="other tensors"),
        pytest.param(TeacherConfig(weights="other"), ["teacher.weights"], id="another path, whose digest nobody knows"),
        pytest.param(TeacherConfig(), ["teacher.weights"], id="left out"),
    ],
)
def test_a_teacher_is_compared_by_its_digest_or_else_by_its_path(now: TeacherConfig, fields: list[str]) -> None:
    run = replace(RUN, teacher=TeacherConfig(weights="w", sha256=64 * "a"))
    assert changed(replace(RUN, teacher=now), run=run) == fields
    assert changed(replace(run, teacher=run.teacher), run=replace(RUN, teacher=now)) == fields


def test_what_is_measured_may_change_until_the_run_is_done() -> None:
    now = replace(RUN, evaluation=EvaluationConfig(url="t"))
    assert (changed(now, is_done=False), changed(now)) == ([], ["evaluation.url"])


def test_a_path_that_is_none_is_another_one() -> None:
    recorded: dict[str, Any] = json.loads(json.dumps(asdict(RUN)))
    recorded["initial"]["weights"] = 5
    found = run_changes(recorded, asdict(RUN), is_done=True, extends=False)
    assert [each.field for each in found] == ["initial.weights"]


def test_a_field_that_only_one_of_them_has_is_a_difference() -> None:
    recorded: dict[str, Any] = json.loads(json.dumps(asdict(RUN)))
    del recorded["loss"], recorded["engine"]["precision"]
    recorded["gone"] = 1
    found = run_changes(recorded, asdict(RUN), is_done=True, extends=False)
    assert [each.field for each in found] == ["gone", "loss"]
    assert run_changes({}, asdict(RUN), is_done=True, extends=True)
