"""A rank that runs out of memory in the first pass makes all ranks take half the micro-batch; nothing else changes."""

import gc
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jobs.recipes.pretrain import digits_smoke
from pipeline.models.build import build_model
from pipeline.models.loss import classification_loss
from pipeline.ranks.world import World
from pipeline.shared_settings import Recomputed
from pipeline.training.fitting.first_pass import FirstPass, engine_that_fits, one_pass
from pipeline.training.settings.job import EngineConfig, TeacherConfig, TrainingJob
from pipeline.training.start import stand_in_model, starting_model
from pipeline.training.teacher import Teacher
from pipeline.training.zero.batch_plan import BatchPlan, plan_batch
from pipeline.training.zero.engine import Engine
from pipeline.training.zero.gradient_check import check_gradients
from shards.errors import UserError
from tests.rigs.processes import run_ranks
from tests.rigs.random_weights import fill_randomly

NUM_RANKS, SHARE = 2, 16
CPU = torch.device("cpu")


def job_of(stage: Any = 1, *, recomputed: Recomputed = "off") -> TrainingJob:
    job = digits_smoke()
    model = replace(job.model, num_classes=10, width=32, depth=2, mlp_width=64, num_heads=2)
    engine = EngineConfig(
        zero_stage=stage,
        precision="fp32",
        compile="off",
        activation_checkpointing=recomputed,
        reduce_bucket=1000,
    )
    return replace(job, model=model, engine=engine, global_batch=NUM_RANKS * SHARE)


def build(job: TrainingJob, plan: BatchPlan) -> Engine:
    model = starting_model(job, is_compiled=False)
    engine = Engine(model, config=job.engine, plan=plan, optimizer=job.optimizer, clip_norm=0.0)
    fill_randomly(engine, std=0.1)
    return engine


def whole(job: TrainingJob) -> BatchPlan:
    return plan_batch(job.global_batch, micro_batch=0, num_ranks=NUM_RANKS, lanes=1)


def trained(job: TrainingJob, engine: Engine, plan: BatchPlan, world: World) -> float:
    """The gradient's norm in a step on images that depend on the rank."""
    generator = torch.Generator().manual_seed(world.rank)
    side = job.model.image_size
    images = torch.randint(256, (SHARE, side, side, 3), dtype=torch.uint8, generator=generator)
    labels = torch.arange(SHARE)[:, None] % 10
    for start in range(0, SHARE, plan.micro_batch):
        some = slice(start, start + plan.micro_batch)

        def loss_of(model: nn.Module, x: torch.Tensor = images[some], y: torch.Tensor = labels[some]) -> torch.Tensor:
            return classification_loss(model(x), y, name=job.loss)

        engine.accumulate(loss_of)
    return float(engine.update(learning_rate=0.0).grad_norm)


def full_on_rank_1(world: World, fits: int, seen: list[tuple[int, int]]) -> FirstPass:
    """Rank 1's memory takes `fits` images, rank 0's any number."""

    def first_pass(_engine: Engine, plan: BatchPlan) -> None:
        seen.append((plan.micro_batch, bytes_in_use()))
        if world.rank == 1 and plan.micro_batch > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    return first_pass


def bytes_in_use() -> int:
    """Of all tensors that this process knows."""
    storages = [tensor.untyped_storage() for tensor in gc.get_objects() if isinstance(tensor, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def halved_until_it_fits(world: World, stage: int) -> tuple[list[int], list[int], float, float]:
    """Micro-batches tried, bytes in use at each try, and the gradient's norm in this plan and in the whole one."""
    job = job_of(stage)
    seen: list[tuple[int, int]] = []
    make = partial(build, job)
    engine, plan = engine_that_fits(
        whole(job), build=make, first_pass=full_on_rank_1(world, 4, seen), pairs=False, world=world, is_compiled=False
    )
    found = trained(job, engine, plan, world)
    reference = trained(job, build(job, whole(job)), whole(job), world)
    return [size for size, _ in seen], [num_bytes for _, num_bytes in seen], found, reference


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.long)])
def test_all_ranks_take_what_the_fullest_can(stage: int) -> None:
    for tried, in_use, found, reference in run_ranks(halved_until_it_fits, stage, num_ranks=NUM_RANKS):
        assert tried == [16, 8, 4]
        assert reference > 0
        assert in_use[2] == pytest.approx(in_use[0], rel=0.05), "an engine is freed before the next one is built"
        assert found == pytest.approx(reference, rel=1e-5), "the same batch"


