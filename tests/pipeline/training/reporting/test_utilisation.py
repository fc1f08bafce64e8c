"""What a step costs: its operations are those that PyTorch counts, peaks the device's, slow ranks are named once."""

import mmap
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from jobs.recipes.pretrain import digits_smoke
from pipeline.models import unfilled_model
from pipeline.models.config import ModelConfig
from pipeline.planning.step_time import flops_at
from pipeline.training.gradients import drawn_patch
from pipeline.training.reporting.utilisation import (
    NUM_WINDOWS,
    SLOW_FACTOR,
    SLOW_SECONDS,
    RankTimes,
    SlowRanks,
    Utilisation,
    measured_peak,
    memory,
    mfu,
    nominal_peak,
)
from pipeline.training.settings.job import OptimizerConfig, TrainingJob
from pipeline.training.settings.tokens import TokensConfig
from pipeline.training.zero.optimizer import freeze
from pipeline.training.zero.step_times import StepTimes
from tests.rigs.processes import one_world

BASE = digits_smoke()
JOB = replace(
    BASE, model=replace(BASE.model, num_classes=10), engine=replace(BASE.engine, precision="fp32"), global_batch=64
)
CPU = torch.device("cpu")
TI4 = ModelConfig(name="vit", image_size=32, patch=4, width=192, depth=12, mlp_width=768, num_heads=3, num_classes=1000)
SLOW = SLOW_FACTOR * 1.01
EVEN, WINDOW = [1.0, 1.0, 1.0, 1.0], SLOW_SECONDS / NUM_WINDOWS


def test_values_of_a_line() -> None:
    times = StepTimes()
    utilisation = Utilisation(JOB, replace(one_world(), num_ranks=2), times)
    assert utilisation.values(0.5, step=1).keys() == {"memory/resident_bytes"}, (
        "no step has ended, and a CPU has no peak"
    )
    utilisation.measured_peak = 1e12
    times.begins()
    times.begins()
    found = utilisation.values(0.5, step=1)
    assert found["perf/mfu_of_measured_peak"] == pytest.approx(
        flops_at(JOB, 0) * 64 / (0.5 * 2 * utilisation.measured_peak)
    )
    assert found["time/step"] > 0


def test_operations_of_a_line_are_of_the_patch_sizes_that_its_steps_drew() -> None:
    sizes = (4, 8, 16)
    job = replace(JOB, tokens=TokensConfig(patch_sizes=sizes), log_every_steps=3)
    drawn = [drawn_patch(step, seed=job.seed, patch_sizes=sizes) for step in range(9)]
    assert len(set(drawn)) > 1
    utilisation = Utilisation(job, one_world(), StepTimes())
    utilisation.nominal_peak = 1e12
    for first in (0, 3, 6):
        steps = [flops_at(job, step, patch=drawn[step]) for step in range(first, first + 3)]
        found = utilisation.values(1.0, step=first + 3)["perf/mfu"]
        assert found == pytest.approx(sum(steps) / 3 * job.global_batch / 1e12, rel=1e-6)


def test_a_known_nominal_peak_comes_first() -> None:
    utilisation = Utilisation(JOB, one_world(), StepTimes())
    assert utilisation.words(1.0, step=1) == "", "a CPU has no peak"
    utilisation.measured_peak = flops_at(JOB, 0) * 64 / 0.8
    assert utilisation.words(1.0, step=1) == "80 % of peak"
    utilisation.nominal_peak = flops_at(JOB, 0) * 64 / 0.4
    assert utilisation.words(1.0, step=1) == "MFU 40 %"
    assert utilisation.values(1.0, step=1)["perf/mfu"] == pytest.approx(0.4)


def test_resident_memory_grows_with_what_is_held() -> None:
    before = memory(torch.device("cpu"))["memory/resident_bytes"]
    with mmap.mmap(-1, 256 << 20) as held:  # new pages, whatever the allocator has left over
        held[:] = bytes(len(held))
        assert memory(torch.device("cpu"))["memory/resident_bytes"] - before > 0.9 * len(held)


def test_memory_of_a_gpu_is_the_most_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 4)
    assert memory(torch.device("cuda")) == {"memory/allocated_peak_bytes": 3.0, "memory/reserved_peak_bytes": 4.0}


