"""`--profile`: a trace of a few steps by PyTorch's profiler, in Chrome's format, which ui.perfetto.dev opens.

It has each operator and kernel, each step by its number, and the parts of it by the names of their metrics. Results do
not change. The steps that are traced take longer, and the first of them begins with the start of the profiler.
"""

import logging
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pipeline.ranks.world import QUIET_PROFILER, World, set_defaults
from pipeline.training.zero.step_times import StepTimes, unnamed
from shards.errors import UserError

log = logging.getLogger(__name__)
FOLDER = "profile"


class StepTrace:
    """Traces `steps` of this rank, once, and writes RUN/profile/steps-FIRST-LAST.json.gz. Close it at the end: what has
    been traced by then is written."""

    def __init__(self, run_dir: Path, steps: range, times: StepTimes, *, device: torch.device) -> None:
        self._folder, self._steps, self._times, self._device = run_dir / FOLDER, steps, times, device
        self._profiler: profile | None = None
        self._named = ExitStack()  # the running step
        self._traced: list[int] = []

    def begins(self, step: int) -> None:
        """A step begins."""
        self._named.close()
        if self._profiler and step not in self._steps:
            self._write(self._profiler)
        elif step in self._steps and (self._profiler or not self._traced):
            if self._profiler is None:
                self._profiler = self._started()
            self._named.enter_context(record_function(f"step {step}"))
            self._traced.append(step)

    def close(self) -> None:
        """The run has ended, well or not."""
        self._named.close()
        if self._profiler:
            self._write(self._profiler)
        elif not self._traced:
            _say_untraced(self._steps)

    def _started(self) -> profile:
        set_defaults(QUIET_PROFILER)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        profiler = profile(activities=activities)
        profiler.start()
        self._times.named = record_function
        return profiler

    def _write(self, profiler: profile) -> None:
        """A trace that cannot be written ends no run."""
        self._profiler, self._times.named = None, unnamed
        profiler.stop()
        first, last = self._traced[0], self._traced[-1]
        path = self._folder / f"steps-{first}-{last}.json.gz"
        half = self._folder / f".half-{path.name}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(half))
            half.replace(path)
        except (OSError, RuntimeError) as error:
            log.warning("the trace of steps %d to %d could not be written to %s: %s", first, last, path, error)
            return
        log.info("steps %d to %d are traced: open %s in https://ui.perfetto.dev", first, last, path)


def refuse_later_steps(steps: range, *, num_steps: int) -> None:
    """UserError if a run of `num_steps` has none of the steps to trace; `steps` may be empty."""
    if steps and steps[0] > num_steps:
        raise UserError(
            f"--profile is {_words(steps)}, and the last step of the run is {num_steps}; give steps up to that, or "
            "leave it out"
        )


def say_untraced(steps: range, world: World) -> None:
    """Says on rank 0, once the run is done, that steps were to be traced and were not."""
    if world.is_first:
        _say_untraced(steps)


def _say_untraced(steps: range) -> None:
    if steps:
        log.warning("--profile %s: none of these steps was trained, so there is no trace", _words(steps))


def _words(steps: range) -> str:
    return f"{steps[0]}:{steps[-1]}"
