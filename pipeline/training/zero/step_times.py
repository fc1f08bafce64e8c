"""Measures where the time of a step goes: the parts that metrics show, and the trace of `--profile`.

The parts come from marks, in the order in which a rank works: each mark ends one part and begins the next. On a CPU, a
mark is a time. On a GPU, it is an event on the stream that computes, so the parts divide the GPU's own time: a wait for
data or a save takes no time if the GPU is still computing. Events are read once they have happened, usually a step
later, so nothing waits for them. The wall time of each step is also taken from the host's clock, so that the parts can
be compared with a figure that does not depend on them.

Exchanges between ranks are a separate part, `communication`, wherever in the step they occur: a rank that waits long
there waits for a slower one. Sums that run beside the passes, on another stream, count only while the computing stream
waits for them.

`--profile` traces the given steps with PyTorch's profiler, in Chrome's format, which ui.perfetto.dev opens. The trace
has every operator and kernel, each step by its number, and its parts by the names of their metrics. Tracing does not
change results. The traced steps take longer, and the first one includes the start of the profiler.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pipeline.ranks.world import QUIET_PROFILER, set_defaults
from shards.errors import UserError

Part = Literal[
    "data_wait", "to_device", "forward_backward", "communication", "optimizer", "checkpoint", "evaluation", "other"
]
PARTS: tuple[Part, ...] = (
    *("data_wait", "to_device", "forward_backward", "communication", "optimizer", "checkpoint", "evaluation"),
    "other",
)
_ASIDE: tuple[Part, ...] = ("checkpoint", "evaluation")  # an exchange during one of these parts counts as that part
_STEP, _COUNT = "step", "steps"
log = logging.getLogger(__name__)
FOLDER = "profile"


class DeviceMark(Protocol):
    """A moment of the device."""

    def is_past(self) -> bool:
        """Returns whether the device has reached this moment, without waiting."""

    def seconds_to(self, later: "DeviceMark") -> float:
        """Returns the seconds from this moment to a later one. Both must be past."""


class Marks(Protocol):
    """Makes marks, and reuses those that are no longer needed."""

    def now(self) -> DeviceMark:
        """Returns a mark after all work launched so far."""

    def free(self, mark: DeviceMark) -> None:
        """Releases a mark that is no longer needed."""


@dataclass(frozen=True, slots=True)
class HostMark:
    """A moment of the CPU, where work is done as soon as it is launched."""

    at: float

    def is_past(self) -> bool:
        """Implements `DeviceMark`."""
        return True

    def seconds_to(self, later: DeviceMark) -> float:
        """Implements `DeviceMark`."""
        if not isinstance(later, HostMark):
            raise TypeError(f"{later!r} is no moment of the CPU")
        return later.at - self.at


class HostMarks:
    """The marks of a CPU."""

    def now(self) -> DeviceMark:
        """Implements `Marks`."""
        return HostMark(time.perf_counter())

    def free(self, mark: DeviceMark) -> None:
        """Implements `Marks`; there is nothing to reuse."""


@dataclass(frozen=True, slots=True)
class CudaMark:
    """A moment of a GPU's stream."""

    event: torch.cuda.Event

    def is_past(self) -> bool:
        """Implements `DeviceMark`."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def seconds_to(self, later: DeviceMark) -> float:
        """Implements `DeviceMark`."""
        if not isinstance(later, CudaMark):
            raise TypeError(f"{later!r} is no moment of a GPU")
        return float(self.event.elapsed_time(later.event)) / 1000


class CudaMarks:
    """The marks of a GPU, on the stream that is current on construction. The run computes on that stream, but another
    one, such as DeepSpeed's stream for sums, may be current when a mark is made. Events are reused, so their number
    does not grow with the number of steps."""

    def __init__(self, device: torch.device) -> None:
        self._stream, self._free = torch.cuda.current_stream(device), deque[CudaMark]()

    def now(self) -> DeviceMark:
        """Implements `Marks`."""
        mark = self._free.popleft() if self._free else CudaMark(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        mark.event.record(self._stream)
        return mark

    def free(self, mark: DeviceMark) -> None:
        """Implements `Marks`."""
        if isinstance(mark, CudaMark):
            self._free.append(mark)


def marks_of(device: torch.device) -> Marks:
    """Returns the marks of a rank's device."""
    return CudaMarks(device) if device.type == "cuda" else HostMarks()


@dataclass(frozen=True, slots=True)
class _Ended:
    """A step that has ended: where each part began, the end, and the step's seconds by the host's clock."""

    begins: list[tuple[Part, DeviceMark]]
    end: DeviceMark
    seconds: float


def unnamed(_: str) -> AbstractContextManager[object]:
    """Returns a context that gives a part no name, for when no profiler runs."""
    return nullcontext()