def counted(job: TrainingJob) -> int:
    """PyTorch's own count of the forward and backward pass of one image, on meta: no memory, no time. With attention as
    products of matrices: fused kernels compute some of it again, which is not the model's need."""
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
    assert flops_at(job, 0) == pytest.approx(counted(job), rel=0.01)


def test_recomputation_does_not_count() -> None:
    job = replace(digits_smoke(), model=TI4)
    again = replace(job, engine=replace(job.engine, activation_checkpointing="full"))
    assert flops_at(again, 0) == flops_at(job, 0)


def test_mfu_by_hand() -> None:
    """4 GPUs of 1e15 operations per second do 8e14 of them in half a second: 8e14 / (0.5 x 4 x 1e15)."""
    assert mfu(image_flops=2 * 10**11, global_batch=4000, step_seconds=0.5, num_ranks=4, peak=1e15) == 0.4


def test_a_cpu_has_no_peak() -> None:
    assert (nominal_peak(CPU, "bf16"), measured_peak(CPU, "fp32")) == (0.0, 0.0)


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


class Told(StepTimes):
    """Steps with known times."""

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self._told = seconds

    def since_exchange(self) -> tuple[float, float, float]:
        wait, own, stall = self._told
        return wait, own, stall


def test_the_longest_of_each_kind_has_its_rank() -> None:
    told = [(0.1, 1.0, 0.0), (0.3, 1.2, 0.5), (0.2, 4.0, 0.0)]
    ranks = [RankTimes(Told(*own), replace(one_world(rank, 3), num_ranks=3), every=10) for rank, own in enumerate(told)]
    rows = [one.row() for one in ranks]
    assert [sum(value > 0 for value in row) for row in rows] == [2, 3, 2], "each fills its own places"
    sums = dict(zip(ranks[0].names, map(sum, zip(*rows, strict=True)), strict=True))
    assert ranks[2].values(sums) == {
        "ranks/data_wait": 0.3,
        "ranks/data_wait_rank": 1.0,
        "ranks/own_step": 4.0,
        "ranks/own_step_rank": 2.0,
        "ranks/own_step_median": 1.2,
        "ranks/checkpoint": 0.5,
        "ranks/checkpoint_rank": 1.0,
    }
    assert ranks[0].of("own_step", sums) == [1.0, 1.2, 4.0]
    assert [step for step in range(1, 31) if ranks[0].is_due(step)] == [10, 20, 30]
    assert ranks[0].values(dict.fromkeys(sums, 0.0)) == {}, "no step has ended"


def test_a_rank_that_is_alone_has_none() -> None:
    assert not RankTimes(StepTimes(), one_world(), every=1).is_due(1)


@pytest.mark.parametrize(
    ("windows", "expected"),  # own seconds of four ranks in windows of two lines
    [
        pytest.param([[1, 1, 1, SLOW]] * 12, {4: [3]}, id="once, after the time"),
        pytest.param([[1, 1, 1, 0.99 * SLOW_FACTOR]] * 12, {}, id="not more than the factor"),
        pytest.param([[1, 1, 1, SLOW]] * 4 + [EVEN] + [[1, 1, 1, SLOW]] * 4, {}, id="not for long"),
        pytest.param([[1, SLOW, 1, 9]] * 6, {4: [1, 3]}, id="two at once"),
        pytest.param([[1, 1, 1, 9]] * 6 + [[9, 1, 1, 1]] * 6, {4: [3], 10: [0]}, id="one after another"),
        pytest.param([[1, 1, 1, 900], *[EVEN] * 9], {}, id="one long step"),
        pytest.param([[0, 0, 0, 9]] * 9, {}, id="others of whom nothing is known"),
    ],
)
def test_slow_ranks_are_named_once(windows: list[list[float]], expected: dict[int, list[int]]) -> None:
    slow, found = SlowRanks(), {}
    for number, own in enumerate(windows):
        begin = 100 + number * 1.5 * WINDOW
        assert slow.newly_slow([0.9 * seconds for seconds in own], at=begin) == [], "a window lasts a while"
        if named := slow.newly_slow([1.1 * seconds for seconds in own], at=begin + WINDOW):
            found[number] = [one.rank for one in named]
            assert all(one.own_seconds == pytest.approx(own[one.rank]) for one in named)
            assert all(one.times == pytest.approx(own[one.rank]) for one in named), "the median is 1"
    assert found == expected
