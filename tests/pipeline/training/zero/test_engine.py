"""DeepSpeed does what plain PyTorch does: the same losses and gradient norms, whatever the stage."""

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import pytest
import torch

from pipeline.checkpoints.manifest import MASTER
from pipeline.data.config import AugmentConfig, DataConfig
from pipeline.data.stream import train_batches
from pipeline.models import ModelConfig, build_model
from pipeline.models.loss import classification_loss
from pipeline.ranks.world import World
from pipeline.training.reporting.metrics import read_metrics
from pipeline.training.settings.job import MOST_ON_CPU, EngineConfig, OptimizerConfig
from pipeline.training.settings.schedule import ScheduleConfig, learning_rate
from pipeline.training.zero.batch_plan import BatchPlan, plan_batch
from pipeline.training.zero.engine import Engine, deepspeed_config
from pipeline.training.zero.optimizer import build_optimizer
from tests.rigs.processes import run_ranks
from tests.rigs.training import STEPS, FinishedRuns


def plain_torch(url: str, folder: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) of the rig's tiny run, as a loop of a few lines without any engine."""
    model = build_model(
        ModelConfig(
            name="vit",
            image_size=32,
            num_classes=10,
            patch=8,
            depth=2,
            width=32,
            mlp_width=64,
            num_heads=2,
            position_std=0.3,
        )
    )
    optimizer = build_optimizer(model.named_parameters(), OptimizerConfig(weight_decay=0.05))
    schedule = ScheduleConfig(learning_rate=1e-3, decay="cosine", warmup_steps=2)
    augment = AugmentConfig(min_area=0.75, min_ratio=0.9, max_ratio=1.11, flip=False)
    config = DataConfig(url=url, lanes=8, window_blocks=2, augment=augment)
    found = []
    listed = folder / "quarantine.jsonl"
    with train_batches(global_batch=32, image_size=32, config=config, quarantine=listed) as batches:
        for batch in islice(batches, STEPS):
            loss = classification_loss(model(batch.images), batch.labels, name="softmax")
            torch.autograd.backward(loss)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(batch.step, config=schedule, num_steps=STEPS)
            optimizer.step()
            optimizer.zero_grad()
            found.append((loss.item(), float(norm)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "num_ranks"), [(1, 2), (2, 2), (3, 1)])
def test_equals_plain_torch_in_fp32(
    digits_url: str, finished_runs: FinishedRuns, tmp_path: Path, stage: int, num_ranks: int
) -> None:
    run_dir = finished_runs.get(num_ranks, "--engine.zero-stage", str(stage), "--engine.precision", "fp32")
    found = [(float(line["loss"]), float(line["grad_norm"])) for line in read_metrics(run_dir)]
    expected = plain_torch(digits_url, tmp_path)
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], abs=2e-5)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=1e-3)


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_clipping_is_always_written(clip_norm: float) -> None:
    """DeepSpeed's default became 1.0 in 2026; the paper's JFT recipe does not clip."""
    plan = plan_batch(64, micro_batch=0, num_ranks=2, lanes=8)
    assert deepspeed_config(EngineConfig(precision="fp32"), plan, clip_norm=clip_norm)["gradient_clipping"] == clip_norm


def test_accumulation_in_bf16_is_kept_in_fp32() -> None:
    plan = plan_batch(64, micro_batch=16, num_ranks=2, lanes=8)
    settings = deepspeed_config(EngineConfig(precision="bf16"), plan, clip_norm=0.0)
    assert settings["data_types"] == {"grad_accum_dtype": "fp32"}
    assert settings["train_micro_batch_size_per_gpu"] * settings["gradient_accumulation_steps"] * 2 == 64


