"""Measures what a step costs, for rank 0's metrics: the parts of its time, model FLOP utilisation, memory, slow ranks.

Model FLOP utilisation (MFU) is the number of operations that a model needs in a step, relative to the peak of the
devices, as in PaLM (Chowdhery et al., 2022, appendix B). A block that is computed again in the backward pass counts
once. There are two peaks: the data sheet's, which is known for some GPUs in bf16, and what a product of matrices
reaches on this GPU in the run's precision. A CPU has none: what a product reaches there depends on what else runs on
its cores, so the share would differ from start to start at equal speed.

All ranks end a step together, so the wall time does not show which rank is slow. A slow rank works while the others
wait for it in an exchange, so its own time, the step without `communication`, is longer than theirs. Every rank writes
its times into its places in a row of zeros, which joins the reduction of the step. The sum has the times of all ranks.
"""

import resource
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch

from pipeline.models.config import ModelConfig
from pipeline.planning.step_time import flops_at, gpu_of_device, teacher_flops_at
from pipeline.ranks.world import World
from pipeline.training.gradients import drawn_patch
from pipeline.training.settings.job import TrainingJob
from pipeline.training.settings.tokens import TokenPhase, phase_at
from pipeline.training.zero.step_times import StepTimes

_SIDE, _PRODUCTS = 4096, 20
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_STATM = Path("/proc/self/statm")
SLOW_FACTOR, SLOW_SECONDS = 1.3, 300.0  # times the median of all ranks, for at least this long
NUM_WINDOWS = 5  # a rank must be slow in each of these, so that a single long or short step changes nothing
OWN_STEP = "own_step"
_KINDS = ("data_wait", OWN_STEP, "checkpoint")


def mfu(*, image_flops: int, global_batch: int, step_seconds: float, num_ranks: int, peak: float) -> float:
    """Returns the model's operations as a share of the peak. `peak`: the operations per second of one rank."""
    return image_flops * global_batch / max(step_seconds * num_ranks * peak, 1e-9)


def nominal_peak(device: torch.device, precision: str) -> float:
    """Returns the data sheet's operations per second. Returns 0 for CPUs, in fp32, and for GPUs that are not in the
    table."""
    if device.type != "cuda" or precision != "bf16":
        return 0.0
    gpu = gpu_of_device(str(torch.cuda.get_device_name(device)))
    return gpu.teraflops * 1e12 if gpu else 0.0


def measured_peak(device: torch.device, precision: Literal["bf16", "fp32"]) -> float:
    """Returns the operations per second of a product of two matrices on a GPU, the best of a few. The measurement takes
    some hundredths of a second. Returns 0 for CPUs."""
    if device.type != "cuda":
        return 0.0
    generator = torch.Generator(device).manual_seed(0)  # leaves the run's own random numbers as they are
    factors = [torch.randn(_SIDE, _SIDE, device=device, generator=generator).to(_DTYPES[precision]) for _ in range(2)]
    product = torch.mm(*factors)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_PRODUCTS + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        torch.mm(*factors, out=product)
        event.record()
    events[-1].synchronize()
    seconds = min(float(first.elapsed_time(last)) for first, last in pairwise(events)) / 1000
    return 2 * _SIDE**3 / seconds


class Utilisation:
    """Computes what a job's steps cost. The job's precision must be decided. `teacher`: the configuration of its
    teacher, if it has one. The device's peak is measured once, on construction."""

    def __init__(self, job: TrainingJob, world: World, times: StepTimes, *, teacher: ModelConfig | None = None) -> None:
        self.times, self._world, self._job, self._teacher = times, world, job, teacher
        precision = job.engine.precision
        if precision == "auto":
            raise ValueError("engine.precision is 'auto'; the peak of a device is that of one precision")
        self._phases, self._flops = job.phases, dict[tuple[TokenPhase, int | None], int]()
        self.nominal_peak = nominal_peak(world.device, precision)
        self.measured_peak = measured_peak(world.device, precision)

    def values(self, step_seconds: float, *, step: int) -> dict[str, float]:
        """Returns the metrics for the steps since the last call. `step_seconds`: the seconds of a step, without saves
        and evaluations. `step`: the number of the last one, from 1 on, whose operations count for all of them, unless
        they draw their patch sizes."""
        peaks = {"perf/mfu_of_measured_peak": self.measured_peak, "perf/mfu": self.nominal_peak}
        found = {name: self._mfu(step_seconds, peak, step) for name, peak in peaks.items() if peak}
        return found | self.times.since_line() | memory(self._world.device)

    def words(self, step_seconds: float, *, step: int) -> str:
        """Returns the MFU for the live line, relative to the nominal peak if that is known, otherwise to the measured
        one. Empty on a CPU."""
        if self.nominal_peak:
            return f"MFU {100 * self._mfu(step_seconds, self.nominal_peak, step):.0f} %"
        return f"{100 * self._mfu(step_seconds, self.measured_peak, step):.0f} % of peak" if self.measured_peak else ""

    def _mfu(self, step_seconds: float, peak: float, step: int) -> float:
        return mfu(
            image_flops=self._image_flops(step),
            global_batch=self._job.global_batch,
            step_seconds=step_seconds,
            num_ranks=self._world.num_ranks,
            peak=peak,
        )

    def _image_flops(self, step: int) -> int:
        """Returns the operations per image of a line's last step, with the teacher's, or the mean of all its steps if
        they draw patch sizes."""
        job, last = self._job, max(0, step - 1)
        steps = range(max(0, step - job.log_every_steps), last + 1) if job.tokens.patch_sizes else (last,)
        found = []
        for one in steps:
            patch = drawn_patch(one, seed=job.seed, patch_sizes=job.tokens.patch_sizes)
            kind = phase_at(one, self._phases), patch
            if kind not in self._flops:
                self._flops[kind] = flops_at(job, one, patch=patch) + teacher_flops_at(self._teacher, job, one)
            found.append(self._flops[kind])
        return sum(found) // len(found)


