"""The picture shows the fp32 masters after the update, under every stage, on rank 0 alone."""

from dataclasses import replace
from typing import Literal

import pytest
import torch

from jobs.recipes.pretrain import digits_smoke
from pipeline.checkpoints.fragments import Fragment
from pipeline.inspection.weight_pictures import levels, similarities
from pipeline.models.build import shapes_of, unfilled_model
from pipeline.models.config import ModelConfig
from pipeline.ranks.world import World
from pipeline.training.reporting.norms import PositionView
from pipeline.training.settings.job import TrainingJob
from pipeline.training.zero.batch_plan import plan_batch
from pipeline.training.zero.engine import Engine
from pipeline.training.zero.gpu_streams import HostStreams
from tests.rigs.processes import run_ranks

VIT = ModelConfig(name="vit", image_size=24, num_classes=3, patch=8, depth=1, width=10, mlp_width=8, num_heads=2)
STAGES: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)


def job_of(model: ModelConfig = VIT, *, every: int = 4, steps: int = 10) -> TrainingJob:
    smoke = digits_smoke()
    schedule = replace(smoke.schedule, warmup_steps=0)
    return replace(smoke, model=model, similarity_every_steps=every, steps=steps, schedule=schedule)


def position() -> torch.Tensor:
    """float32[1, 10, 10], which bf16 cannot hold."""
    return torch.randn(1, 10, 10, generator=torch.Generator().manual_seed(0)) + 1


def shown(world: World) -> list[torch.Tensor | None]:
    """What this rank gets under each stage."""
    plan, found = plan_batch(6, micro_batch=0, num_ranks=world.num_ranks, lanes=1), []

    def fill(fragment: Fragment, slot: str) -> None:
        values = position() if fragment.name == "embed.position" else torch.zeros(10_000)
        fragment.slots[slot].copy_(values.flatten()[fragment.start : fragment.start + fragment.length])

    for stage in STAGES:
        job = job_of()
        config = replace(job.engine, zero_stage=stage, precision="bf16")
        engine = Engine(unfilled_model(VIT), config=config, plan=plan, optimizer=job.optimizer, clip_norm=0.0)
        engine.load(fill, moments=[], num_updates=0)
        launched = PositionView(job, engine, world, HostStreams()).launched()
        found.append(launched.arrived() if launched else None)
        engine.destroy()
    return found


def test_rank_0_gets_the_masters_under_every_stage() -> None:
    first, second = run_ranks(shown, num_ranks=2)
    assert second == [None] * len(STAGES)
    expected = levels(similarities(position()[0], grid=(3, 3)))
    for found in first:
        assert torch.equal(found, expected)


class _Engine:
    """A model of these shapes."""

    def __init__(self, model: ModelConfig) -> None:
        self.shapes = shapes_of(model)


@pytest.mark.parametrize(
    ("job", "due"),
    [
        (job_of(), [4, 8, 10]),  # and the last one
        (job_of(every=1, steps=2), [1, 2]),
        (job_of(every=0), []),
        (job_of(replace(VIT, position="learned_2d")), []),
        (job_of(replace(VIT, position="none")), []),
        (job_of(ModelConfig(name="bit_r50x1", image_size=32, num_classes=3, resnet_units=(1,))), []),
    ],
    ids=["every-4", "every-1", "never", "2-D", "no positions", "BiT"],
)
def test_steps_that_are_due(job: TrainingJob, due: list[int]) -> None:
    engine = _Engine(job.model)
    view = PositionView(job, engine, None, HostStreams())  # type: ignore[arg-type]
    assert [step for step in range(1, job.steps + 1) if view.is_due(step)] == due
