"""How fast a run goes, from the ledger's accounts: what training takes, and what saving and evaluating add to it."""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.training.reporting.ledger import Account

WINDOW_SECONDS = 30.0
_MARK_SECONDS = 0.25  # least time between two marks


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The accounts' sums once `step` was launched, and the monotonic time in seconds."""

    step: int
    at: float
    compute: float
    data_wait: float
    aside: float  # checkpoints and evaluations

    @property
    def training(self) -> float:
        """Seconds that the steps themselves took."""
        return self.compute + self.data_wait


class Throughput:
    """Marks of the last 30 seconds of training, so that the slow first step of a process soon stops counting."""

    def __init__(self, seconds: Mapping[Account, float], *, step: int) -> None:
        self._seconds = seconds
        self._start = self._line = self._mark(step)
        self._marks = deque([self._start])
        self._last = self._start
        self._launched: deque[Mark] = deque()

    @property
    def at(self) -> float:
        """Monotonic time at which the last step that was read was launched."""
        return self._last.at

    def launched(self, step: int) -> None:
        """`step` is launched: its time ends here, whenever its outcome is read."""
        self._launched.append(self._mark(step))

    def step(self) -> None:
        """The outcome of the oldest launched step has been read."""
        self._last = self._launched.popleft()
        marks = self._marks
        if marks[0] is self._start:
            marks[0] = self._last if self._last.step > self._start.step + 1 else self._start
        if self._last.training - marks[-1].training >= _MARK_SECONDS or len(marks) == 1:
            marks.append(self._last)
        while len(marks) > 2 and self._last.training - marks[1].training >= WINDOW_SECONDS:
            marks.popleft()

    def step_seconds(self) -> float:
        """Seconds per training step, over the last 30 s."""
        return _step_seconds(self._marks[0], self._last) or _step_seconds(self._start, self._last)

    def seconds_left(self, steps: int) -> float:
        """For the remaining steps of `num_steps`, with checkpoints and evaluations as often as so far."""
        done = max(1, self._last.step - self._start.step)
        aside = (self._last.aside - self._start.aside) / done
        return (steps - self._last.step) * (self.step_seconds() + aside)

    def since_line(self, *, global_batch: int) -> dict[str, float]:
        """images_per_second, step_seconds and data_wait_share of the steps since the last call."""
        before, self._line = self._line, self._last
        step_seconds = _step_seconds(before, self._last)
        wait = self._last.data_wait - before.data_wait
        return {
            "images_per_second": global_batch / max(step_seconds, 1e-9),
            "step_seconds": step_seconds,
            "data_wait_share": wait / max(self._last.training - before.training, 1e-9),
        }

    def _mark(self, step: int) -> Mark:
        seconds = self._seconds
        aside = seconds["checkpoint"] + seconds["evaluation"]
        compute, wait = seconds["compute"], seconds["data_wait"]
        return Mark(step=step, at=time.monotonic(), compute=compute, data_wait=wait, aside=aside)


def _step_seconds(first: Mark, last: Mark) -> float:
    return (last.training - first.training) / max(1, last.step - first.step)
