"""The largest micro-batch that fits, or the plans near it that do, and the memory that there is for it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.recipes import pretrain
from pipeline.data.config import MixupConfig
from pipeline.planning.step_time import GPUS
from pipeline.ranks.host import available_bytes
from pipeline.training.fitting.fit import (
    Budget,
    budget_of,
    fitted,
    gpu_budget,
    halved,
    host_budget,
    least_recomputed,
    with_micro_batch,
    with_recomputed,
)
from pipeline.training.fitting.memory import Topology, memory_of
from pipeline.training.settings.job import TrainingJob
from pipeline.training.zero.batch_plan import BatchPlan, plan_batch
from shards.errors import UserError
from tests.rigs.processes import one_world


def recipe(name: str = "vit_h14_jft", **changed: Any) -> TrainingJob:
    job = pretrain.RECIPES[name]()
    return replace(job, model=replace(job.model, num_classes=18_291), **changed)


def whole(job: TrainingJob, num_ranks: int) -> BatchPlan:
    return plan_batch(
        job.global_batch, micro_batch=job.micro_batch, num_ranks=num_ranks, lanes=64, pairs=job.data.mixup.alpha > 0
    )


def budget(num_bytes: float) -> Budget:
    return Budget(total_bytes=int(num_bytes) + 10, reserve_bytes=10, where="a device")


@pytest.mark.parametrize(
    ("gpu", "num_ranks", "expected"),
    [
        pytest.param("h100", 8, (128, 4), id="512 images at once would take 172 GB of activations"),
        pytest.param("h100", 16, (128, 2), id="16 of 80 GB"),
        pytest.param("h100", 64, (64, 1), id="64 of 80 GB: the whole share"),
        pytest.param("a100-40", 8, (64, 8), id="8 of 40 GB"),
        pytest.param("a100-40", 16, (64, 4), id="16 of 40 GB"),
        pytest.param("a100-40", 64, (64, 1), id="64 of 40 GB"),
        pytest.param("h200", 8, (256, 2), id="8 of 141 GB"),
        pytest.param("h200", 16, (256, 1), id="16 of 141 GB"),
        pytest.param("h200", 64, (64, 1), id="64 of 141 GB"),
    ],
)
def test_vit_h14_starts_without_a_flag(gpu: str, num_ranks: int, expected: tuple[int, int]) -> None:
    job = recipe()
    fit = fitted(job, whole(job, num_ranks), gpu_budget(GPUS[gpu].memory_bytes, where=gpu), is_on_gpu=True)
    assert (fit.plan.micro_batch, fit.plan.accumulation) == expected
    assert fit.memory.peak <= gpu_budget(GPUS[gpu].memory_bytes, where=gpu).bytes


@settings(max_examples=30)
@given(gigabytes=st.integers(5, 200), ranks=st.sampled_from([1, 8, 32]), alpha=st.sampled_from([0.0, 0.2]))
def test_no_larger_one_fits_and_the_batch_stays(gigabytes: int, ranks: int, alpha: float) -> None:
    job = recipe("vit_l16_jft")
    job = replace(job, data=replace(job.data, mixup=MixupConfig(alpha=alpha)))
    plan, has = whole(job, ranks), budget(gigabytes * 1e9)

    def peak(size: int) -> int:
        return memory_of(job, Topology(num_ranks=ranks, is_on_gpu=True), micro_batch=size).peak

    sizes = [size for size in range(1, plan.rank_batch + 1) if plan.rank_batch % size == 0 and not (alpha and size % 2)]
    fitting = [size for size in sizes if peak(size) <= has.bytes]
    if not fitting:
        with pytest.raises(UserError):
            fitted(job, plan, has, is_on_gpu=True)
        return
    fit = fitted(job, plan, has, is_on_gpu=True)
    assert fit.plan.micro_batch == max(fitting)
    assert fit.plan.micro_batch * fit.plan.accumulation * ranks == job.global_batch
    assert fit.memory.peak == peak(fit.plan.micro_batch)


@pytest.mark.parametrize(
    ("recorded", "has", "expected", "reason"),
    [
        pytest.param(32, 76e9, 32, "as in the checkpoint", id="kept although more would fit: the same bits"),
        pytest.param(128, 76e9, 128, "as in the checkpoint", id="kept"),
        pytest.param(512, 250e9, 512, "", id="the whole share, again"),
        pytest.param(256, 76e9, 128, "256 does not fit here: results are equal to rounding", id="does not fit"),
        pytest.param(100, 76e9, 128, "100 does not fit here", id="not a divisor any more"),
        pytest.param(None, 76e9, 128, "", id="no checkpoint, or of other ranks"),
    ],
)
def test_a_checkpoints_micro_batch_is_kept_if_it_fits(
    recorded: int | None, has: float, expected: int, reason: str
) -> None:
    job = recipe()
    fit = fitted(job, whole(job, 8), budget(has), is_on_gpu=True, recorded=recorded)
    assert fit.plan.micro_batch == expected
    assert reason in fit.reason
    assert fit.is_warning == ("rounding" in fit.reason)
    assert bool(reason) == bool(fit.reason)


def test_the_jobs_own_micro_batch_is_taken_and_doubted() -> None:
    job = recipe(micro_batch=256)
    fit = fitted(job, whole(job, 8), budget(76e9), is_on_gpu=True, recorded=64)
    assert (fit.plan.micro_batch, fit.is_warning) == (256, True)
    assert "although only 76.0 GB are free for it; --micro-batch 0 takes what fits" in fit.reason
    assert not fitted(job, whole(job, 8), budget(100e9), is_on_gpu=True).is_warning


def recorded(how: str, micro_batch: int, num_ranks: int = 8) -> dict[str, Any]:
    engine = {"activation_checkpointing": how, "micro_batch": micro_batch}
    return {"topology": {"num_ranks": num_ranks}, "engine": engine}


@pytest.mark.parametrize(
    ("name", "micro_batch", "has", "record", "expected"),
    [
        pytest.param("vit_h14_jft", 0, 76.1, {}, "off", id="smaller micro-batches cost less than recomputation"),
        pytest.param("vit_h14_jft", 128, 76.1, {}, "off", id="the job's own micro-batch fits"),
        pytest.param("vit_h14_jft", 256, 76.1, {}, "selective", id="256 images in the 80 GB of an H100"),
        pytest.param("vit_h14_jft", 512, 76.1, {}, "full", id="512 images keep 108 GB with selective"),
        pytest.param("vit_h14_jft", 512, 9.0, {}, "full", id="nothing fits: as little as possible"),
        pytest.param("vit_h14_jft", 0, 135.3, recorded("selective", 256), "selective", id="a resumed run keeps it"),
        pytest.param("vit_h14_jft", 0, 76.1, recorded("off", 256), "selective", id="its micro-batch is kept"),
        pytest.param("vit_h14_jft", 0, 20.0, recorded("off", 256), "full", id="even by full recomputation"),
        pytest.param("vit_h14_jft", 0, 76.1, recorded("off", 256, 4), "off", id="other ranks: no micro-batch to keep"),
        pytest.param("vit_h14_jft", 256, 135.3, recorded("full", 256), "full", id="a resumed run keeps full, too"),
        pytest.param("vit_h14_jft", 0, 76.1, {"engine": {"activation_checkpointing": True}}, "off", id="unusable"),
        pytest.param("bit_r152x2_jft", 512, 76.1, {}, "full", id="BiT has no selective recomputation"),
    ],
)
def test_auto_recomputes_as_little_as_fits(
    name: str, micro_batch: int, has: float, record: dict[str, Any], expected: str
) -> None:
    job = with_auto(recipe(name, micro_batch=micro_batch))
    found = least_recomputed(job, whole(job, 8), budget(has * 1e9), is_on_gpu=True, record=record)
    assert found == expected
    if expected == "selective":
        fused = replace(job, engine=replace(job.engine, fused_mlp=True))
        assert least_recomputed(fused, whole(job, 8), budget(has * 1e9), is_on_gpu=True, record=record) != "selective"
    asked = with_recomputed(job, "off")
    assert least_recomputed(asked, whole(job, 8), budget(1), is_on_gpu=True, record=record) == "off", "as the job says"


@pytest.mark.parametrize(
    ("pixels", "has", "is_on_gpu", "record", "expected"),
    [
        pytest.param(1022, 21.2, True, {}, "selective", id="2 images of 5,330 tokens instead of 1"),
        pytest.param(1022, 21.2, False, {}, "off", id="a CPU gains nothing by larger passes"),
        pytest.param(1022, 21.2, True, recorded("off", 1), "off", id="a resumed run keeps it"),
        pytest.param(1022, 21.2, True, recorded("off", 1, 4), "off", id="even with other ranks"),
        pytest.param(1022, 48, True, {}, "off", id="4 images are enough"),
        pytest.param(518, 60, True, {}, "off", id="16 images at 518 px are enough"),
    ],
)
def test_auto_recomputes_where_passes_are_too_small_for_a_gpu(
    pixels: int, has: float, is_on_gpu: bool, record: dict[str, Any], expected: str
) -> None:
    job = with_auto(recipe())
    job = replace(job, model=replace(job.model, image_size=pixels))
    plan, memory = whole(job, 8), budget(has * 1e9)
    found = least_recomputed(job, plan, memory, is_on_gpu=is_on_gpu, record=record)
    assert found == expected
    sizes = {
        how: fitted(with_recomputed(job, how), plan, memory, is_on_gpu=is_on_gpu).plan.micro_batch
        for how in ("off", "selective")
    }
    assert sizes["selective"] > sizes["off"]


def test_a_frozen_backbone_is_never_recomputed() -> None:
    """Not even if nothing fits: a job with both is refused."""
    job = with_auto(recipe())
    job = replace(job, optimizer=replace(job.optimizer, freeze_backbone=True))
    for has in (76e9, 1e9):
        assert least_recomputed(job, whole(job, 8), budget(has), is_on_gpu=True) == "off"
    with pytest.raises(UserError, match=r"needs .* on each of 8 ranks"):
        fitted(with_recomputed(job, "off"), whole(job, 8), budget(1e9), is_on_gpu=True)


def with_auto(job: TrainingJob) -> TrainingJob:
    return replace(job, engine=replace(job.engine, activation_checkpointing="auto"))


def test_a_host_has_no_more_memory_for_more_ranks() -> None:
    job = recipe(ema_decay=0.9)
    job = replace(job, engine=replace(job.engine, zero_stage=2, activation_checkpointing="full"))
    with pytest.raises(UserError, match=r"these plans fit: .*16 ranks on 2 times as many hosts"):
        fitted(job, whole(job, 8), budget(3e9), is_on_gpu=False)
    with pytest.raises(UserError, match="take hosts with more memory, or fewer ranks on each, or a smaller model"):
        fitted(job, whole(job, 8), budget(1e9), is_on_gpu=False)


@pytest.mark.parametrize(
    ("share", "micro", "pairs", "expected"),
    [
        (64, 64, False, 32),
        (12, 4, True, 2),
        (9, 9, False, 3),
        (2, 2, True, None),
        (1, 1, False, None),
    ],
)
def test_halving(share: int, micro: int, pairs: bool, expected: int | None) -> None:
    plan = with_micro_batch(BatchPlan(global_batch=share, micro_batch=share, accumulation=1, num_ranks=1), micro)
    smaller = halved(plan, pairs=pairs)
    assert (smaller and smaller.micro_batch) == expected
    assert smaller is None or smaller.rank_batch == share


def test_ranks_share_what_reading_ahead_leaves() -> None:
    one = budget_of(one_world(), read_ahead_bytes=1_000_000_000)
    two = budget_of(replace(one_world(0, 2)), read_ahead_bytes=1_000_000_000)
    assert one.total_bytes == pytest.approx(2 * two.total_bytes, rel=0.3), "other processes come and go"
    assert one.total_bytes < available_bytes() - 500_000_000


def test_reserves() -> None:
    host = host_budget(21_000_000_000, num_local_ranks=2)
    assert (host.total_bytes, host.reserve_bytes, host.bytes) == (10_500_000_000, 1_025_000_000, 9_475_000_000)
    assert host_budget(-5, num_local_ranks=2).bytes == 0
    h100 = gpu_budget(85_000_000_000, where="H100")
    assert (h100.reserve_bytes, h100.bytes) == (8_800_000_000, 76_200_000_000)
