"""What runs cost and would reach on GPUs, compared with numbers worked out by hand and with the paper's Table 6."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from jobs.recipes import finetune, paper_images, pretrain
from jobs.settings.runs import GPU_NAMES
from pipeline.planning.forecast import Forecast, cost_of, forecast
from pipeline.planning.rates import Rates
from pipeline.planning.step_time import GPUS, gpu_named, gpu_of_device
from shards.errors import UserError
from tests.rigs.faults import differs, every_fault

JFT = paper_images.JFT
JFT_MODEL: dict[str, Any] = {"num_images": paper_images.JFT.num_images, "num_classes": paper_images.JFT.num_classes}


def forecast_of(
    name: str = "vit_h14_jft", *, engine: Any = None, optimizer: Any = None, micro_batch: int = 0, **changed: Any
) -> Forecast:
    job = replace({**pretrain.RECIPES, **finetune.RECIPES}[name](), micro_batch=micro_batch)
    job = replace(job, engine=replace(job.engine, **(engine or {})), optimizer=optimizer or job.optimizer)
    cost = cost_of(job, num_images=JFT.num_images, num_classes=JFT.num_classes, days=7)
    values: dict[str, Any] = {"gpu": "h100", "num_gpus": 64, "rates": Rates(mfu=0.5), "num_classes": JFT.num_classes}
    return forecast(job, cost, **(values | changed))


def test_vit_h14_on_64_h100() -> None:
    found = forecast_of()
    assert (found.fit.plan.micro_batch, found.fit.plan.accumulation, found.fit.plan.num_ranks) == (64, 1, 64)
    assert found.step.compute == pytest.approx(64 * 1.0039 / (0.5 * 989), rel=1e-3)
    assert found.images_per_second == pytest.approx(4096 / found.step.seconds)
    assert found.days == pytest.approx(1_035_645 * found.step.seconds / 86_400, rel=1e-3)
    assert found.mfu_reached == pytest.approx(1.0039 * found.images_per_second / (989 * 64), rel=1e-3)
    assert found.checkpoint_bytes == pytest.approx(12 * 655_835_251, rel=1e-6)
    assert found.stall_seconds == pytest.approx(12 * 655_835_251 / 64 / 20e9, rel=1e-6)


def test_checkpointing_costs_a_forward_pass() -> None:
    recomputed = forecast_of(engine={"activation_checkpointing": "full"})
    assert recomputed.step.compute / forecast_of().step.compute == pytest.approx(4 / 3)
    assert recomputed.fit.memory.activations < forecast_of().fit.memory.activations
    assert recomputed.mfu_reached == pytest.approx(0.75 * recomputed.hfu), "not all are the model's own operations"
    assert recomputed.mfu_reached == pytest.approx(1.0039 * recomputed.images_per_second / (989 * 64), rel=1e-3)


def test_the_choices_of_recomputation_are_planned_beside_each_other() -> None:
    """256 images of ViT-H/14 fit the 80 GB of an H100 if norms and GELUs are recomputed."""
    found = forecast_of(num_gpus=16, engine={"activation_checkpointing": "auto"}, micro_batch=256)
    assert (found.recomputed, found.fit.plan.micro_batch, found.fit.is_warning) == ("selective", 256, False)
    assert {how: share for how, (_, share) in found.choices.items()} == {"off": 1, "selective": 1, "full": 4 / 3}
    off, selective, full = (num_bytes for num_bytes, _ in found.choices.values())
    assert off / selective == pytest.approx(339 / 212, rel=0.05)
    assert full < selective / 5
    assert found.fit.memory.activations == selective
    assert found.mfu_reached == found.hfu
    assert found.fit.memory.peak < 60e9 < found.budget.bytes


def test_a_frozen_backbone_is_faster_smaller_and_never_recomputed() -> None:
    frozen = replace(pretrain.RECIPES["vit_h14_jft"]().optimizer, freeze_backbone=True)
    found = forecast_of(optimizer=frozen)
    recomputed = forecast_of(optimizer=frozen, engine={"activation_checkpointing": "auto"})
    assert found.images_per_second == recomputed.images_per_second > 2.7 * forecast_of().images_per_second
    assert found.fit.memory.moments < 0.05 * forecast_of().fit.memory.moments


@every_fault
def test_every_recipe_fits_eight_gpus_of_80_gb() -> Iterator[str]:
    for name, recipe in {**pretrain.RECIPES, **finetune.RECIPES}.items():
        global_batch = recipe().global_batch
        num_gpus = 8 if global_batch % 8 == 0 else 1
        try:
            found = forecast_of(name, num_gpus=num_gpus, num_classes=0)
        except UserError as error:
            yield f"{name} does not fit {num_gpus} GPUs: {error}"
            continue
        if found.fit.memory.peak > found.budget.bytes:
            yield f"{name} takes {found.fit.memory.peak:,} bytes of a GPU; there are {found.budget.bytes:,}"
        images = found.fit.plan.micro_batch * found.fit.plan.accumulation * num_gpus
        yield from differs(f"the plan's global batch of {name}", images, global_batch)


def test_the_tables_gpus_are_those_of_the_help() -> None:
    assert set(GPUS) == set(GPU_NAMES) == {"a100", "a100-40", "h100", "h200", "b200", "l40s", "rtx4090"}


def test_a_gpu_is_found_in_any_case_of_letters() -> None:
    assert gpu_named("H100") is GPUS["h100"]
    assert 84e9 < gpu_named("h100").memory_bytes < 86e9


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 PCIe", ""),
        ("NVIDIA H200 NVL", ""),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", ""),
        ("Tesla V100-SXM2-16GB", ""),
    ],
)
def test_a_device_is_found_by_the_name_that_cuda_gives_it(name: str, found: str) -> None:
    assert gpu_of_device(name) is GPUS.get(found)


@pytest.mark.parametrize(
    ("name", "exaflops"),
    [
        ("vit_h14_jft", 4262),
        ("vit_l16_jft", 1567),
        ("vit_l16_jft_7ep", 783),
        ("vit_b16_jft", 224),
        ("vit_l32_jft", 196),
    ],
)
def test_the_papers_table_6(name: str, exaflops: int) -> None:
    cost = cost_of(pretrain.RECIPES[name](), **JFT_MODEL, days=7)
    assert cost.total_exaflops == pytest.approx(exaflops, rel=2.1e-3)


def test_vit_h14_on_jft() -> None:
    cost = cost_of(pretrain.RECIPES["vit_h14_jft"](), **JFT_MODEL, days=10)
    assert cost.num_parameters == 655_835_251
    assert cost.num_head_parameters == 655_835_251 - 630_764_800
    assert cost.train_flops == 3 * cost.forward_flops
    assert cost.num_images_seen == cost.num_steps * 4096 == 1_035_645 * 4096
    assert cost.num_epochs == pytest.approx(14, abs=1e-5)
    assert cost.images_per_second == pytest.approx(cost.num_images_seen / 864_000)
    assert cost.teraflops_per_second * 864_000 / 1e6 == pytest.approx(cost.total_exaflops)


def test_the_jobs_own_classes_win() -> None:
    job = finetune.RECIPES["imagenet_518_h14"]()
    assert cost_of(job, num_images=0, num_classes=1000, days=1).num_parameters == 633_470_440
    own = replace(job, model=replace(job.model, num_classes=1000))
    assert cost_of(own, num_images=0, num_classes=7, days=1).num_parameters == 633_470_440


@pytest.mark.parametrize("name", ["vit_b16_jft", "r50_vit_b16_jft", "bit_r50x1_jft"])
def test_what_is_not_known_is_left_out(name: str) -> None:
    cost = cost_of(pretrain.RECIPES[name](), num_images=0, num_classes=0, days=1)
    assert (cost.num_epochs, cost.num_head_parameters) == (None, 0)
    assert cost.num_parameters < cost_of(pretrain.RECIPES[name](), **JFT_MODEL, days=1).num_parameters
