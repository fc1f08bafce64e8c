"""MFU: the operations are those that PyTorch counts, and the peaks are those of the device."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from jobs.recipes.pretrain import digits_smoke
from pipeline.models import unfilled_model
from pipeline.models.config import ModelConfig
from pipeline.training.reporting.utilisation import measured_peak, mfu, nominal_peak, train_flops
from pipeline.training.settings.job import OptimizerConfig, TrainingJob
from pipeline.training.zero.optimizer import freeze

CPU = torch.device("cpu")
TI4 = ModelConfig(name="vit", image_size=32, patch=4, width=192, depth=12, mlp_width=768, num_heads=3, num_classes=1000)


def counted(job: TrainingJob) -> int:
    """PyTorch's own count of the forward and backward pass of one image, on meta: no memory, no time. With attention
    as products of matrices: fused kernels compute some of it again, which is not the model's need."""
    with torch.device("meta"):
        model = unfilled_model(job.model).train()
        images = torch.empty(1, job.model.image_size, job.model.image_size, 3, dtype=torch.uint8)
    freeze(model, job.optimizer)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        torch.autograd.backward(model(images).sum())
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    ("model", "frozen"),
    [
        (TI4, False),
        (ModelConfig(name="vit_b16", image_size=224, num_classes=1000), False),
        (ModelConfig(name="vit_b32", image_size=384, num_classes=1000), False),
        (ModelConfig(name="vit_l16", image_size=224, num_classes=18_291, representation=True), False),
        (ModelConfig(name="vit_h14", image_size=224, num_classes=18_291), False),
        (ModelConfig(name="r50_vit_b16", image_size=224, num_classes=1000), False),
        (TI4, True),
        (ModelConfig(name="vit_b16", image_size=384, num_classes=100), True),
    ],
    ids=lambda value: value.name if isinstance(value, ModelConfig) else str(value),
)
def test_operations_are_those_that_pytorch_counts(model: ModelConfig, frozen: bool) -> None:
    job = replace(digits_smoke(), model=model, optimizer=OptimizerConfig(freeze_backbone=frozen))
    assert train_flops(job) == pytest.approx(counted(job), rel=0.01)


def test_recomputation_does_not_count() -> None:
    job = replace(digits_smoke(), model=TI4)
    again = replace(job, engine=replace(job.engine, activation_checkpointing=True))
    assert train_flops(again) == train_flops(job)


def test_mfu_by_hand() -> None:
    """4 GPUs of 1e15 operations per second do 8e14 of them in half a second: 8e14 / (0.5 x 4 x 1e15)."""
    assert mfu(image_flops=2 * 10**11, global_batch=4000, step_seconds=0.5, num_ranks=4, peak=1e15) == 0.4


def test_a_cpu_has_a_measured_peak_only() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert nominal_peak(CPU, "bf16") == 0.0
    assert 1e8 < measured_peak(CPU, "fp32") < 1e14
    assert torch.equal(torch.get_rng_state(), before), "a run's numbers stay the same"


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "fp32", 0.0),  # the table has bf16 alone
        ("NVIDIA H100 PCIe", "bf16", 0.0),  # slower than the table's
    ],
)
def test_the_nominal_peak_is_that_of_the_table(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str, peak: float
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert nominal_peak(torch.device("cuda", 0), precision) == peak
