"""What is saved of a job, which jobs may continue its run, and what more steps mean for its learning rate."""

import json
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
from pydantic import TypeAdapter

from jobs.recipes.pretrain import digits_smoke
from pipeline.checkpoints.config import CheckpointConfig
from pipeline.checkpoints.manifest import SavedJob
from pipeline.data.config import DataConfig
from pipeline.evaluation.config import EvaluationConfig
from pipeline.training.saving.may_continue import extension, other_values, refuse_changes
from pipeline.training.saving.save import saved_job
from pipeline.training.settings.job import EngineConfig, InitialConfig, OptimizerConfig, TrainingJob
from pipeline.training.settings.schedule import ScheduleConfig
from shards.errors import UserError
from tests.rigs.positions import position_at

JOB = digits_smoke()
AVERAGED = replace(digits_smoke(), ema_decay=0.9)


def recorded(job: TrainingJob) -> dict[str, Any]:
    """As a checkpoint has it."""
    return dict(json.loads(json.dumps(asdict(job))))


def with_classes(job: TrainingJob) -> TrainingJob:
    return replace(job, model=replace(job.model, num_classes=10))


def test_what_would_be_another_run_is_refused_by_name() -> None:
    job, at, start = with_classes(JOB), position_at(4), position_at(0)
    saved = saved_job(job)
    refuse_changes(saved, at, job=job, start=start)
    other_decoder = replace(start, decoder={"version": 3, "simplejpeg": "2.0"})
    table = [
        (replace(start, lanes=16), job, r"\n  data\.lanes: before 8, now 16\n"),
        (start, replace(job, model=replace(job.model, depth=5)), r"model\.depth: before 4, now 5"),
        (start, replace(job, loss="sigmoid"), "loss: before softmax, now sigmoid"),
        (start, replace(job, optimizer=OptimizerConfig(name="sgd")), r"optimizer\.name: before adamw, now sgd"),
        (start, replace(job, ema_decay=0.9), r"ema_decay: before 0\.0, now 0\.9"),
        (other_decoder, job, "--data.allow-other-decoder"),
        (start, replace(job, steps=3, schedule=ScheduleConfig()), "has 4 steps already, --steps is 3"),
    ]
    for now, changed, message in table:
        with pytest.raises(UserError, match=message):
            refuse_changes(saved, at, job=changed, start=now)
    allowed = replace(job, data=replace(job.data, allow_other_decoder=True))
    refuse_changes(saved, at, job=allowed, start=other_decoder)


def test_another_image_size_is_said_once_of_the_model() -> None:
    job = with_classes(JOB)
    larger = replace(job, model=replace(job.model, image_size=48))
    with pytest.raises(UserError) as raised:
        refuse_changes(saved_job(job), position_at(4), job=larger, start=replace(position_at(0), image_size=48))
    assert [line for line in str(raised.value).splitlines() if "before" in line] == [
        f"  model.image_size: before {job.model.image_size}, now 48"
    ]


def test_a_new_run_of_the_images_that_are_left_has_a_schedule_that_fits() -> None:
    """Also if the command has a warm-up of its own, which no recipe shortens."""
    table: tuple[tuple[int, int, int, dict[str, int]], ...] = (  # the warm-up, the cooldown, the step, what is printed
        (100, 0, 950, {"warmup_steps": 2}),  # 25 steps of batches twice as large
        (100, 300, 200, {}),
        (100, 300, 210, {"warmup_steps": 39, "cooldown_steps": 119}),  # of 395 steps
        (100, 300, 999, {"warmup_steps": 0, "cooldown_steps": 1}),
    )
    for warmup, cooldown, step, expected in table:
        schedule = replace(JOB.schedule, decay="cosine", warmup_steps=warmup, cooldown_steps=cooldown)
        job = replace(with_classes(JOB), steps=1000, schedule=schedule, run_dir="run")
        half = replace(job, global_batch=2 * job.global_batch)
        with pytest.raises(UserError) as raised:
            refuse_changes(saved_job(job), position_at(step), job=half, start=replace(position_at(0), global_batch=99))
        flags = raised.value.flags
        values = dict(pairwise(flags))
        of_schedule = {name: int(value) for name, value in values.items() if name.startswith("--schedule.")}
        assert of_schedule == {f"--schedule.{name.replace('_', '-')}": value for name, value in expected.items()}
        begun: dict[str, Any] = {"warmup_steps": warmup, "cooldown_steps": cooldown, **expected}
        replace(half, steps=int(values["--steps"]), schedule=replace(schedule, **begun))  # not refused