def never_fits(world: World) -> str:
    job = job_of()
    try:
        engine_that_fits(
            whole(job),
            build=partial(build, job),
            first_pass=full_on_rank_1(world, 0, []),
            pairs=True,
            world=world,
            is_compiled=True,
        )
    except UserError as error:
        return str(error)
    return ""


def test_a_gpu_that_cannot_take_two_images_is_refused_on_all_ranks() -> None:
    first, second = run_ranks(never_fits, num_ranks=NUM_RANKS)
    assert "the GPU of another rank ran out of memory with a micro-batch of 2 images, the smallest; give" in first
    assert "the GPU of rank 1 ran out of memory" in second


def who_compiles_when(world: World, folder: str) -> list[str]:
    """What this rank finds in the cache of its host when it begins to compile. Local rank 0 takes the longest."""
    found = []

    def first_pass(_engine: Engine, plan: BatchPlan) -> None:
        found.extend(sorted(path.name for path in Path(folder).iterdir()))
        time.sleep(0.5 * (world.local_rank == 0))
        (Path(folder) / f"{world.rank}-{plan.micro_batch}").touch()

    job = job_of()
    engine_that_fits(
        whole(job), build=partial(build, job), first_pass=first_pass, pairs=False, world=world, is_compiled=True
    )
    return found


def test_local_rank_0_compiles_first_and_the_others_find_its_kernels(tmp_path: Path) -> None:
    first, second = run_ranks(who_compiles_when, str(tmp_path), num_ranks=NUM_RANKS)
    assert first == []
    assert second == ["0-16"]


def tried_alone(world: World, stage: int, recomputed: Recomputed) -> tuple[float, float]:
    """The gradient's norm in a step of two engines, of which rank 0 alone has tried the first."""
    job = job_of(stage, recomputed=recomputed)
    plan, norms = whole(job), []
    for is_tried in (True, False):
        engine = build(job, plan)
        if is_tried and world.rank == 0:
            stand_in = partial(stand_in_model, job, is_compiled=False, device=CPU)
            one_pass(job, engine, plan, stand_in=stand_in, held_bytes=10**6)
        norms.append(trained(job, engine, plan, world))
    return norms[0], norms[1]


@pytest.mark.parametrize(("stage", "recomputed"), [(1, "off"), (2, "full"), (3, "selective")])
def test_a_trial_waits_for_no_other_rank_and_leaves_no_trace(stage: int, recomputed: Recomputed) -> None:
    for found, reference in run_ranks(tried_alone, stage, recomputed, num_ranks=NUM_RANKS):
        assert found == reference > 0


def images_of_a_trial(_world: World) -> list[tuple[int, ...]]:
    """What a teacher is given in a trial, whose weights need no gradient."""
    job = replace(job_of(), teacher=TeacherConfig(weights="w", share=0.5))
    model, seen = build_model(job.model).eval().requires_grad_(False), list[tuple[int, ...]]()
    model.register_forward_hook(lambda _, given, __: seen.append(tuple(given[0].shape)))
    teacher = Teacher(model=model, config=job.model, columns=torch.arange(10), sha256="")
    plan = plan_batch(SHARE, micro_batch=SHARE // 4, num_ranks=1, lanes=1)
    stand_in = partial(stand_in_model, job, is_compiled=False, device=CPU)
    one_pass(job, build(job, plan), plan, stand_in=stand_in, held_bytes=0, teacher=teacher)
    return seen


def test_a_trial_holds_the_teachers_forward_pass() -> None:
    (seen,) = run_ranks(images_of_a_trial, num_ranks=1)
    assert seen == [(SHARE // 4, 32, 32, 3)]


def checked_beside(world: World, stage: int) -> tuple[float, float]:
    """The gradient's norm in a step of two engines; gradients are checked once the first is there."""
    job = job_of(stage)
    plan, norms = whole(job), []
    for is_checked in (True, False):
        engine = build(job, plan)
        if is_checked:
            check_gradients(job, replace(plan, micro_batch=SHARE // 2, accumulation=2), world)
        norms.append(trained(job, engine, plan, world))
    return norms[0], norms[1]


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_check_of_gradients_beside_an_engine_leaves_no_trace(stage: int) -> None:
    for found, reference in run_ranks(checked_beside, stage, num_ranks=NUM_RANKS):
        assert found == reference > 0