class StepTimes:
    """Adds up the parts of the steps. A step lasts until the next one begins, so a save or an evaluation between the
    two belongs to the first. `named` gives a part its name in the profiler. `is_alone`: whether there are no other
    ranks, so that there is no `communication`."""

    def __init__(self, marks: Marks | None = None, *, is_alone: bool = False) -> None:
        self._marks, self.is_alone = marks or HostMarks(), is_alone
        self.named: Callable[[str], AbstractContextManager[object]] = unnamed
        self._part: Part = "other"
        self._begins: list[tuple[Part, DeviceMark]] = []
        self._began = 0.0
        self._ended: deque[_Ended] = deque()
        self.forget()

    def forget(self) -> None:
        """Forgets all times. The time until the next step begins belongs to no step."""
        self._begins, self._ended = [], deque()
        self._sums: dict[str, float] = dict.fromkeys((*PARTS, _STEP, _COUNT), 0.0)
        self._at_line, self._at_exchange = dict(self._sums), dict(self._sums)

    def begins(self) -> None:
        """Records that a step begins, which ends the previous one."""
        mark, now = self._marks.now(), time.monotonic()
        if self._begins:
            self._ended.append(_Ended(self._begins, mark, now - self._began))
        self._begins, self._began = [(self._part, mark)], now
        self._add_up()

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Counts the time inside the `with` block for this part of the step."""
        before = self._part
        self._enter(name)
        try:
            with self.named(name):
                yield
        finally:
            self._enter(before)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Counts the time inside the `with` block as `communication`, unless this rank is alone or in a save or
        evaluation."""
        if self.is_alone or self._part in _ASIDE:
            yield
            return
        with self.part("communication"):
            yield

    def since_line(self) -> dict[str, float]:
        """Returns the mean seconds per step since the last call, for each part and by the host's clock (`step`). The
        result is empty if no step has ended since then."""
        self._add_up()
        found = _means(self._sums, self._at_line)
        if found:
            self._at_line = dict(self._sums)
        left_out = ("communication",) if self.is_alone else ()
        return {f"time/{name}": seconds for name, seconds in found.items() if name not in left_out}

    def since_exchange(self) -> tuple[float, float, float]:
        """Returns three means, in seconds per step since the last call: the wait for data, the step without
        `communication`, and the wait for saves. Returns zeros if no step has ended since then."""
        self._add_up()
        found = _means(self._sums, self._at_exchange)
        if not found:
            return 0.0, 0.0, 0.0
        self._at_exchange = dict(self._sums)
        return found["data_wait"], max(0.0, found[_STEP] - found["communication"]), found["checkpoint"]

    def _enter(self, part: Part) -> None:
        self._part = part
        if self._begins and self._begins[-1][0] != part:
            self._begins.append((part, self._marks.now()))

    def _add_up(self) -> None:
        """Adds the steps whose marks are all past to the sums, and frees their marks."""
        while self._ended and self._ended[0].end.is_past():
            step = self._ended.popleft()
            ends = [mark for _, mark in step.begins[1:]] + [step.end]
            for (part, began), ended in zip(step.begins, ends, strict=True):
                self._sums[part] += began.seconds_to(ended)
                self._marks.free(began)
            self._sums[_STEP] += step.seconds
            self._sums[_COUNT] += 1


def _means(sums: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Returns the mean of each sum per step since `before`; empty if no step has ended since then."""
    num_steps = sums[_COUNT] - before[_COUNT]
    return {name: (sums[name] - before[name]) / num_steps for name in (*PARTS, _STEP)} if num_steps else {}


class StepTrace:
    """Traces `steps` of this rank, once, and writes RUN/profile/steps-FIRST-LAST.json.gz. Close it at the end of the
    run, so that what has been traced by then is written."""

    def __init__(self, run_dir: Path, steps: range, times: StepTimes, *, device: torch.device) -> None:
        self._folder, self._steps, self._times, self._device = run_dir / FOLDER, steps, times, device
        self._profiler: profile | None = None
        self._named = ExitStack()  # the name of the running step
        self._traced: list[int] = []

    def begins(self, step: int) -> None:
        """Called when a step begins. Names the step in the trace, and starts or writes the trace if it is due."""
        self._named.close()
        if self._profiler and step not in self._steps:
            self._write(self._profiler)
        elif step in self._steps and (self._profiler or not self._traced):
            if self._profiler is None:
                self._profiler = self._started()
            self._named.enter_context(record_function(f"step {step}"))
            self._traced.append(step)

    def close(self) -> None:
        """Writes the trace when the run ends, even after an error."""
        self._named.close()
        if self._profiler:
            self._write(self._profiler)
        elif not self._traced:
            say_untraced(self._steps)

    def _started(self) -> profile:
        set_defaults(QUIET_PROFILER)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        profiler = profile(activities=activities)
        profiler.start()
        self._times.named = record_function
        return profiler

    def _write(self, profiler: profile) -> None:
        """Stops the profiler and writes the trace. If that fails, logs a warning, and the run continues."""
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
    """Raises UserError if a run of `num_steps` has none of the steps to trace. `steps` may be empty."""
    if steps and steps[0] > num_steps:
        raise UserError(
            f"--profile is {_words(steps)}, and the last step of the run is {num_steps}; give steps up to that, or "
            "leave it out"
        )


def say_untraced(steps: range) -> None:
    """Logs, once the run is done, that none of the steps to trace was trained. `steps` may be empty."""
    if steps:
        log.warning("--profile %s: none of these steps was trained, so there is no trace", _words(steps))


def _words(steps: range) -> str:
    return f"{steps[0]}:{steps[-1]}"