@pytest.mark.parametrize(
    ("precision", "reduced_in", "accumulation", "expected"),
    [
        ("bf16", "auto", 1, "fp32"),  # in bf16 the error grows with the number of ranks
        ("bf16", "auto", 2, "fp32"),
        ("bf16", "fp32", 1, "fp32"),
        ("bf16", "bf16", 2, "bf16"),
        ("fp32", "auto", 1, None),  # DeepSpeed's own choice
        ("fp32", "bf16", 2, None),  # gradients of fp32 passes are never rounded
    ],
)
def test_gradients_in_bf16_are_added_up_in_fp32(
    precision: Literal["bf16", "fp32"],
    reduced_in: Literal["auto", "bf16", "fp32"],
    accumulation: int,
    expected: str | None,
) -> None:
    plan = plan_batch(64, micro_batch=32 // accumulation, num_ranks=2, lanes=8)
    config = EngineConfig(precision=precision, reduce_precision=reduced_in)
    assert deepspeed_config(config, plan, clip_norm=0.0).get("communication_data_type") == expected


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_reduced_without_more_copies_of_them(stage: Literal[1, 2, 3]) -> None:
    plan = plan_batch(64, micro_batch=0, num_ranks=2, lanes=8)
    settings = deepspeed_config(EngineConfig(precision="fp32", zero_stage=stage), plan, clip_norm=0.0)
    assert settings["zero_optimization"]["reduce_scatter"] == (stage == 3)


@pytest.mark.parametrize("chosen", [1_000_000, 50_000_000])
def test_buckets_on_a_cpu_are_blocks_that_the_allocator_keeps(chosen: int) -> None:
    plan = plan_batch(64, micro_batch=0, num_ranks=2, lanes=8)
    config = EngineConfig(precision="fp32", reduce_bucket=chosen)
    for on_cpu, expected in ((True, min(chosen, MOST_ON_CPU)), (False, chosen)):
        settings = deepspeed_config(config, plan, clip_norm=0.0, on_cpu=on_cpu)["zero_optimization"]
        assert settings["reduce_bucket_size"] == expected
    assert MOST_ON_CPU * 4 < 32 * 2**20, "the largest block that glibc keeps"


OVERLAP_STEPS = 50
SMALL = ModelConfig(name="vit", image_size=16, patch=8, depth=2, width=32, mlp_width=64, num_heads=2, num_classes=10)


def bits_of_steps(
    world: World, stage: Literal[1, 2, 3], precision: Literal["bf16", "fp32"], steps: int
) -> list[list[float]]:
    """Losses and gradient norms of an engine without overlap, then of one with it, and this rank's weights at the end:
    reduced in several buckets."""
    found = []
    for overlap in ("off", "on"):
        model = build_model(SMALL)
        engine = Engine(
            model,
            config=EngineConfig(zero_stage=stage, precision=precision, overlap=overlap, reduce_bucket=5000),
            plan=BatchPlan(global_batch=8, micro_batch=4, accumulation=1, num_ranks=2),
            optimizer=OptimizerConfig(weight_decay=0.1),
            clip_norm=1.0,
        )
        engine.train(True)
        values = []
        for step in range(steps):
            draws = torch.Generator().manual_seed(2 * step + world.rank)
            images = torch.randint(0, 256, (4, 16, 16, 3), dtype=torch.uint8, generator=draws)
            labels = torch.randint(0, 10, (4, 1), generator=draws)
            loss = engine.accumulate(partial(loss_of, images, labels))
            update = engine.update(learning_rate=1e-2)
            values += [float(loss), float(update.grad_norm)]
        masters = [float(one.slots[MASTER].double().abs().sum()) for one in engine.fragments()]
        found.append([*values, *masters])
        engine.destroy()
    return found


def loss_of(images: torch.Tensor, labels: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    return classification_loss(model(images), labels, name="softmax")


@pytest.mark.parametrize(
    ("stage", "precision", "steps"),
    [
        pytest.param(1, "bf16", 5, id="stage 1, bf16, a few steps"),
        *(
            pytest.param(stage, precision, OVERLAP_STEPS, marks=pytest.mark.long, id=f"stage {stage}, {precision}")
            for stage in (1, 2, 3)
            for precision in ("bf16", "fp32")
        ),
    ],
)
def test_overlap_changes_no_bit(stage: Literal[1, 2, 3], precision: Literal["bf16", "fp32"], steps: int) -> None:
    """Two ranks, whose order of adding does not matter; losses, norms and weights."""
    for without, with_overlap in run_ranks(bits_of_steps, stage, precision, steps, num_ranks=2):
        assert with_overlap == without
        assert without[0] != without[2], "it learns"
