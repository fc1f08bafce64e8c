"""What training and its settings say when they refuse, each message once."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from jobs.recipes.pretrain import masked_patches
from pipeline.checkpoints.config import CheckpointConfig
from pipeline.data.batches import Batch
from pipeline.data.config import AugmentConfig, DataConfig, MixupConfig
from pipeline.evaluation.config import EvaluationConfig
from pipeline.models import ModelConfig
from pipeline.ranks.streams import HostStreams
from pipeline.training import kernels
from pipeline.training.fitting.first_pass import refuse_lack_of_memory
from pipeline.training.fitting.fit import fitted
from pipeline.training.gradients import Gradients, branch_factors, patch_sources, staying_patches
from pipeline.training.reporting.loggers import MlflowLogger, logger_id, read_logger_id
from pipeline.training.reporting.metrics import Metrics
from pipeline.training.reporting.utilisation import Utilisation
from pipeline.training.settings.job import (
    EngineConfig,
    GuardConfig,
    LoggersConfig,
    OptimizerConfig,
    TeacherConfig,
    TrainingJob,
)
from pipeline.training.settings.schedule import ScheduleConfig, steps_of
from pipeline.training.settings.tokens import TokensConfig
from pipeline.training.step import StepSums, SumSource
from pipeline.training.zero.batch_plan import BatchPlan, plan_batch
from pipeline.training.zero.engine import deepspeed_config
from pipeline.training.zero.loading import refuse_untested_deepspeed
from pipeline.training.zero.step_times import StepTimes
from tests.pipeline.training.fitting.test_fit import budget, recipe, whole
from tests.pipeline.training.reporting.test_utilisation import JOB as JOB_UTILISATION
from tests.pipeline.training.test_float8 import GPU, gpu_of, job_with
from tests.pipeline.training.test_gradients import PLACES
from tests.pipeline.training.test_guard import NAN, guard
from tests.pipeline.training.test_step import JOB as JOB_STEP
from tests.pipeline.training.test_step import launched_on_meta
from tests.rigs.messages import Row, row, table
from tests.rigs.processes import one_world

MUON = OptimizerConfig(name="muon")


def open_precision(_: Path) -> None:
    undecided = replace(JOB_UTILISATION, engine=replace(JOB_UTILISATION.engine, precision="auto"))
    Utilisation(undecided, one_world(), StepTimes())


def mlflow_without_a_server(_: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        MlflowLogger.prepare(LoggersConfig(mlflow=True))


def pipe_of_metrics(folder: Path) -> None:
    os.mkfifo(folder / "metrics.jsonl")
    Metrics(folder, step=0)


def loggers_file(folder: Path, bad: bytes) -> None:
    (folder / "loggers.json").write_bytes(bad)
    logger_id(folder)


def folder_of_loggers(folder: Path) -> None:
    (folder / "loggers.json").mkdir()
    read_logger_id(folder)


def step_that_reads_from_the_device(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = Gradients.accumulate

        def reads(self: Gradients, batch: Batch, *, is_void: bool) -> torch.Tensor:
            loss = found(self, batch, is_void=is_void)
            return loss * float(loss)

        monkeypatch.setattr(Gradients, "accumulate", reads)
        launched_on_meta(JOB_STEP, folder / "run", monkeypatch)


def batch_plan(_: Path, global_batch: int, micro: int, ranks: int, lanes: int) -> None:
    plan_batch(global_batch, micro_batch=micro, num_ranks=ranks, lanes=lanes)


def plan_of_pairs(_: Path, global_batch: int, micro: int, ranks: int) -> None:
    plan_batch(global_batch, micro_batch=micro, num_ranks=ranks, lanes=1, pairs=True)


def crops_of_one_size(_: Path) -> None:
    data = DataConfig(augment=AugmentConfig(crop="resize_crop", resize_pixels=256))
    TrainingJob(data=data, tokens=TokensConfig(image_sizes=(160,), size_steps=(9,)))


def staying_patches_of(_: Path, num_stay: int) -> None:
    staying_patches(0, PLACES, seed=0, num_patches=16, num_stay=num_stay)


def muon(_: Path, fields: dict[str, Any]) -> None:
    TrainingJob(optimizer=MUON, **fields)


def attending(_: Path, kernel: Any, fields: dict[str, Any]) -> None:
    TrainingJob(model=ModelConfig(**fields), engine=EngineConfig(attention=kernel))


def fewer_tokens(_: Path, model: dict[str, Any], tokens: dict[str, Any]) -> None:
    TrainingJob(model=ModelConfig(**model), tokens=TokensConfig(**tokens), steps=100)


def frozen(_: Path, engine: dict[str, Any]) -> None:
    TrainingJob(engine=EngineConfig(**engine), optimizer=OptimizerConfig(freeze_backbone=True))


def compiled_and_frozen(_: Path) -> None:
    TrainingJob(engine=EngineConfig(compile="on", zero_stage=3), optimizer=OptimizerConfig(freeze_backbone=True))


def deepspeed_of(_: Path, installed: str, allowed: str) -> None:
    refuse_untested_deepspeed(EngineConfig(allow_deepspeed=allowed), installed)


def two_sums_of_one_name(_: Path) -> None:
    source = SumSource(names=("loss",), read=dict)
    StepSums((source,), device=torch.device("cpu"), streams=HostStreams())


def bf16_moment(_: Path, name: Literal["sgd", "muon", "lamb"]) -> None:
    OptimizerConfig(name=name, first_moment="bf16")


def optimizer(_: Path, fields: dict[str, Any]) -> None:
    OptimizerConfig(**fields)


def layer_decay(_: Path, value: float) -> None:
    OptimizerConfig(layer_decay=value)


def engine_of_open_precision(_: Path) -> None:
    plan = plan_batch(64, micro_batch=0, num_ranks=2, lanes=8)
    deepspeed_config(EngineConfig(precision="auto"), plan, clip_norm=0.0)


def corrupted(_: Path, num_patches: int, num_corrupted: int) -> None:
    patch_sources(0, PLACES, seed=1, num_patches=num_patches, num_corrupted=num_corrupted)


def masked_job(_: Path, changes: dict[str, object]) -> None:
    replace(masked_patches(), **changes)  # type: ignore[arg-type]


def epochs_of(_: Path, epochs: int, num_images: int, global_batch: int) -> None:
    steps_of(epochs, num_images=num_images, global_batch=global_batch)


def schedule(_: Path, rate: float, final: float, warmup: int) -> None:
    ScheduleConfig(learning_rate=rate, final_learning_rate=final, warmup_steps=warmup)


def schedule_with(_: Path, fields: dict[str, Any]) -> None:
    ScheduleConfig(**fields)


def long_cooldown(_: Path) -> None:
    schedule = ScheduleConfig(decay="rsqrt", warmup_steps=30, cooldown_steps=71)
    TrainingJob(steps=100, schedule=schedule)


def refusals(_: Path, fields: dict[str, Any]) -> None:
    TrainingJob(**fields)


def checkpoints(_: Path, fields: dict[str, Any]) -> None:
    CheckpointConfig(**fields)


def float8(_: Path, fields: dict[str, Any]) -> None:
    EngineConfig(float8="rowwise", **fields)


def selective_of_bit(_: Path) -> None:
    TrainingJob(model=ModelConfig(name="bit_r50x1"), engine=EngineConfig(activation_checkpointing="selective"))


def fused_mlp(_: Path, fields: dict[str, Any]) -> None:
    EngineConfig(fused_mlp=True, **fields)


def fused_mlp_of(_: Path, model: dict[str, Any]) -> None:
    TrainingJob(model=ModelConfig(**model), engine=EngineConfig(fused_mlp=True))


def fused_mlp_here(_: Path, precision: Literal["bf16", "fp32"], faults: list[str]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(kernels, "gather_json", lambda *_, **__: faults)
        job = TrainingJob(model=ModelConfig(name="vit_b16"), engine=EngineConfig(fused_mlp=True))
        object.__setattr__(job.engine, "precision", precision)  # as decided by the device
        kernels.refuse_missing_fused_mlp(job, one_world(0, len(faults)))


def binary_targets(_: Path) -> None:
    data = DataConfig(mixup=MixupConfig(alpha=0.8, binary_targets=True))
    TrainingJob(data=data)


def graphs_of_several_passes(_: Path) -> None:
    config = EngineConfig(cuda_graphs=True, precision="bf16")
    plan = plan_batch(8, micro_batch=4, num_ranks=1, lanes=1)
    deepspeed_config(config, plan, clip_norm=1.0)


def bad_updates_in_a_row(_: Path, saved_step: int | None) -> None:
    found = guard()
    for step in (13, 14):
        found.count(step, loss=1.0, was_skipped=True, last_saved=lambda: saved_step)
    found.count(15, loss=1.0, was_skipped=True, last_saved=lambda: saved_step)


def bad_update_at_the_end(_: Path) -> None:
    found = guard()
    found.refuse(11, last_saved=lambda: 8)
    found.count(12, loss=NAN, was_skipped=False, last_saved=lambda: 8)
    found.refuse(12, last_saved=lambda: 8)


def stochastic_depth(_: Path, *rates: float) -> None:
    branch_factors(3, PLACES, seed=1, rates=rates)


def rank_without_float8(_: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu_of((9, 0), monkeypatch)
        others = ["", "A100 is too old", "A100 is too old", "no torchao"]
        monkeypatch.setattr(kernels, "gather_json", lambda fault, **_: [fault, *others])
        world = replace(one_world(0, 5), device=GPU)
        kernels.refuse_missing_float8(job_with("rowwise"), world, is_compiled=True)


def too_little_memory(_: Path, has: float) -> None:
    job = recipe()
    fitted(job, whole(job, 8), budget(has), is_on_gpu=True)


def memory_of_more_ranks(_: Path) -> None:
    job = recipe(ema_decay=0.9)
    job = replace(job, engine=replace(job.engine, zero_stage=2, activation_checkpointing="full"))
    fitted(job, whole(job, 8), budget(3e9), is_on_gpu=True)


def out_of_memory_after(_: Path, num_steps: int) -> None:
    plan = BatchPlan(global_batch=128, micro_batch=16, accumulation=4, num_ranks=2)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    refuse_lack_of_memory(error, plan, rank=1, num_steps=num_steps)


@table(
    # utilisation
    row("a peak of an open precision", open_precision).says(
        "ValueError: engine.precision is 'auto'; the peak of a device is that of one precision"
    ),
    # mlflow_logger
    row("MLflow without a server", mlflow_without_a_server).says(
        "--loggers.mlflow needs a tracking server: give --loggers.mlflow-uri http://HOST:PORT, or set "
        "MLFLOW_TRACKING_URI"
    ),
    # metrics
    row("a pipe in place of metrics.jsonl", pipe_of_metrics).says(
        "InvalidDataError: DIR/metrics.jsonl is not a regular file; give a file, not a pipe or a device; move it away"
    ),
    # loggers
    row("empty", loggers_file, b"").says(
        "InvalidDataError: DIR/loggers.json is damaged (Expecting value: line 1 column 1 (char 0)); it names the "
        "run at MLflow and W&B: restore it, or move it away to begin a new run there, which gets all of "
        "metrics.jsonl"
    ),
    row("half", loggers_file, b"{").says(
        "InvalidDataError: DIR/loggers.json is damaged (Expecting property name enclosed in double quotes: line 1 "
        "column 2 (char 1)); it names the run at MLflow and W&B: restore it, or move it away to begin a new run "
        "there, which gets all of metrics.jsonl"
    ),
    row("a number", loggers_file, b'{"id": 5}').says(
        "InvalidDataError: DIR/loggers.json is damaged (id is 5; allowed: a text); it names the run at MLflow and "
        "W&B: restore it, or move it away to begin a new run there, which gets all of metrics.jsonl"
    ),
    row("a path", loggers_file, b'{"id": "../../elsewhere1"}').says(
        "InvalidDataError: DIR/loggers.json is damaged (id is '../../elsewhere1'; allowed: 16 digits of 0 to 9 "
        "and a to f); it names the run at MLflow and W&B: restore it, or move it away to begin a new run there, "
        "which gets all of metrics.jsonl"
    ),
    row("a condition of a search", loggers_file, b"{\"id\": \"a' or 'b' = 'b\"}").says(
        "InvalidDataError: DIR/loggers.json is damaged (id is \"a' or 'b' = 'b\"; allowed: 16 digits of 0 to 9 and "
        "a to f); it names the run at MLflow and W&B: restore it, or move it away to begin a new run there, which "
        "gets all of metrics.jsonl"
    ),
    row("an unknown field", loggers_file, b'{"id": "0123456789abcdef", "more": 1}').says(
        "InvalidDataError: DIR/loggers.json is damaged ('more' is not a field; allowed: id); it names the run at "
        "MLflow and W&B: restore it, or move it away to begin a new run there, which gets all of metrics.jsonl"
    ),
    row("long", loggers_file, json.dumps({"id": "a" * 5000}).encode()).says(
        "InvalidDataError: DIR/loggers.json is damaged (DIR/loggers.json is larger than 4,096 bytes, the most "
        "that are read of such a file); it names the run at MLflow and W&B: restore it, or move it away to begin "
        "a new run there, which gets all of metrics.jsonl"
    ),
    row("not UTF-8", loggers_file, b"\xff").says(
        "InvalidDataError: DIR/loggers.json is damaged ('utf-8' codec can't decode byte 0xff in position 0: "
        "invalid start byte); it names the run at MLflow and W&B: restore it, or move it away to begin a new run "
        "there, which gets all of metrics.jsonl"
    ),
    row("a folder in place of loggers.json", folder_of_loggers).says(
        "InvalidDataError: DIR/loggers.json is damaged ([Errno 21] Is a directory: 'DIR/loggers.json'); it names "
        "the run at MLflow and W&B: restore it, or move it away to begin a new run there, which gets all of "
        "metrics.jsonl"
    ),
    # step
    row("a step that reads from the device", step_that_reads_from_the_device).says(
        "RuntimeError: Tensor.item() cannot be called on meta tensors"
    ),
    # batch_plan
    row("lanes", batch_plan, 100, 0, 1, 64).says(
        "--global-batch is 100, not a multiple of --data.lanes = 64; take 128, or other lanes"
    ),
    row("fewer than the lanes: at least one a lane", batch_plan, 10, 0, 1, 64).says(
        "--global-batch is 10, not a multiple of --data.lanes = 64; take 64, or other lanes"
    ),
    row("no batch", batch_plan, 0, 0, 1, 8).says(
        "--global-batch is 0, not a multiple of --data.lanes = 8; take 8, or other lanes"
    ),
    row("negative", batch_plan, -8, 0, 1, 8).says(
        "--global-batch is -8, not a multiple of --data.lanes = 8; take 8, or other lanes"
    ),
    row("ranks", batch_plan, 128, 0, 3, 8).says(
        "--global-batch is 128, not divisible by 3 ranks; start 1 or 2 or 4 ranks, or change --global-batch"
    ),
    row("micro-batch", batch_plan, 128, 24, 2, 8).says(
        "--micro-batch is 24, which does not divide a rank's share of 64 images (global batch 128 / 2 ranks); "
        "take a divisor of 64, or 0 for the largest that fits"
    ),
    row("a micro-batch above the share", batch_plan, 128, 128, 2, 8).says(
        "--micro-batch is 128, which does not divide a rank's share of 64 images (global batch 128 / 2 ranks); "
        "take a divisor of 64, or 0 for the largest that fits"
    ),
    row("share", plan_of_pairs, 12, 0, 4).says(
        "--global-batch is 12, a share of 3 images for each of 4 ranks; mixup needs an even share: take a "
        "multiple of 8, other ranks, or --data.mixup.alpha 0 and --data.mixup.cutmix-alpha 0"
    ),
    row("micro", plan_of_pairs, 24, 3, 4).says(
        "--micro-batch is 3, which splits the pairs that mixup mixes; take an even divisor of a rank's share of 6 "
        "images, 0 for the largest that fits, or --data.mixup.alpha 0 and --data.mixup.cutmix-alpha 0"
    ),
    row("one at a time", plan_of_pairs, 24, 1, 1).says(
        "--micro-batch is 1, which splits the pairs that mixup mixes; take an even divisor of a rank's share of "
        "24 images, 0 for the largest that fits, or --data.mixup.alpha 0 and --data.mixup.cutmix-alpha 0"
    ),
    row(
        "LAMB: a head of zeros",
        refusals,
        {"optimizer": OptimizerConfig(name="lamb", weight_decay=0.02)},
    ).says(
        "optimizer.name is 'lamb' with model.head_std 0; the head would begin as a matrix of zeros, and LAMB's trust "
        "ratio lets a matrix grow by a share of its own norm only, the learning rate: give --model.head-std 0.02 (as "
        "in DeiT III), or --optimizer.name adamw"
    ),
    row(
        "Adafactor: model: ModelConfig(name=r50_vit_b16)",
        refusals,
        {"optimizer": OptimizerConfig(name="adafactor"), "model": ModelConfig(name="r50_vit_b16")},
    ).says(
        "optimizer.name is 'adafactor' with model.name 'r50_vit_b16'; allowed: Transformers without a ResNet, whose "
        "convolutions it does not factor: give --optimizer.name adamw"
    ),
    # repeated augmentation
    row(
        "an image mixed with itself",
        refusals,
        {
            "data": DataConfig(lanes=8, augment=AugmentConfig(repeats=3), mixup=MixupConfig(alpha=0.2)),
            "global_batch": 32,
        },
    ).says(
        "data.augment.repeats is 3 with mixup, global_batch 32 and data.lanes 8; allowed: 2 x repeats images or more "
        "of each lane in a batch, so that no image is mixed with itself: give --data.lanes 4, or "
        "--data.augment.repeats 1"
    ),
    # muon
    row(
        "Muon: engine: EngineConfig(zero_stage=3)",
        muon,
        {"engine": EngineConfig(zero_stage=3)},
    ).says(
        "optimizer.name is 'muon' with engine.zero_stage 3; allowed: stages 1 and 2 (Muon updates whole matrices, "
        "and stage 3 cuts every one of them on every rank): give --engine.zero-stage 1"
    ),
    row(
        "Muon: model: ModelConfig(name=bit_r50x1)",
        muon,
        {"model": ModelConfig(name="bit_r50x1")},
    ).says(
        "optimizer.name is 'muon' with model.name 'bit_r50x1'; allowed: Transformers and hybrids (Muon updates "
        "the matrices of their blocks, and a BiT ResNet has none): give --optimizer.name adamw"
    ),
    # SAM
    row(
        "SAM under ZeRO-2",
        refusals,
        {"optimizer": OptimizerConfig(sam_rho=0.05), "engine": EngineConfig(zero_stage=2)},
    ).says(
        "optimizer.sam_rho is 0.05 with engine.zero_stage 2; allowed: stage 1, the only one under which other weights "
        "can be published for the second pass of a step: give --engine.zero-stage 1, or --optimizer.sam-rho 0"
    ),
    row("SAM downhill", optimizer, {"sam_rho": -0.1}).says("optimizer.sam_rho is -0.1; allowed: 0 (off) or more"),
    # loading
    row(
        "another version",
        deepspeed_of,
        "0.99.0",
        "",
    ).says(
        "DeepSpeed 0.99.0 is installed; tested: 0.19.8. Another version may lay its states out in another way: "
        "install 0.19.8 (pip install deepspeed==0.19.8), or accept this one with --engine.allow-deepspeed 0.99.0, "
        "which also checks its gradients before the first step"
    ),
    row(
        "another version than the one named",
        deepspeed_of,
        "0.99.0",
        "0.99",
    ).says(
        "DeepSpeed 0.99.0 is installed; engine.allow_deepspeed is '0.99'; tested: 0.19.8. Another version may lay "
        "its states out in another way: install 0.19.8 (pip install deepspeed==0.19.8), or accept this one with "
        "--engine.allow-deepspeed 0.99.0, which also checks its gradients before the first step"
    ),
    row(
        "a later version",
        deepspeed_of,
        "0.19.9",
        "",
    ).says(
        "DeepSpeed 0.19.9 is installed; tested: 0.19.8. Another version may lay its states out in another way: "
        "install 0.19.8 (pip install deepspeed==0.19.8), or accept this one with --engine.allow-deepspeed 0.19.9, "
        "which also checks its gradients before the first step"
    ),
    # step_traffic
    row("two sums of one name", two_sums_of_one_name).says(
        "ValueError: two sums have one name: ['grad_norm', 'loss', 'loss']"
    ),
    # optimizer
    *(
        row(f"a bf16 moment, {name}", bf16_moment, name).says(
            "optimizer.first_moment is 'bf16' with optimizer.name '…'; it is a setting of AdamW and Adafactor: give "
            "--optimizer.first-moment fp32, or --optimizer.name adamw"
        )
        for name in ("sgd", "muon", "lamb")
    ),
    row("optimizer, LAMB's decay", optimizer, {"name": "lamb", "decay_scale": "schedule"}).says(
        "optimizer.decay_scale is 'schedule' with optimizer.name '…', whose decay is part of the update that the trust "
        "ratio scales; take --optimizer.decay-scale rate, or --optimizer.name adamw"
    ),
    row("optimizer, LAMB without decay", optimizer, {"name": "lamb"}).says(
        "optimizer.name is 'lamb' with optimizer.weight_decay 0; only parameters with weight decay have a trust ratio, "
        "so this would be Adam: give --optimizer.weight-decay 0.02, or --optimizer.name adamw"
    ),
    row("optimizer, LAMB of all", optimizer, {"name": "lamb", "weight_decay": 0.02, "decay": "all"}).says(
        "optimizer.name is 'lamb' with optimizer.decay 'all'; biases and the class token would have a trust ratio, "
        "too, which lets them grow by a share of their norm only, and they begin at zero: give --optimizer.decay "
        "kernels, or --optimizer.name adamw"
    ),
    row("optimizer, {'beta1': 1.0}", optimizer, {"beta1": 1.0}).says("optimizer.beta1 is 1.0; allowed: 0 to below 1"),
    row("optimizer, {'beta2': -0.1}", optimizer, {"beta2": -0.1}).says(
        "optimizer.beta2 is -0.1; allowed: 0 to below 1"
    ),
    row("optimizer, {'momentum': 1.5}", optimizer, {"momentum": 1.5}).says(
        "optimizer.momentum is 1.5; allowed: 0 to below 1"
    ),
    row("optimizer, {'weight_decay': -0.1}", optimizer, {"weight_decay": -0.1}).says(
        "optimizer.weight_decay is -0.1; allowed: 0 or more"
    ),
    row("epsilon and the heads multiple out of range, {'epsilon': 0.0}", optimizer, {"epsilon": 0.0}).says(
        "optimizer.epsilon is 0.0; allowed: above 0"
    ),
    row("epsilon and the heads multiple out of range, {'head_decay': -1.0}", optimizer, {"head_decay": -1.0}).says(
        "optimizer.head_decay is -1.0; allowed: 0 or more"
    ),
    *(
        row(f"layer decay, {value}", layer_decay, value).says("optimizer.layer_decay is …; allowed: above 0 to 1")
        for value in (0.0, -0.5, 1.5)
    ),
    # engine
    row("an engine of an open precision", engine_of_open_precision).says(
        "ValueError: engine.precision is 'auto'; the engine needs the resolved one, bf16 or fp32"
    ),
    row("empty buckets", lambda _: EngineConfig(reduce_bucket=0)).says("engine.reduce_bucket is 0; allowed: 1 or more"),
    row("attention of norms by flex", attending, "flex", {"qk_norm": True}).says(
        "engine.attention is 'flex' with model.qk_norm True and model.position 'learned_1d'; allowed: neither qk_norm "
        "nor positions within attention (relative, rope2d, learned_rope2d): give another kernel, or auto"
    ),
    *(
        row(
            f"attention with {position} positions by cudnn_packed", attending, "cudnn_packed", {"position": position}
        ).says(
            f"engine.attention is 'cudnn_packed' with model.qk_norm False and model.position '{position}'; allowed: …"
        )
        for position in ("relative", "rope2d")
    ),
    *(
        row(f"frozen blocks, recomputed: {how}", frozen, {"activation_checkpointing": how}).says(
            f"optimizer.freeze_backbone is on with engine.activation_checkpointing '{how}' and engine.fused_mlp False; "
            "allowed: off, auto, and no fused MLPs, since frozen blocks have no backward pass: give "
            "--engine.activation-checkpointing off --engine.no-fused-mlp"
        )
        for how in ("selective", "full")
    ),
    row("frozen blocks with fused MLPs", frozen, {"fused_mlp": True}).says(
        "optimizer.freeze_backbone is on with …fused_mlp True; allowed: …"
    ),
    # engine_blocks
    row("compiling under stage 3 with frozen blocks", compiled_and_frozen).says(
        'engine.compile is "on" with engine.zero_stage 3 and optimizer.freeze_backbone; allowed: stages 1 and 2 (stage '
        "3 gathers frozen weights layer by layer, inside the blocks): give --engine.zero-stage 2, or --engine.compile "
        "off"
    ),
    # gradients
    row("patches and corrupted patches: 1 1", corrupted, 1, 1).says(
        "ValueError: num_patches is 1 and num_corrupted 1; allowed: 2 or more, and 1 or more of them"
    ),
    row("patches and corrupted patches: 4 0", corrupted, 4, 0).says(
        "ValueError: num_patches is 4 and num_corrupted 0; allowed: 2 or more, and 1 or more of them"
    ),
    row("patches and corrupted patches: 4 5", corrupted, 4, 5).says(
        "ValueError: num_patches is 4 and num_corrupted 5; allowed: 2 or more, and 1 or more of them"
    ),
    row("masked patches with: loss: sigmoid", masked_job, {"loss": "sigmoid"}).says(
        "model.masked_patches predicts colours from images alone: it has no labels, no scores on a held-out "
        "dataset, and trains the whole model; give --loss softmax (--fewshot.url gives few-shot scores)"
    ),
    row("masked patches with: label_smoothing: 0.1", masked_job, {"label_smoothing": 0.1}).says(
        "model.masked_patches predicts colours from images alone: it has no labels, no scores on a held-out "
        "dataset, and trains the whole model; give --label-smoothing 0 (--fewshot.url gives few-shot scores)"
    ),
    row("masked patches with: class_weights: balanced", masked_job, {"class_weights": "balanced"}).says(
        "model.masked_patches predicts colours from images alone: it has no labels, no scores on a held-out "
        "dataset, and trains the whole model; give --class-weights equal (--fewshot.url gives few-shot scores)"
    ),
    row(
        "masked patches with: evaluation: EvaluationConfig(url=somewhere)",
        masked_job,
        {"evaluation": EvaluationConfig(url="somewhere")},
    ).says(
        "model.masked_patches predicts colours from images alone: it has no labels, no scores on a held-out "
        'dataset, and trains the whole model; give --evaluation.url "" (--fewshot.url gives few-shot scores)'
    ),
    row(
        "masked patches with: optimizer: OptimizerConfig(freeze_backbone=True)",
        masked_job,
        {"optimizer": OptimizerConfig(freeze_backbone=True)},
    ).says(
        "model.masked_patches predicts colours from images alone: it has no labels, no scores on a held-out "
        "dataset, and trains the whole model; give --optimizer.no-freeze-backbone (--fewshot.url gives few-shot "
        "scores)"
    ),
    row(
        "masked patches with: data: replace(masked_patches().data, mixup=MixupConfig(alpha=0.2))",
        masked_job,
        {"data": replace(masked_patches().data, mixup=MixupConfig(alpha=0.2))},
    ).says(
        "model.masked_patches predicts colours from images alone: it has no labels, no scores on a held-out "
        "dataset, and trains the whole model; give --data.mixup.alpha 0 (--fewshot.url gives few-shot scores)"
    ),
    row(
        "masked patches with: model: replace(masked_patches().model, image_size=16)",
        masked_job,
        {"model": replace(masked_patches().model, image_size=16)},
    ).says(
        "model.masked_patches with 1 patch in an image of 16 px, of which a share of 0.5 is corrupted: none; give "
        "a larger --model.masked-share or --model.image-size, or a smaller --model.patch"
    ),
    row(
        "masked patches with: model: replace(masked_patches().model, image_size=32, masked_share=0.15)",
        masked_job,
        {"model": replace(masked_patches().model, image_size=32, masked_share=0.15)},
    ).says(
        "model.masked_patches with 4 patches in an image of 32 px, of which a share of 0.15 is corrupted: none; "
        "give a larger --model.masked-share or --model.image-size, or a smaller --model.patch"
    ),
    # tokens
    row("whole steps alone", fewer_tokens, {}, {"whole_steps": 5}).says(
        "tokens.whole_steps is 5 without tokens.patch_dropout, so all patches stay in all steps; give "
        "--tokens.patch-dropout, such as 0.5, or --tokens.whole-steps 0"
    ),
    row("whole steps alone in the run", fewer_tokens, {}, {"patch_dropout": 0.5, "whole_steps": 100}).says(
        "tokens.whole_steps is 100, not below the 100 steps of the run, so no step would leave out patches; lower "
        "--tokens.whole-steps or raise --steps"
    ),
    row("patches left out of a ResNet", fewer_tokens, {"name": "bit_r50x1"}, {"patch_dropout": 0.5}).says(
        "tokens.patch_dropout is 0.5 with model.name 'bit_r50x1', a ResNet; allowed: Transformers and hybrids of "
        "global attention whose positions are rotary or added to the input; give --tokens.patch-dropout 0"
    ),
    row(
        "patches left out that are predicted",
        fewer_tokens,
        {"masked_patches": True, "num_classes": 512},
        {"patch_dropout": 0.5},
    ).says(
        "tokens.patch_dropout is 0.5 with model.masked_patches, whose head predicts every patch; allowed: Transformers "
        "and hybrids of global attention whose positions are rotary or added to the input; give "
        "--tokens.patch-dropout 0"
    ),
    row(
        "patches left out of axial attention, with positions in each layer",
        fewer_tokens,
        {"attention": "axial", "pooling": "average", "position_at": "layers"},
        {"patch_dropout": 0.5},
    ).says(
        "tokens.patch_dropout is 0.5 with model.attention 'axial', which needs whole rows and columns; "
        "model.position_at 'layers', which adds positions of all patches; allowed: Transformers and hybrids of global "
        "attention whose positions are rotary or added to the input; give --tokens.patch-dropout 0"
    ),
    row("patches left out of a sequence", fewer_tokens, {"position": "relative"}, {"patch_dropout": 0.5}).says(
        "tokens.patch_dropout is 0.5 with model.position 'relative', which is of the sequence of all tokens; allowed: "
        "Transformers and hybrids of global attention whose positions are rotary or added to the input; give "
        "--tokens.patch-dropout 0"
    ),
    row("sizes without steps", fewer_tokens, {}, {"image_sizes": (160,)}).says(
        "tokens.image_sizes is 160 and tokens.size_steps none; allowed: a last step for each size, in rising order, "
        "such as --tokens.image-sizes 160 192 --tokens.size-steps 40000 80000"
    ),
    row("sizes with falling steps", fewer_tokens, {}, {"image_sizes": (160, 192), "size_steps": (9, 8)}).says(
        "tokens.image_sizes is 160 192 and tokens.size_steps 9 8; allowed: a last step for each size, in rising "
        "order, such as --tokens.image-sizes 160 192 --tokens.size-steps 40000 80000"
    ),
    row(
        "a size that is not a multiple of the patch", fewer_tokens, {}, {"image_sizes": (150,), "size_steps": (9,)}
    ).says("tokens.image_sizes is 150; allowed: multiples of the patch (16 px), up to model.image_size, which is 224"),
    row("a size to the end", fewer_tokens, {}, {"image_sizes": (160,), "size_steps": (100,)}).says(
        "tokens.size_steps is 100; allowed: below the 100 steps of the run, so that it ends with the model's image "
        "size; lower --tokens.size-steps or raise --steps"
    ),
    row(
        "sizes with positions of one size",
        fewer_tokens,
        {"position_at": "layers"},
        {"image_sizes": (160,), "size_steps": (9,)},
    ).says(
        "tokens.image_sizes is 160 with model.position_at 'layers', whose tables have one size; allowed: models "
        "that take images of any size; leave out --tokens.image-sizes and --tokens.size-steps"
    ),
    row("one patch size", fewer_tokens, {}, {"patch_sizes": (16,)}).says(
        "tokens.patch_sizes is 16; allowed: 2 to 16 different sizes, such as --tokens.patch-sizes 8 16 32; for one "
        "size, give --model.patch instead"
    ),
    row("a patch size twice", fewer_tokens, {}, {"patch_sizes": (8, 16, 8)}).says(
        "tokens.patch_sizes is 8 16 8; allowed: 2 to 16 different sizes, such as --tokens.patch-sizes 8 16 32; for "
        "one size, give --model.patch instead"
    ),
    row("patches that do not divide the image", fewer_tokens, {}, {"patch_sizes": (16, 30)}).says(
        "tokens.patch_sizes is 16 30; allowed: sizes that divide images of 224 px: 1, 2, 4, 7, 8, 14, 16, 28, 32, "
        "56, 112, 224"
    ),
    row(
        "patches that do not divide the first images",
        fewer_tokens,
        {},
        {"patch_sizes": (16, 28), "image_sizes": (160,), "size_steps": (9,)},
    ).says("tokens.patch_sizes is 16 28; allowed: sizes that divide images of 160 and 224 px: 1, 2, 4, 8, 16, 32"),
    row("patch sizes of sines", fewer_tokens, {"position": "sincos2d"}, {"patch_sizes": (16, 32)}).says(
        "tokens.patch_sizes is 16 32 with model.position 'sincos2d', which counts patches, so that a place has "
        "another position with each size; allowed: Transformers without a ResNet that take grids of any size; leave "
        "out --tokens.patch-sizes"
    ),
    row(
        "too many grids",
        fewer_tokens,
        {"image_size": 240},
        {"patch_sizes": (8, 10, 12, 15, 16, 20, 24), "image_sizes": (240, 240, 240), "size_steps": (2, 4, 6)},
    ).says(
        "tokens.patch_sizes is 8 10 12 15 16 20 24 with 4 image sizes: 28 numbers of tokens; allowed: 24, "
        "since blocks are compiled for each; give fewer sizes"
    ),
    row("patch sizes of a hybrid", fewer_tokens, {"name": "r26_vit_s32"}, {"patch_sizes": (16, 32)}).says(
        "tokens.patch_sizes is 16 32 with model.name 'r26_vit_s32', whose patches are not pixels of the image but "
        "cells of a ResNet; allowed: Transformers without a ResNet that take grids of any size; leave out "
        "--tokens.patch-sizes"
    ),
    row("patch sizes of a ResNet", fewer_tokens, {"name": "bit_r50x1"}, {"patch_sizes": (16, 32)}).says(
        "tokens.patch_sizes is 16 32 with model.name 'bit_r50x1', whose patches are not pixels of the image but "
        "cells of a ResNet; allowed: Transformers without a ResNet that take grids of any size; leave out "
        "--tokens.patch-sizes"
    ),
    row(
        "patch sizes of masked patches",
        fewer_tokens,
        {"masked_patches": True, "num_classes": 512},
        {"patch_sizes": (16, 32)},
    ).says(
        "tokens.patch_sizes is 16 32 with model.masked_patches, whose targets have one size; allowed: Transformers "
        "without a ResNet that take grids of any size; leave out --tokens.patch-sizes"
    ),
    row(
        "patch sizes with positions of one size",
        fewer_tokens,
        {"position": "relative"},
        {"patch_sizes": (16, 32)},
    ).says(
        "tokens.patch_sizes is 16 32 with model.position 'relative', which is of one sequence; allowed: "
        "Transformers without a ResNet that take grids of any size; leave out --tokens.patch-sizes"
    ),
    row(
        "patch sizes with positions at each layer",
        fewer_tokens,
        {"position_at": "layers"},
        {"patch_sizes": (16, 32)},
    ).says(
        "tokens.patch_sizes is 16 32 with model.position_at 'layers', whose tables have one size; allowed: "
        "Transformers without a ResNet that take grids of any size; leave out --tokens.patch-sizes"
    ),
    row("sizes with a crop of one size", crops_of_one_size).says(
        "data.augment.resize_pixels is 256 with tokens.image_sizes, so crops for smaller images would show less of an "
        "image; give --data.augment.resize-pixels 0, which is in proportion"
    ),
    row("more patches that stay than there are", staying_patches_of, 17).says(
        "ValueError: num_stay is 17; allowed: 1 to 16, the number of patches"
    ),
    # schedule
    row("epochs, images and batch: 0 1 1", epochs_of, 0, 1, 1).says(
        "ValueError: 0 epochs, 1 images and batches of 1: all must be 1 or more"
    ),
    row("epochs, images and batch: 1 0 1", epochs_of, 1, 0, 1).says(
        "ValueError: 1 epochs, 0 images and batches of 1: all must be 1 or more"
    ),
    row("epochs, images and batch: 1 1 0", epochs_of, 1, 1, 0).says(
        "ValueError: 1 epochs, 1 images and batches of 0: all must be 1 or more"
    ),
    row("learning rate", schedule, -1e-3, 0.0, 0).says("schedule.learning_rate is -0.001; allowed: 0 or more"),
    row("end", schedule, 1e-3, -1e-5, 0).says("schedule.final_learning_rate is -1e-05; allowed: 0 or more"),
    row("warm-up", schedule, 1e-3, 0.0, -1).says("schedule.warmup_steps is -1; allowed: 0 or more"),
    row(
        "schedule: stair_steps: (3,)",
        schedule_with,
        {"stair_steps": (3,)},
    ).says(
        "schedule.stair_steps is 3 with schedule.decay 'cosine'; a staircase needs them and no other decay has "
        "them: give --schedule.decay staircase --schedule.stair-steps 6000 12000 18000, or neither"
    ),
    row(
        "schedule: decay: staircase",
        schedule_with,
        {"decay": "staircase"},
    ).says(
        "schedule.stair_steps is none with schedule.decay 'staircase'; a staircase needs them and no other decay "
        "has them: give --schedule.decay staircase --schedule.stair-steps 6000 12000 18000, or neither"
    ),
    row(
        "schedule: decay: staircase, stair_steps: (9, 3)",
        schedule_with,
        {"decay": "staircase", "stair_steps": (9, 3)},
    ).says("schedule.stair_steps is 9 3; allowed: rising steps, such as 6000 12000"),
    row(
        "schedule: decay: staircase, stair_steps: (3, 3)",
        schedule_with,
        {"decay": "staircase", "stair_steps": (3, 3)},
    ).says("schedule.stair_steps is 3 3; allowed: rising steps, such as 6000 12000"),
    row(
        "schedule: decay: staircase, stair_steps: (0,)",
        schedule_with,
        {"decay": "staircase", "stair_steps": (0,)},
    ).says("schedule.stair_steps.0 is 0; allowed: 1 to 1,000,000,000"),
    row(
        "schedule: decay: staircase, stair_steps: (3,), stair_factor: 1.5",
        schedule_with,
        {"decay": "staircase", "stair_steps": (3,), "stair_factor": 1.5},
    ).says("schedule.stair_factor is 1.5; allowed: above 0 to 1"),
    row(
        "schedule: decay: rsqrt, timescale: 0",
        schedule_with,
        {"decay": "rsqrt", "timescale": 0},
    ).says("schedule.timescale is 0; allowed: 1 to 1,000,000,000"),
    row(
        "schedule: decay: rsqrt, final_learning_rate: 1e-05",
        schedule_with,
        {"decay": "rsqrt", "final_learning_rate": 1e-5},
    ).says(
        "schedule.final_learning_rate is 1e-05 with schedule.decay 'rsqrt', which has no end of its own; add "
        "--schedule.cooldown-steps, or take --schedule.final-learning-rate 0"
    ),
    row(
        "schedule: cooldown_steps: -1",
        schedule_with,
        {"cooldown_steps": -1},
    ).says("schedule.cooldown_steps is -1; allowed: 0 (none) to 1,000,000,000"),
    row("a cooldown longer than the run", long_cooldown).says(
        "schedule.cooldown_steps is 71, after schedule.warmup_steps of 30; allowed: up to 70, what is left of the "
        "run's 100 steps; lower one of them or raise --steps"
    ),
    # job
    row("no steps", refusals, {"steps": 0}).says("steps is 0; allowed: 1 to 1,000,000,000"),
    row("negative threads", refusals, {"threads": -1}).says(
        "threads is -1; allowed: 0 (the rank's share of the cores) to 1,024"
    ),
    row("logging never", refusals, {"log_every_steps": 0}).says("log_every_steps is 0; allowed: 1 to 1,000,000,000"),
    row("negative clipping", refusals, {"clip_norm": -1.0}).says("clip_norm is -1.0; allowed: 0 (off) or more"),
    row("negative micro-batch", refusals, {"micro_batch": -2}).says(
        "micro_batch is -2; allowed: 0 (the largest that fits) to 16,777,216"
    ),
    row(
        "all steps are warm-up: nothing would be learned at the rate asked for",
        refusals,
        {"steps": 100, "schedule": ScheduleConfig(warmup_steps=100)},
    ).says(
        "schedule.warmup_steps is 100, not below the 100 steps of the run; lower --schedule.warmup-steps or raise "
        "--steps"
    ),
    row("nothing of the label left", refusals, {"label_smoothing": 1.0}).says(
        "label_smoothing is 1.0; allowed: 0 (off) to below 1"
    ),
    row(
        "weights of classes that are asked for one by one", refusals, {"class_weights": "balanced", "loss": "sigmoid"}
    ).says(
        "class_weights is 'balanced' with loss 'sigmoid', which asks of each class on its own whether the image "
        "has it; give --class-weights equal, or --loss softmax"
    ),
    row("an average that never moves", refusals, {"ema_decay": 1.0}).says(
        "ema_decay is 1.0; allowed: 0 (off) to below 1"
    ),
    row("a negative factor", refusals, {"ema_decay": -0.1}).says("ema_decay is -0.1; allowed: 0 (off) to below 1"),
    row(
        "a decay that follows a schedule of zeros",
        refusals,
        {
            "optimizer": OptimizerConfig(decay_scale="schedule"),
            "schedule": ScheduleConfig(learning_rate=0.0),
        },
    ).says(
        "schedule.learning_rate is 0.0 with optimizer.decay_scale 'schedule'; a decay that follows the schedule "
        "needs one: give a rate above 0, or --optimizer.decay-scale rate"
    ),
    row(
        "float8 without the dense layers of blocks",
        refusals,
        {"engine": EngineConfig(float8="rowwise"), "model": ModelConfig(name="bit_r50x1")},
    ).says(
        "engine.float8 is 'rowwise' with model.name 'bit_r50x1'; allowed: Transformers and hybrids (float8 is for "
        "the dense layers of their blocks, and a BiT ResNet has none): give --engine.float8 off"
    ),
    row(
        "widths that no GPU multiplies in float8",
        refusals,
        {"engine": EngineConfig(float8="rowwise"), "model": ModelConfig(name="vit_b16", mlp_width=3080)},
    ).says(
        "engine.float8 is 'rowwise' with model.name 'vit_b16', of width 768 and MLP width 3080; allowed: "
        "multiples of 16 (GPUs have no other products of float8): give such widths, or --engine.float8 off"
    ),
    row(
        "graphs of a number of images that varies",
        refusals,
        {"engine": EngineConfig(cuda_graphs=True), "model": ModelConfig(name="vit_b16", stochastic_depth=0.2)},
    ).says(
        "engine.cuda_graphs is on with model.stochastic_depth 0.2 and engine.skip_branches, whose blocks compute "
        "another number of images in each step; allowed: one number, as a graph has: give "
        "--engine.no-skip-branches, or --engine.no-cuda-graphs"
    ),
    *(
        row(
            f"graphs of several numbers of tokens: {given}",
            refusals,
            {"engine": EngineConfig(cuda_graphs=True), "tokens": tokens},
        ).says(
            f"engine.cuda_graphs is on with {given}: steps have 2 numbers of patches, each with graphs of its own, "
            f"whose memory no plan counts; allowed: one number: leave out {flags}, or give --engine.no-cuda-graphs"
        )
        for tokens, given, flags in (
            (TokensConfig(patch_sizes=(16, 32)), "tokens.patch_sizes 16 32", "--tokens.patch-sizes"),
            (
                TokensConfig(image_sizes=(160,), size_steps=(9,)),
                "tokens.image_sizes 160",
                "--tokens.image-sizes and --tokens.size-steps",
            ),
            (TokensConfig(patch_dropout=0.5, whole_steps=9), "tokens.whole_steps 9", "--tokens.whole-steps"),
        )
    ),
    *(
        row(
            f"{kernel} for a number of images that varies",
            refusals,
            {"engine": EngineConfig(attention=kernel), "model": ModelConfig(name="vit_b16", stochastic_depth=0.2)},
        ).says(
            f"engine.attention is '{kernel}' with model.stochastic_depth 0.2 and engine.skip_branches, whose blocks "
            "compute another number of images in each step, for each of which this kernel would be built anew; "
            "allowed: one number: give --engine.no-skip-branches, or --engine.attention auto"
        )
        for kernel in ("flex", "cudnn_packed")
    ),
    row(
        "a class token that would learn nothing",
        refusals,
        {
            "model": ModelConfig(name="vit_b16", distillation_token=True),
            "teacher": TeacherConfig(weights="w"),
        },
    ).says(
        "teacher.share is 1 with model.distillation_token: the class token's head, which labels teach, would learn "
        "nothing, and predictions are the mean of both heads'; give --teacher.share below 1, such as 0.5 (DeiT), or "
        "--model.no-distillation-token"
    ),
    *(
        row("labels that nothing is learned from", refusals, {"teacher": TeacherConfig(weights="w"), **fields}).says(
            f"teacher.share is 1, so the loss is the teacher's alone, and {given} would have no effect; give {flags}, "
            "or --teacher.share below 1, such as 0.5 (DeiT)"
        )
        for fields, given, flags in (
            ({"label_smoothing": 0.1}, "label_smoothing 0.1", "--label-smoothing 0"),
            ({"class_weights": "balanced"}, "class_weights 'balanced'", "--class-weights equal"),
            ({"data": DataConfig(label_weights=True)}, "data.label_weights", "--data.no-label-weights"),
            (
                {"label_smoothing": 0.1, "class_weights": "balanced", "data": DataConfig(label_weights=True)},
                "label_smoothing 0.1 and class_weights 'balanced' and data.label_weights",
                "--label-smoothing 0 --class-weights equal --data.no-label-weights",
            ),
        )
    ),
    row("scores beside nothing", refusals, {"evaluation": EvaluationConfig(also=("a",))}).says(
        "evaluation.also says nothing without evaluation.url or data.held_out; give one, too"
    ),
    row(
        "checkpoints, {'every_steps': -1}",
        checkpoints,
        {"every_steps": -1},
    ).says("checkpoint.every_steps is -1; allowed: 0 (not by steps) or more"),
    row(
        "checkpoints, {'keep_newest': 0}",
        checkpoints,
        {"keep_newest": 0},
    ).says("checkpoint.keep_newest is 0; allowed: 1 or more"),
    row(
        "checkpoints, {'keep_every': -1}",
        checkpoints,
        {"keep_every": -1},
    ).says("checkpoint.keep_every is -1; allowed: 0 (none) or more"),
    row(
        "ways to save that contradict each other: auto_interval: True, every_seconds: 600",
        checkpoints,
        {"auto_interval": True, "every_seconds": 600},
    ).says(
        "checkpoint.auto_interval is on with checkpoint.every_seconds 600, and chooses the seconds itself; leave "
        "out one of the two (--checkpoint.no-auto-interval, or --checkpoint.every-seconds 0)"
    ),
    row(
        "ways to save that contradict each other: every_steps: 0, keep_every: 500",
        checkpoints,
        {"every_steps": 0, "keep_every": 500},
    ).says(
        "checkpoint.keep_every is 500 with checkpoint.every_steps 0, so no checkpoint is due at its steps; give "
        "--checkpoint.every-steps 500, or --checkpoint.keep-every 0"
    ),
    row("stage 3", float8, {"zero_stage": 3}).says(
        "engine.float8 is 'rowwise' with engine.zero_stage 3; allowed: stages 1 and 2 (float8 is fast in compiled "
        "blocks only, and would keep gathered weights until the backward pass): give --engine.zero-stage 2, or "
        "--engine.float8 off"
    ),
    row("fp32", float8, {"precision": "fp32"}).says(
        "engine.float8 is 'rowwise' with engine.precision fp32; allowed: bf16, and auto where it takes bf16: give "
        "--engine.precision bf16, or --engine.float8 off"
    ),
    row("fused MLPs of stage 3", fused_mlp, {"zero_stage": 3}).says(
        "engine.fused_mlp is on with engine.zero_stage 3, engine.precision auto and engine.float8 'off'; allowed: "
        "stages 1 and 2 (stage 3 gathers weights layer by layer, and here two layers are one), bf16, and float8 'off': "
        "give --engine.zero-stage 2 --engine.precision bf16 --engine.float8 off, or --engine.no-fused-mlp"
    ),
    row("fused MLPs with selective", fused_mlp, {"activation_checkpointing": "selective"}).says(
        "engine.fused_mlp is on with engine.activation_checkpointing 'selective'; allowed: off, full and auto (fused "
        "MLPs keep their GELU, which is most of what selective would save): give --engine.activation-checkpointing "
        "full, or --engine.no-fused-mlp"
    ),
    row("selective recomputation of BiT", selective_of_bit).says(
        "engine.activation_checkpointing is 'selective' with model.name 'bit_r50x1'; allowed: off, full and auto "
        "(selective is for Transformer blocks, which a ResNet lacks): give --engine.activation-checkpointing full"
    ),
    row("fused MLPs in fp32", fused_mlp, {"precision": "fp32"}).says("engine.fused_mlp is on with …precision fp32…"),
    row("fused MLPs in float8", fused_mlp, {"float8": "rowwise"}).says("engine.fused_mlp is on with …'rowwise'; …"),
    row("fused MLPs without MLPs", fused_mlp_of, {"name": "bit_r50x1"}).says(
        "engine.fused_mlp is on with model.name 'bit_r50x1'; allowed: Transformers and hybrids (a BiT ResNet has no "
        "MLPs): give --engine.no-fused-mlp"
    ),
    row("fused MLPs with dropout", fused_mlp_of, {"name": "vit_b16", "dropout": 0.1}).says(
        "engine.fused_mlp is on with model.name 'vit_b16' and model.dropout 0.1; allowed: 0, since dropout would come "
        "between GELU and the next product: give --model.dropout 0, or --engine.no-fused-mlp"
    ),
    row("fused MLPs of odd widths", fused_mlp_of, {"name": "vit_b16", "mlp_width": 3076}).says(
        "engine.fused_mlp is on with model.name 'vit_b16', of width 768 and MLP width 3076; allowed: multiples of 8, "
        "since the kernels load 16 bytes at once: give such widths, or --engine.no-fused-mlp"
    ),
    row("a rank without fused MLPs", fused_mlp_here, "bf16", ["", *3 * ["no QuACK"]]).says(
        "engine.fused_mlp is on, which ranks 1-3 of 4 cannot compute: no QuACK; allowed here: --engine.no-fused-mlp"
    ),
    row("fused MLPs on a device that takes fp32", fused_mlp_here, "fp32", ["", ""]).says(
        "engine.fused_mlp is on, but the run's precision is fp32; allowed: bf16: give --engine.precision bf16, or "
        "--engine.no-fused-mlp"
    ),
    row("binary targets without the sigmoid loss", binary_targets).says(
        "data.mixup.binary_targets is on with loss 'softmax', whose targets add up to 1; give --loss sigmoid, or "
        "--data.mixup.no-binary-targets"
    ),
    row("values that no machine has: steps: 10 ** 20", refusals, {"steps": 10**20}).says(
        "steps is 100000000000000000000; allowed: 1 to 1,000,000,000"
    ),
    row("values that no machine has: global_batch: 1 << 63", refusals, {"global_batch": 1 << 63}).says(
        "global_batch is 9223372036854775808; allowed: 1 to 16,777,216"
    ),
    row("values that no machine has: threads: 100000", refusals, {"threads": 100_000}).says(
        "threads is 100000; allowed: 0 (the rank's share of the cores) to 1,024"
    ),
    # run
    # start
    row("graphs of several passes", graphs_of_several_passes).says(
        "engine.cuda_graphs is on, but a step has 2 passes; allowed: one (between passes, gradients stay in the "
        "graphs' memory, which the next pass takes): give more GPUs, a smaller --global-batch or a larger "
        "--micro-batch, or --engine.no-cuda-graphs"
    ),
    # guard
    row("bad updates in a row: None", bad_updates_in_a_row, None).says(
        "WillNotSucceedError: 3 updates in a row, up to step 15, had a non-finite gradient or loss; no checkpoint "
        "is there; lower --schedule.learning-rate or set --clip-norm, and run the command again"
    ),
    row("bad updates in a row: 12", bad_updates_in_a_row, 12).says(
        "WillNotSucceedError: 3 updates in a row, up to step 15, had a non-finite gradient or loss; the last good "
        "checkpoint is of step 12; lower --schedule.learning-rate or set --clip-norm, and run the command again"
    ),
    row("a bad update at the end", bad_update_at_the_end).says(
        "WillNotSucceedError: 1 updates in a row, up to step 12, had a non-finite gradient or loss; the last good "
        "checkpoint is of step 8; lower --schedule.learning-rate or set --clip-norm, and run the command again"
    ),
    row("a history that can never be long enough", lambda _: GuardConfig(min_history=9, spike_window=8)).says(
        "guard.min_history is 9, above guard.spike_window, which is 8; lower --guard.min-history or raise "
        "--guard.spike-window"
    ),
    # stochastic_depth
    row("branches that are never kept", stochastic_depth, 0.0, 1.0).says(
        "ValueError: rates are (0.0, 1.0); allowed: one for each block, from 0 to below 1"
    ),
    row("a negative rate", stochastic_depth, -0.1).says(
        "ValueError: rates are (-0.1,); allowed: one for each block, from 0 to below 1"
    ),
    row("no blocks", stochastic_depth).says("ValueError: rates are (); allowed: one for each block, from 0 to below 1"),
    # float8
    row("a rank without float8", rank_without_float8).says(
        "engine.float8 is 'rowwise', which ranks 2-4 of 5 cannot compute: A100 is too old; no torchao; allowed "
        "here: --engine.float8 off"
    ),
    # fit
    row("a higher stage", too_little_memory, 5.0e9).says(
        "a micro-batch of 1 image needs 5.9 GB on each of 8 ranks (weights and states 2.3 GB, gradients 3.0 GB, "
        "activations 436 MB), but a device has 5.0 GB for it (5.0 GB minus a reserve of 0 MB); these plans fit: "
        "--engine.zero-stage 2; --engine.zero-stage 2 --engine.activation-checkpointing full; --engine.zero-stage 3"
    ),
    row("hopeless", too_little_memory, 1e9).says(
        "a micro-batch of 1 image needs 5.9 GB on each of 8 ranks (weights and states 2.3 GB, gradients 3.0 GB, "
        "activations 436 MB), but a device has 1.0 GB for it (1.0 GB minus a reserve of 0 MB); no plan fits: take "
        "GPUs with more memory, or a smaller model"
    ),
    row("memory that more ranks would have", memory_of_more_ranks).says(
        "a micro-batch of 1 image needs 3.8 GB on each of 8 ranks (weights and states 2.6 GB, gradients 872 MB, "
        "activations 130 MB), but a device has 3.0 GB for it (3.0 GB minus a reserve of 0 MB); these plans fit: "
        "--engine.zero-stage 3; 16 ranks; 32 ranks"
    ),
    # first_pass
    row("the first step would need as much again", out_of_memory_after, 0).says(
        "WillNotSucceedError: the GPU of rank 1 ran out of memory after 0 steps of this start, with a micro-batch "
        "of 16 images (CUDA out of memory. Tried to allocate 2.00 GiB.); give a smaller --micro-batch, a divisor "
        "of 64: batches stay as they are"
    ),
    row("free memory in pieces: another start may go further", out_of_memory_after, 3).says(
        "TransientError: the GPU of rank 1 ran out of memory after 3 steps of this start, with a micro-batch of "
        "16 images (CUDA out of memory. Tried to allocate 2.00 GiB.); give a smaller --micro-batch, a divisor of "
        "64: batches stay as they are"
    ),
)
def test_messages(refusal: Row, tmp_path: Path) -> None:
    refusal.check(tmp_path)