def memory(device: torch.device) -> dict[str, float]:
    """Returns the memory of this process in bytes. On a GPU: the most that tensors took, and the most that the
    allocator held. On a CPU: what is resident now."""
    if device.type == "cuda":
        return {
            "memory/allocated_peak_bytes": float(torch.cuda.max_memory_allocated(device)),
            "memory/reserved_peak_bytes": float(torch.cuda.max_memory_reserved(device)),
        }
    return {"memory/resident_bytes": float(int(_STATM.read_text().split()[1]) * resource.getpagesize())}


class RankTimes:
    """Exchanges the ranks' mean times per step since the last exchange, in each step whose number is a multiple of
    `every`."""

    def __init__(self, times: StepTimes, world: World, *, every: int) -> None:
        self._times, self._world, self._every = times, world, every
        self.names = tuple(f"rank {rank}: {kind}" for rank in range(world.num_ranks) for kind in _KINDS)

    def is_due(self, step: int) -> bool:
        """Returns whether step `step`, from 1 on, exchanges times. A rank that runs alone never does."""
        return self._world.num_ranks > 1 and step % self._every == 0

    def row(self) -> list[float]:
        """Returns one value for each of `names`: this rank's seconds, and zeros for the other ranks."""
        row, first = [0.0] * len(self.names), self._world.rank * len(_KINDS)
        row[first : first + len(_KINDS)] = self._times.since_exchange()
        return row

    def of(self, kind: str, sums: Mapping[str, float]) -> list[float]:
        """Returns the seconds of each rank, in rank order, from the sums over ranks. `kind`: one of `_KINDS`."""
        return [sums[f"rank {rank}: {kind}"] for rank in range(self._world.num_ranks)]

    def values(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns the ranks' times as metrics show them; empty before the first step has ended."""
        own = self.of(OWN_STEP, sums)
        if not any(own):
            return {}
        found = {f"ranks/{OWN_STEP}_median": statistics.median_low(own)}
        for kind in _KINDS:
            seconds = self.of(kind, sums)
            found[f"ranks/{kind}"] = max(seconds)
            found[f"ranks/{kind}_rank"] = float(seconds.index(max(seconds)))
        return found


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A slow rank. `own_seconds`: the mean of its own seconds per step. `times`: that mean, divided by the median over
    all ranks."""

    rank: int
    own_seconds: float
    times: float


class SlowRanks:
    """Finds ranks whose own time is above SLOW_FACTOR times the median in each of NUM_WINDOWS windows in a row, which
    together last SLOW_SECONDS or longer. Each rank is reported once."""

    def __init__(self) -> None:
        self._lines: list[Sequence[float]] = []
        self._began = 0.0
        self._num_slow: dict[int, int] = {}
        self._named: set[int] = set()

    def newly_slow(self, own_seconds: Sequence[float], *, at: float) -> list[SlowRank]:
        """Returns the ranks to report now. `own_seconds`: each rank's own seconds per step since the last exchange.
        `at`: the monotonic time."""
        self._began = self._began if self._lines else at
        self._lines.append(own_seconds)
        if at - self._began < SLOW_SECONDS / NUM_WINDOWS:
            return []
        means = [statistics.fmean(of_rank) for of_rank in zip(*self._lines, strict=True)]
        self._lines.clear()
        median = statistics.median_low(means)
        slow = [rank for rank, seconds in enumerate(means) if seconds > SLOW_FACTOR * median > 0]
        self._num_slow = {rank: self._num_slow.get(rank, 0) + 1 for rank in slow}
        found = [rank for rank in slow if self._num_slow[rank] >= NUM_WINDOWS and rank not in self._named]
        self._named.update(found)
        return [SlowRank(rank=rank, own_seconds=means[rank], times=means[rank] / median) for rank in found]
