"""What a step costs: the parts of its time, MFU and memory, for rank 0's lines of metrics.

Model FLOP utilisation is the number of operations that a step's model needs, relative to what the devices could do, as
in PaLM (Chowdhery et al., 2022, appendix B): a block that is computed again in the backward pass counts once. There are
two peaks: the data sheet's, which is known for some GPUs in bf16, and what a product of matrices reaches on this device
in the precision of the run.
"""

import resource
import time
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch

from pipeline.models.flops import FORWARD_AND_BACKWARD, forward_flops, skipped_flops
from pipeline.planning.gpus import gpu_of_device
from pipeline.ranks.world import World
from pipeline.training.settings.job import TrainingJob
from pipeline.training.zero.step_times import StepTimes

_SIDE_ON_GPU, _SIDE_ON_CPU = 4096, 512
_PRODUCTS_ON_GPU, _MOST_PRODUCTS_ON_CPU = 20, 10
_MOST_SECONDS_ON_CPU = 0.04
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def train_flops(job: TrainingJob) -> int:
    """Operations of one image in training: three forward passes; with a frozen backbone one, and two more of what is
    trained behind it. Without the branches that stochastic depth skips."""
    model, skipped = job.model, job.engine.skip_branches * skipped_flops(job.model)
    whole = forward_flops(model) - skipped
    if not job.optimizer.freeze_backbone:
        return FORWARD_AND_BACKWARD * whole
    backbone = forward_flops(model, head=False) - skipped
    if not model.is_bit and model.representation:
        backbone -= 2 * model.size.width**2
    return whole + (FORWARD_AND_BACKWARD - 1) * (whole - backbone)


def mfu(*, image_flops: int, global_batch: int, step_seconds: float, num_ranks: int, peak: float) -> float:
    """The share of the peak (operations per second of one rank) that the model's operations make up."""
    return image_flops * global_batch / max(step_seconds * num_ranks * peak, 1e-9)


def nominal_peak(device: torch.device, precision: str) -> float:
    """Operations per second by the data sheet; 0 if it is unknown: on CPUs, GPUs that are not in the table, and in
    fp32."""
    if device.type != "cuda" or precision != "bf16":
        return 0.0
    gpu = gpu_of_device(str(torch.cuda.get_device_name(device)))
    return gpu.teraflops * 1e12 if gpu else 0.0


def measured_peak(device: torch.device, precision: Literal["bf16", "fp32"]) -> float:
    """Operations per second of a product of two matrices, the best of a few; it takes some hundredths of a second."""
    side = _SIDE_ON_GPU if device.type == "cuda" else _SIDE_ON_CPU
    generator = torch.Generator(device).manual_seed(0)  # numbers that a run draws stay the same
    factors = [torch.randn(side, side, device=device, generator=generator).to(_DTYPES[precision]) for _ in range(2)]
    product = torch.mm(*factors)
    seconds = _on_gpu(factors, product) if device.type == "cuda" else _on_cpu(factors, product)
    return 2 * side**3 / seconds


def _on_cpu(factors: list[torch.Tensor], product: torch.Tensor) -> float:
    found, began = list[float](), time.perf_counter()
    while len(found) < _MOST_PRODUCTS_ON_CPU and time.perf_counter() - began < _MOST_SECONDS_ON_CPU:
        before = time.perf_counter()
        torch.mm(*factors, out=product)
        found.append(time.perf_counter() - before)
    return min(found)


def _on_gpu(factors: list[torch.Tensor], product: torch.Tensor) -> float:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_PRODUCTS_ON_GPU + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        torch.mm(*factors, out=product)
        event.record()
    events[-1].synchronize()
    return min(float(first.elapsed_time(last)) for first, last in pairwise(events)) / 1000


_STATM = Path("/proc/self/statm")


class Utilisation:
    """What the steps of a job cost; its precision must be decided. Measures the device's peak when it is made."""

    def __init__(self, job: TrainingJob, world: World, times: StepTimes) -> None:
        self.times, self._world = times, world
        self._flops, self._global_batch = train_flops(job), job.global_batch
        precision = job.engine.precision
        if precision == "auto":
            raise ValueError("engine.precision is 'auto'; the peak of a device is that of one precision")
        self.nominal_peak = nominal_peak(world.device, precision)
        self.measured_peak = measured_peak(world.device, precision)

    def values(self, step_seconds: float) -> dict[str, float]:
        """Since the last call. `step_seconds`: of a step without saves and evaluations."""
        found = {"perf/mfu_of_measured_peak": self._mfu(step_seconds, self.measured_peak)}
        if self.nominal_peak:
            found["perf/mfu"] = self._mfu(step_seconds, self.nominal_peak)
        return found | self.times.since_line() | memory(self._world.device)

    def words(self, step_seconds: float) -> str:
        """MFU in the live line: of the nominal peak if that is known."""
        if self.nominal_peak:
            return f"MFU {100 * self._mfu(step_seconds, self.nominal_peak):.0f} %"
        return f"{100 * self._mfu(step_seconds, self.measured_peak):.0f} % of peak"

    def _mfu(self, step_seconds: float, peak: float) -> float:
        return mfu(
            image_flops=self._flops,
            global_batch=self._global_batch,
            step_seconds=step_seconds,
            num_ranks=self._world.num_ranks,
            peak=peak,
        )


def memory(device: torch.device) -> dict[str, float]:
    """Bytes of this process: on a GPU the most that tensors took and the allocator held so far; on a CPU what is
    resident now."""
    if device.type == "cuda":
        return {
            "memory/allocated_peak_bytes": float(torch.cuda.max_memory_allocated(device)),
            "memory/reserved_peak_bytes": float(torch.cuda.max_memory_reserved(device)),
        }
    return {"memory/resident_bytes": float(int(_STATM.read_text().split()[1]) * resource.getpagesize())}
