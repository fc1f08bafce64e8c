"""The parts of a step on many GPUs, compared with numbers worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest

from jobs.recipes.paper_jft import vit_h14_jft
from pipeline.models import ModelConfig
from pipeline.planning.step_time import (
    EIGHT_A_NODE,
    ENGINE_SECONDS,
    GPUS,
    LAUNCH_SECONDS,
    ZERO3_ENGINE_SECONDS,
    ZERO3_RANK_SECONDS,
    Network,
    Speed,
    StepTime,
    flops_at,
    flops_of_steps,
    host_seconds,
    step_time,
)
from pipeline.training.settings.job import EngineConfig, OptimizerConfig, TrainingJob
from pipeline.training.settings.schedule import ScheduleConfig
from pipeline.training.settings.tokens import TokensConfig
from pipeline.training.zero.batch_plan import plan_batch

FLOPS = 1.0039e12  # of an image of ViT-H/14
NUMBER = 655_835_251  # of its weights, with the head of JFT


def job_of(**engine: Any) -> TrainingJob:
    job = vit_h14_jft()
    return replace(job, model=replace(job.model, num_classes=18_291), engine=replace(job.engine, **engine))


def step_on(num_gpus: int, *, micro_batch: int = 0, network: Network = EIGHT_A_NODE, **engine: Any) -> StepTime:
    job = job_of(**engine)
    plan = plan_batch(job.global_batch, micro_batch=micro_batch, num_ranks=num_gpus, lanes=512)
    return step_time(job, plan, gpu=GPUS["h100"], network=network, train_flops=FLOPS, speed=Speed(mfu=0.28))


def test_one_gpu_exchanges_nothing() -> None:
    found = step_on(1)
    assert found.communication == 0
    assert found.compute == pytest.approx(4096 * FLOPS / (0.28 * 989e12))
    assert found.compute_share == pytest.approx(1, abs=0.001)


def test_sums_of_gradients_and_gathered_weights_cross_the_bus() -> None:
    on_a_node = (7 / 8) * (2 * 4 + 2) * NUMBER / 476e9
    assert step_on(8).communication == pytest.approx(on_a_node, rel=0.1), "and latency"
    across = (511 / 512) * (2 * 4 + 2) * NUMBER / (0.92 * 400e9)
    # The latencies: sums in 17 buckets, of two blocks each, and a gather for each group of parameters, with and without
    # weight decay.
    assert step_on(512).communication == pytest.approx(across + (17 + 2) * 2 * 9 * 10e-6, rel=1e-4)
    slow = step_on(512, network=Network(gbits=200))
    assert slow.communication == pytest.approx(16 * across, rel=0.02)
    assert slow.compute == step_on(512).compute


def test_sam_computes_launches_and_exchanges_twice() -> None:
    job = job_of()
    both = replace(job, optimizer=replace(job.optimizer, sam_rho=0.2))
    assert (flops_at(both, 0), flops_of_steps(both, 7)) == (2 * flops_at(job, 0), 2 * flops_of_steps(job, 7))
    plan = plan_batch(job.global_batch, micro_batch=1, num_ranks=512, lanes=512)
    once, twice = (
        step_time(
            each, plan, gpu=GPUS["h100"], network=EIGHT_A_NODE, train_flops=flops_at(each, 0), speed=Speed(mfu=1.0)
        )
        for each in (job, both)
    )
    assert once.host > 0, "a pass of one image is over before the next one is launched"
    assert twice.compute == pytest.approx(2 * once.compute)
    assert twice.host == pytest.approx(2 * once.host)
    assert twice.communication == pytest.approx(2 * once.communication)


def test_sums_in_bf16_are_half_as_long() -> None:
    assert step_on(512, reduce_precision="bf16").communication < 0.7 * step_on(512).communication


def test_stage_2_sums_after_each_micro_batch() -> None:
    once, each = step_on(64, micro_batch=16), step_on(64, micro_batch=16, zero_stage=2)
    assert each.communication > 3 * once.communication
    assert step_on(64, zero_stage=2).communication == step_on(64).communication


def test_stage_3_gathers_a_block_at_a_time_in_both_passes() -> None:
    modules = 32 + 5  # blocks, and the embedding, its patches, the last norm, the representation layer and the head
    once = (511 / 512) * (4 + 2 * 2) * NUMBER / (0.92 * 400e9)
    expected = once + (17 + 2 * modules) * 2 * 9 * 10e-6
    assert step_on(512, zero_stage=3).communication == pytest.approx(expected, rel=1e-4)


def test_the_host_takes_time_for_weights_and_for_the_tensors_that_deepspeed_sees() -> None:
    passes, seen = 394 * LAUNCH_SECONDS, 2 * 32 + 10  # two flat tensors of each block, and what is outside of them
    assert host_seconds(job_of(), num_ranks=512) == pytest.approx(passes + seen * ENGINE_SECONDS)
    third = host_seconds(job_of(zero_stage=3), num_ranks=512)
    assert third == pytest.approx(passes + seen * (ZERO3_ENGINE_SECONDS + 512 * ZERO3_RANK_SECONDS))
    frozen = replace(job_of(), optimizer=OptimizerConfig(name="sgd", freeze_backbone=True))
    assert host_seconds(frozen, num_ranks=512) == pytest.approx(passes + 4 * ENGINE_SECONDS), "those of the head"


def test_the_gpu_waits_for_the_host_when_its_share_is_small() -> None:
    assert step_on(8).host == 0, "the launches are hidden behind the operations"
    found = step_on(512)
    assert found.host == pytest.approx(host_seconds(job_of(), num_ranks=512) - found.compute)
    assert found.seconds == found.compute + found.host + found.communication


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param(TokensConfig(patch_sizes=(8, 24, 48)), id="patches that are drawn"),
        pytest.param(TokensConfig(image_sizes=(48,), size_steps=(30,)), id="small images first"),
        pytest.param(TokensConfig(image_sizes=(48,), size_steps=(30,), patch_sizes=(8, 24, 48)), id="both"),
    ],
)
def test_each_kind_of_step_waits_for_the_host_on_its_own(tokens: TokensConfig) -> None:
    """Large patches leave the GPU waiting, although a step of the mean size would not."""
    sizes = [(30, 48), (10, 240)] if tokens.image_sizes else [(40, 240)]
    alone = TrainingJob(
        model=ModelConfig(name="vit_b16", image_size=240, patch=8),
        steps=40,
        global_batch=64,
        schedule=ScheduleConfig(warmup_steps=0),
        engine=EngineConfig(precision="bf16"),
    )
    plan = plan_batch(64, micro_batch=32, num_ranks=1, lanes=64)

    def step_of(job: TrainingJob) -> StepTime:
        flops, speed = flops_of_steps(job, job.steps) / job.steps, Speed(mfu=0.28)
        return step_time(job, plan, gpu=GPUS["h100"], network=EIGHT_A_NODE, train_flops=flops, speed=speed)

    waits = []
    for num_steps, size in sizes:
        patches = tokens.patch_sizes or (8,)
        of_sizes = [replace(alone, model=replace(alone.model, image_size=size, patch=patch)) for patch in patches]
        waits += num_steps * [sum(step_of(job).host for job in of_sizes) / len(of_sizes)]
    found = step_of(replace(alone, tokens=tokens))
    assert found.host == pytest.approx(sum(waits) / 40)
    assert found.host > step_of(alone).host


def test_stage_3_is_slower_on_many_ranks() -> None:
    assert step_on(512, zero_stage=3).compute_share < step_on(512).compute_share
