"""A job refuses what cannot run, with the values."""

from collections.abc import Iterator
from typing import Any

import pytest

from jobs.recipes import finetune, pretrain
from pipeline.checkpoints.config import CheckpointConfig
from pipeline.data.config import DataConfig, MixupConfig
from pipeline.evaluation.config import EvaluationConfig
from pipeline.models.config import SIZES, ModelConfig, num_masked_outputs
from pipeline.training.settings.job import EngineConfig, LoggersConfig, OptimizerConfig, TrainingJob
from pipeline.training.settings.schedule import ScheduleConfig
from shards.config import HeldOutConfig
from shards.errors import UserError
from tests.rigs.faults import differs, every_fault

RECIPES = {**pretrain.RECIPES, **finetune.RECIPES}
UP_TO_1 = r"allowed: 0 \(off\) to below 1$"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"steps": 0}, "^steps is 0; allowed: 1 to 1,000,000,000$", id="no steps"),
        pytest.param({"threads": -1}, r"threads is -1; allowed: 0 \(.*\) to 1,024$", id="negative threads"),
        pytest.param({"log_every_steps": 0}, "log_every_steps is 0; allowed: 1 to", id="logging never"),
        pytest.param({"clip_norm": -1.0}, r"clip_norm is -1\.0; allowed: 0 \(off\) or more", id="negative clipping"),
        pytest.param(
            {"micro_batch": -2},
            r"micro_batch is -2; allowed: 0 \(the largest that fits\) to 16,777,216",
            id="negative micro-batch",
        ),
        pytest.param(
            {"steps": 100, "schedule": ScheduleConfig(warmup_steps=100)},
            "warmup_steps is 100, not below the 100 steps",
            id="all steps are warm-up: nothing would be learned at the rate asked for",
        ),
        pytest.param({"label_smoothing": 1.0}, f"label_smoothing is 1.0; {UP_TO_1}", id="nothing of the label left"),
        pytest.param(
            {"class_weights": "balanced", "loss": "sigmoid"},
            "class_weights is 'balanced' with loss 'sigmoid', .*give --class-weights equal, or --loss softmax",
            id="weights of classes that are asked for one by one",
        ),
        pytest.param({"ema_decay": 1.0}, f"ema_decay is 1.0; {UP_TO_1}", id="an average that never moves"),
        pytest.param({"ema_decay": -0.1}, f"ema_decay is -0.1; {UP_TO_1}", id="a negative factor"),
        pytest.param(
            {
                "optimizer": OptimizerConfig(decay_scale="schedule"),
                "schedule": ScheduleConfig(learning_rate=0.0),
            },
            "schedule.learning_rate is 0.0 with optimizer.decay_scale 'schedule'",
            id="a decay that follows a schedule of zeros",
        ),
        pytest.param(
            {"engine": EngineConfig(float8="rowwise"), "model": ModelConfig(name="bit_r50x1")},
            "engine.float8 is 'rowwise' with model.name 'bit_r50x1'; allowed: Transformers and hybrids",
            id="float8 without the dense layers of blocks",
        ),
        pytest.param(
            {"engine": EngineConfig(float8="rowwise"), "model": ModelConfig(name="vit_b16", mlp_width=3080)},
            "'vit_b16', of width 768 and MLP width 3080; allowed: multiples of 16",
            id="widths that no GPU multiplies in float8",
        ),
        pytest.param(
            {"engine": EngineConfig(cuda_graphs=True), "model": ModelConfig(name="vit_b16", stochastic_depth=0.2)},
            "engine.cuda_graphs is on with model.stochastic_depth 0.2 and engine.skip_branches",
            id="graphs of a number of images that varies",
        ),
        pytest.param(
            {"evaluation": EvaluationConfig(also=("a",))},
            "evaluation.also says nothing without evaluation.url or data.held_out",
            id="scores beside nothing",
        ),
    ],
)
def test_refusals(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainingJob(**fields)


def test_other_datasets_may_be_scored_beside_a_part_that_is_held_out() -> None:
    data, evaluation = DataConfig(held_out=HeldOutConfig(share=0.1)), EvaluationConfig(also=("s3://b/real",))
    job = TrainingJob(data=data, evaluation=evaluation)
    assert job.evaluation.sets(has_held_out=True) == {"real": "s3://b/real"}


def test_a_constant_rate_may_warm_up_for_the_whole_run() -> None:
    schedule = ScheduleConfig(decay="constant", warmup_steps=100)
    assert TrainingJob(steps=10, schedule=schedule).schedule.warmup_steps == 100


@pytest.mark.parametrize("fields", [{"every_steps": -1}, {"keep_newest": 0}, {"keep_every": -1}])
def test_checkpoints_that_would_never_be_kept_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^checkpoint\.(every_steps|keep_newest|keep_every) is -?\d; allowed: [01]"):
        CheckpointConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"auto_interval": True, "every_seconds": 600},
            r"^checkpoint\.auto_interval is on with checkpoint\.every_seconds 600, .*--checkpoint\.every-seconds 0",
        ),
        (
            {"every_steps": 0, "keep_every": 500},
            r"^checkpoint\.keep_every is 500 with checkpoint\.every_steps 0, .* --checkpoint\.every-steps 500",
        ),
    ],
)
def test_ways_to_save_that_contradict_each_other_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CheckpointConfig(**fields)


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"zero_stage": 3}, "'rowwise' with engine.zero_stage 3; allowed: stages 1 and 2", id="stage 3"),
        pytest.param({"precision": "fp32"}, "'rowwise' with engine.precision fp32; allowed: bf16, and auto", id="fp32"),
    ],
)
def test_float8_beside_what_it_cannot_have_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EngineConfig(float8="rowwise", **fields)


@pytest.mark.parametrize("fields", [{"zero_stage": 3}, {"compile": "off"}], ids=str)
def test_graphs_without_compiled_blocks_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match=r"engine.cuda_graphs is on with .*; allowed: stages 1 and 2 with compiled blocks"
    ):
        EngineConfig(cuda_graphs=True, **fields)


def test_float8_fits_every_transformer_of_the_recipes() -> None:
    for name in SIZES:
        TrainingJob(model=ModelConfig(name=name), engine=EngineConfig(float8="tensorwise"))


@pytest.mark.parametrize("fields", [{"reduce_bucket": 0}, {"allgather_bucket": 0}])
def test_empty_buckets_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^engine\.(reduce|allgather)_bucket is 0; allowed: 1 or more$"):
        EngineConfig(**fields)


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


def test_binary_targets_are_those_of_the_sigmoid_loss() -> None:
    data = DataConfig(mixup=MixupConfig(alpha=0.8, binary_targets=True))
    with pytest.raises(UserError, match=r"binary_targets is on with loss 'softmax'.*give --loss sigmoid, or --data"):
        TrainingJob(data=data)
    TrainingJob(data=data, loss="sigmoid")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 10**20}, "steps is 100000000000000000000; allowed: 1 to 1,000,000,000"),
        ({"global_batch": 1 << 63}, "allowed: 1 to 16,777,216"),
        ({"threads": 100_000}, r"threads is 100000; allowed: 0 \(.*\) to 1,024"),
    ],
)
def test_values_that_no_machine_has_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainingJob(**fields)


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
