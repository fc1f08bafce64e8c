"""What a step costs, beside its loss: the parts of its time, MFU and memory, for rank 0's lines of metrics."""

import resource
from pathlib import Path

import torch

from pipeline.ranks.world import World
from pipeline.training.reporting.mfu import measured_peak, mfu, nominal_peak, train_flops
from pipeline.training.settings.job import TrainingJob
from pipeline.training.zero.step_times import StepTimes

_STATM = Path("/proc/self/statm")


class StepCosts:
    """Of a job whose precision is decided. Measures the device's peak when it is made."""

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