def test_a_models_tuples_survive_json() -> None:
    """What is saved of a job is JSON, where tuples are lists."""
    job, at, start = with_classes(JOB), position_at(4), position_at(0)
    hybrid = replace(job, model=replace(job.model, patch=2, resnet_units=(1,), image_size=32))
    refuse_changes(saved_job(hybrid), at, job=hybrid, start=start)


def test_more_steps_are_a_decision_of_their_own_and_fewer_are_another_run() -> None:
    job = with_classes(JOB)
    saved = saved_job(job)

    def refuse(changed: TrainingJob, *, extend: bool = False) -> None:
        refuse_changes(saved, position_at(4), job=changed, start=position_at(0), extend=extend)

    longer, shorter = replace(job, steps=job.steps + 1), replace(job, steps=job.steps - 1)
    with pytest.raises(UserError, match=rf"steps: before {job.steps}, now {job.steps + 1}\n.*add --extend"):
        refuse(longer)
    refuse(longer, extend=True)
    for extend in (False, True):
        with pytest.raises(UserError, match=rf"now {job.steps - 1}\n.*or another --run-dir$"):
            refuse(shorter, extend=extend)
    other = replace(longer, clip_norm=9.0)
    with pytest.raises(UserError, match=r"\n  clip_norm: before 1\.0, now 9\.0\n"):
        refuse(other, extend=True)
    shorter_warmup = replace(longer, schedule=replace(job.schedule, warmup_steps=29))  # as a short run's is scaled
    message = rf"\n  steps: before {job.steps}, now {job.steps + 1}\nThe learning rate .*add --extend"
    with pytest.raises(UserError, match=message):
        refuse(shorter_warmup)
    with pytest.raises(UserError, match=rf"now {job.steps + 1}\n  clip_norm: before 1\.0, now 9\.0\n.*add --extend"):
        refuse(other)


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
        pytest.param(replace(JOB, norms_every_steps=7, similarity_every_steps=0), [], [], id="what is shown"),
        pytest.param(replace(JOB, checkpoint=CheckpointConfig(every_steps=7)), [], [], id="how often it is saved"),
        pytest.param(replace(JOB, engine=EngineConfig(zero_stage=3)), [], [], id="how it is computed"),
        pytest.param(replace(JOB, data=DataConfig(url="moved", lanes=1)), [], [], id="what the position compares"),
        pytest.param(replace(JOB, seed=9, global_batch=64), [], [], id="this too"),
        pytest.param(replace(JOB, steps=10**6), [], [], id="the length, which has rules of its own"),
    ],
)
def test_fields_that_must_stay(changed: TrainingJob, fields: list[str], of_done: list[str]) -> None:
    for is_done, expected in ((False, fields), (True, of_done)):
        found = other_values(recorded(JOB), asdict(changed), is_done=is_done)
        assert [difference.field for difference in found] == expected


def test_a_finished_run_has_one_precision_unless_none_is_asked_for() -> None:
    was = recorded(replace(JOB, engine=EngineConfig(precision="bf16")))
    table: tuple[tuple[EngineConfig, list[str]], ...] = (
        (EngineConfig(precision="fp32"), ["engine.precision"]),
        (EngineConfig(precision="bf16"), []),
        (EngineConfig(precision="auto"), []),
    )
    for engine, expected in table:
        now = asdict(replace(JOB, engine=engine))
        assert [difference.field for difference in other_values(was, now, is_done=True)] == expected
        assert other_values(was, now, is_done=False) == []


def test_a_field_that_only_one_of_them_has_is_a_difference() -> None:
    was, now = recorded(JOB), asdict(JOB)
    del was["clip_norm"]
    was["schedule"]["gone"] = 1
    for is_done in (False, True):
        found = other_values(was, now, is_done=is_done)
        assert list(map(str, found)) == ["schedule.gone: before 1, now none", "clip_norm: before none, now 1.0"]


def test_more_steps_say_what_becomes_of_the_learning_rate() -> None:
    schedule = ScheduleConfig(learning_rate=1.0, decay="linear")
    job = replace(JOB, schedule=schedule, steps=600)
    assert extension({"steps": 300}, job, step=300) == (
        "extended from 300 to 600 steps: step 300 had the learning rate 0.00333, "
        "step 301 will have 0.5 (linear schedule over 600 steps)"
    )
    assert extension({"steps": 600}, job, step=300) == ""


def test_it_survives_json_and_holds_the_whole_job() -> None:
    saved = saved_job(AVERAGED)
    adapter = TypeAdapter(SavedJob)
    assert adapter.validate_json(adapter.dump_json(saved)) == saved
    assert saved.job == json.loads(json.dumps(asdict(AVERAGED)))
    assert (saved.model, saved.loss, saved.optimizer, saved.ema_decay) == (saved.job["model"], "softmax", "adamw", 0.9)
