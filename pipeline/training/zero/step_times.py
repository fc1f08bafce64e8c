"""Where the time of a step goes, from marks in the order in which a rank works: each ends a part and begins another.

On a CPU a mark is a time. On a GPU it is an event on the stream that computes, so the parts divide the GPU's own time:
a wait for data or a save that the GPU does not see, because it is still computing, costs nothing. Events are read once
they have happened, a step late; nothing waits for them. Besides, the wall time of each step is taken from the host's
clock, so that the parts can be compared with something that they do not define.

Exchanges between ranks are a part of their own, `communication`, wherever in the step they are: a rank that waits there
for a slower one has little to do itself. Sums that run beside the passes, on another stream, count as far as the stream
that computes waits for them.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Part = Literal[
    "data_wait", "to_device", "forward_backward", "communication", "optimizer", "checkpoint", "evaluation", "other"
]
PARTS: tuple[Part, ...] = (
    *("data_wait", "to_device", "forward_backward", "communication", "optimizer", "checkpoint", "evaluation"),
    "other",
)
_ASIDE: tuple[Part, ...] = ("checkpoint", "evaluation")  # whose exchanges belong to them
_STEP, _COUNT = "step", "steps"


class DeviceMark(Protocol):
    """A moment of the device."""

    def is_past(self) -> bool:
        """Whether the device has reached it. Waits for nothing."""

    def seconds_to(self, later: "DeviceMark") -> float:
        """Seconds from this moment to a later one; both are past."""


class Marks(Protocol):
    """Makes marks, and makes new ones of those that are not needed any more."""

    def now(self) -> DeviceMark:
        """A mark behind all work launched so far."""

    def free(self, mark: DeviceMark) -> None:
        """The mark is not needed any more."""


@dataclass(frozen=True, slots=True)
class HostMark:
    """A moment of the CPU: everything is done when it is launched."""

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
    """Those of a CPU."""

    def now(self) -> DeviceMark:
        """Implements `Marks`."""
        return HostMark(time.perf_counter())

    def free(self, mark: DeviceMark) -> None:
        """Implements `Marks`. Nothing is kept."""


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
    """Those of the GPU's stream that is current now, on which the run computes: another stream may be current when a
    mark is made, such as that of DeepSpeed's sums. Their events form a ring: as many as two or three steps need are
    ever made."""

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
    """The marks of a rank's device."""
    return CudaMarks(device) if device.type == "cuda" else HostMarks()


@dataclass(frozen=True, slots=True)
class _Ended:
    """A step that has ended: where each part began, the end, and its seconds by the host's clock."""

    begins: list[tuple[Part, DeviceMark]]
    end: DeviceMark
    seconds: float


def unnamed(_: str) -> AbstractContextManager[object]:
    """No profiler asks for names."""
    return nullcontext()


class StepTimes:
    """Adds up the parts of the steps. A step lasts until the next one begins: a save or an evaluation behind it is
    part of it. `named` names what happens inside a part, for a profiler. `is_alone`: there are no other ranks, so there
    is no `communication`."""

    def __init__(self, marks: Marks | None = None, *, is_alone: bool = False) -> None:
        self._marks, self.is_alone = marks or HostMarks(), is_alone
        self.named: Callable[[str], AbstractContextManager[object]] = unnamed
        self._part: Part = "other"
        self._begins: list[tuple[Part, DeviceMark]] = []
        self._began = 0.0
        self._ended: deque[_Ended] = deque()
        self.forget()

    def forget(self) -> None:
        """The next step begins from nothing: what lies before it belongs to no step."""
        self._begins, self._ended = [], deque()
        self._sums: dict[str, float] = dict.fromkeys((*PARTS, _STEP, _COUNT), 0.0)
        self._at_line, self._at_exchange = dict(self._sums), dict(self._sums)

    def begins(self) -> None:
        """A step begins, and the one before it ends."""
        mark, now = self._marks.now(), time.monotonic()
        if self._begins:
            self._ended.append(_Ended(self._begins, mark, now - self._began))
        self._begins, self._began = [(self._part, mark)], now
        self._add_up()

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Time inside belongs to this part of the step."""
        before = self._part
        self._enter(name)
        try:
            with self.named(name):
                yield
        finally:
            self._enter(before)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Time inside is spent on an exchange with other ranks, if there are any."""
        if self.is_alone or self._part in _ASIDE:
            yield
            return
        with self.part("communication"):
            yield

    def since_line(self) -> dict[str, float]:
        """Mean seconds per step since the last call: of each part, and by the host's clock (`step`). Empty if no step
        has ended since."""
        self._add_up()
        found = _means(self._sums, self._at_line)
        if found:
            self._at_line = dict(self._sums)
        left_out = ("communication",) if self.is_alone else ()
        return {f"time/{name}": seconds for name, seconds in found.items() if name not in left_out}

    def since_exchange(self) -> tuple[float, float, float]:
        """Mean seconds per step since the last call: of waiting for data, of the step without `communication`, and of
        waiting for saves. Zeros if no step has ended since."""
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
        """Takes the steps whose marks are all past."""
        while self._ended and self._ended[0].end.is_past():
            step = self._ended.popleft()
            ends = [mark for _, mark in step.begins[1:]] + [step.end]
            for (part, began), ended in zip(step.begins, ends, strict=True):
                self._sums[part] += began.seconds_to(ended)
                self._marks.free(began)
            self._sums[_STEP] += step.seconds
            self._sums[_COUNT] += 1


def _means(sums: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Of each sum, what was added since, per step; empty if no step was."""
    num_steps = sums[_COUNT] - before[_COUNT]
    return {name: (sums[name] - before[name]) / num_steps for name in (*PARTS, _STEP)} if num_steps else {}
