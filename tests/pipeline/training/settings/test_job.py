"""A job refuses what cannot run, with the values."""

from collections.abc import Iterator
from typing import Any

import pytest

from jobs.recipes import finetune, pretrain
from pipeline.checkpoints.config import CheckpointConfig
from pipeline.data.config import DataConfig
from pipeline.evaluation.config import EvaluationConfig
from pipeline.models.config import SIZES, ModelConfig, num_masked_outputs
from pipeline.training.settings.job import EngineConfig, LoggersConfig, TrainingJob
from pipeline.training.settings.schedule import ScheduleConfig
from shards.config import HeldOutConfig
from shards.errors import UserError
from tests.rigs.faults import differs, every_fault

RECIPES = {**pretrain.RECIPES, **finetune.RECIPES}
UP_TO_1 = r"allowed: 0 \(off\) to below 1$"


def test_other_datasets_may_be_scored_beside_a_part_that_is_held_out() -> None:
    data, evaluation = DataConfig(held_out=HeldOutConfig(share=0.1)), EvaluationConfig(also=("s3://b/real",))
    job = TrainingJob(data=data, evaluation=evaluation)
    assert job.evaluation.sets(has_held_out=True) == {"real": "s3://b/real"}


def test_a_constant_rate_may_warm_up_for_the_whole_run() -> None:
    schedule = ScheduleConfig(decay="constant", warmup_steps=100)
    assert TrainingJob(steps=10, schedule=schedule).schedule.warmup_steps == 100


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"every_steps": 0}, id="only the end"),
        pytest.param({"every_seconds": 600.0}, id="steps and seconds"),
        pytest.param({"auto_interval": True}, id="steps and auto"),
        pytest.param({"auto_interval": True, "every_steps": 0}, id="auto alone"),
    ],
)
def test_other_ways_to_save_go_together(fields: dict[str, Any]) -> None:
    CheckpointConfig(**fields)


@pytest.mark.parametrize("fields", [{"zero_stage": 3}, {"compile": "off"}], ids=str)
def test_graphs_without_compiled_blocks_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match=r"engine.cuda_graphs is on with .*; allowed: stages 1 and 2 with compiled blocks"
    ):
        EngineConfig(cuda_graphs=True, **fields)


def test_float8_fits_every_transformer_of_the_recipes() -> None:
    for name in SIZES:
        TrainingJob(model=ModelConfig(name=name), engine=EngineConfig(float8="tensorwise"))


@every_fault
def test_recipes_fit_their_own_lanes_and_take_their_classes_from_the_data() -> Iterator[str]:
    for name, recipe in RECIPES.items():
        job = recipe()
        if job.global_batch % job.data.lanes:
            yield f"{name}: the global batch, {job.global_batch}, is not a multiple of {job.data.lanes} lanes"
        num_classes = 0
        if job.model.masked_patches:  # there are always as many colours and pixels
            num_classes = num_masked_outputs(job.model.masked_target, side=job.model.stride)
        yield from differs(f"{name}: model.num_classes", job.model.num_classes, num_classes)
        yield from differs(f"{name}: run_dir and data.url", (job.run_dir, job.data.url), ("", ""))


@every_fault
def test_the_papers_recipes_name_their_precision_and_small_ones_leave_it_to_the_machine() -> Iterator[str]:
    small = dict.fromkeys(("digits_smoke", "photos_smoke", "digits_48", "photos"), "auto")
    small |= {"photos_scratch_s16": "auto", "photos_scratch_b16": "auto"}
    small |= {"cifar10_small": "fp32", "cifar10_48": "fp32", "cifar10_plain": "fp32"}
    for name, recipe in RECIPES.items():
        yield from differs(f"{name}: engine.precision", recipe().engine.precision, small.get(name, "bf16"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param(
            {"mlflow_uri": "https://me:secret@host:5000"},
            "loggers.mlflow_uri has a user or password in it, which would be written to RUN/job.yaml; give them as "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment",
            id="a password",
        ),
        pytest.param(
            {"mlflow_uri": "http://[::1"},
            "loggers.mlflow_uri is no URI (Invalid IPv6 URL); allowed: such as http://host:5000",
            id="no URI",
        ),
        pytest.param(
            {"project": ""},
            "loggers.project is ''; allowed: a name of 1 to 128 printable characters",
            id="no project",
        ),
        pytest.param(
            {"project": "a\nb"},
            "loggers.project is 'a\\nb'; allowed: a name of 1 to 128 printable characters",
            id="two lines",
        ),
        pytest.param(
            {"project": "team/vit", "wandb": True},
            "loggers.project is 'team/vit'; allowed: a name of 1 to 128 printable characters and without any of "
            "/\\#?%:",
            id="W&B allows no slash",
        ),
    ],
)
def test_loggers_that_are_refused(fields: dict[str, str | bool], message: str) -> None:
    with pytest.raises(UserError) as caught:
        LoggersConfig(**fields)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_loggers_that_are_allowed() -> None:
    LoggersConfig(mlflow=True, mlflow_uri="databricks", project="/Users/me/vit")
    LoggersConfig(mlflow_uri="https://host/path@2?x=1", wandb=True, project="ViT runs")
