"""Reads the curves in a run's metrics.jsonl, and reduces each to the smallest and the largest value of every column of
a picture. This module does not load torch.

The file is read line by line, so 300,000 steps take seconds and little memory. No spike is lost, because a spike is the
largest value of its column.
"""

import re
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shards.files.local_files import is_finite, is_step, object_in, open_local_file

COLUMNS = 480
_SHOWN = re.compile(r"(loss|test_loss|test_accuracy|learning_rate|grad_norm|images_per_second|data_wait_share)")
_GROUPS = re.compile(
    r"(time|perf|memory)/[ -~]{1,80}|ranks/(data_wait|own_step|own_step_median|checkpoint)"
    r"|eval/[ -~]{1,80}/(ema_)?accuracy|fewshot/[0-9]{1,9}_shots"
)
_MOST_CURVES = 48
_MOST_LINE_BYTES = 1 << 20
_LEAST = 1e-250  # smaller values become 0, because scales cannot divide by them


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A value over the steps. `steps` are ascending, and `values` are finite. `num_not_finite`: the number of steps
    that are left out because their value is not finite."""

    name: str
    steps: "array[int]"
    values: "array[float]"
    num_not_finite: int

    def envelope(self, columns: int = COLUMNS) -> list[tuple[int, float]]:
        """Returns at most four points of every column, in order: its first, smallest, largest and last."""
        first, last = self.steps[0], self.steps[-1]
        if len(self.steps) <= 2 * columns:
            return list(zip(self.steps, self.values, strict=True))
        width = (last - first + 1) / columns
        kept: list[int] = []
        for begin, end in _runs(self.steps, first, width):
            own = range(begin, end)
            kept += sorted(
                {begin, min(own, key=self.values.__getitem__), max(own, key=self.values.__getitem__), end - 1}
            )
        return [(self.steps[at], self.values[at]) for at in kept]

    def samples(self, number: int = 8) -> list[tuple[int, float]]:
        """Returns `number` points for a table, including the first and the last."""
        count = len(self.steps)
        places = sorted({round(at * (count - 1) / max(number - 1, 1)) for at in range(number)})
        return [(self.steps[at], self.values[at]) for at in places]

    def extreme(self, *, most: bool) -> tuple[int, float]:
        """Returns the step with the smallest or, if `most`, the largest value, and that value."""
        at = (max if most else min)(range(len(self.values)), key=self.values.__getitem__)
        return self.steps[at], self.values[at]


def _runs(steps: "array[int]", first: int, width: float) -> Iterator[tuple[int, int]]:
    """Yields the ranges of indices whose steps fall into the same column."""
    begin, column = 0, 0
    for at, step in enumerate(steps):
        own = int((step - first) / width)
        if own != column:
            yield begin, at
            begin, column = at, own
    yield begin, len(steps)


@dataclass(kw_only=True)
class _Growing:
    steps: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))
    num_not_finite: int = 0


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The curves in the order in which they are shown, and what was left out. `num_unusable`: lines that are not
    metrics. `num_repeated`: lines of steps that an earlier line has reached, which a resumed run removes.
    `has_half_line`: whether the file ends within a line, because it is being written or the run was killed."""

    curves: tuple[Curve, ...]
    num_unusable: int
    num_repeated: int
    has_half_line: bool = False

    def named(self, name: str) -> Curve | None:
        """Returns the curve with this name, or None."""
        return next((one for one in self.curves if one.name == name), None)


NO_CURVES = Curves(curves=(), num_unusable=0, num_repeated=0)


def read_curves(path: Path) -> Curves:
    """Returns the curves in a file, which may be written to meanwhile, or no curves if it is missing. Raises OSError if
    it cannot be read, and InvalidDataError if it is not a regular file."""
    grown: dict[str, _Growing] = {}
    counts: Counter[str] = Counter()
    last = -1
    try:
        file = open_local_file(path)
    except FileNotFoundError:
        return NO_CURVES
    with file:
        while text := file.readline(_MOST_LINE_BYTES):
            if len(text) < _MOST_LINE_BYTES and not text.endswith(b"\n"):
                counts["half"] += 1
                break
            line = object_in(text) if text.endswith(b"\n") else None
            step = line.get("step") if line else None
            if line is None or not is_step(step):
                counts["unusable"] += 1
            elif step <= last:  # type: ignore[operator]
                counts["repeated"] += 1
            else:
                last = int(step)  # type: ignore[arg-type]
                _add(grown, last, line)
    curves = [
        Curve(name=name, steps=one.steps, values=one.values, num_not_finite=one.num_not_finite)
        for name, one in sorted(grown.items(), key=lambda item: _rank(item[0]))
        if one.steps
    ]
    return Curves(
        curves=tuple(curves),
        num_unusable=counts["unusable"],
        num_repeated=counts["repeated"],
        has_half_line=counts["half"] > 0,
    )


def _add(grown: dict[str, _Growing], step: int, line: dict[str, object]) -> None:
    for name, value in line.items():
        own = grown.get(name)
        if own is None:
            if not (_SHOWN.fullmatch(name) or _GROUPS.fullmatch(name)) or len(grown) >= _MOST_CURVES:
                continue
            own = grown[name] = _Growing()
        if is_finite(value):
            own.steps.append(step)
            own.values.append(float(value) if abs(value) >= _LEAST else 0.0)  # type: ignore[arg-type]
        else:
            own.num_not_finite += 1


def _rank(name: str) -> tuple[int, str]:
    order = ("loss", "test_accuracy", "test_loss", "learning_rate", "grad_norm", "images_per_second", "data_wait_share")
    place = 2 if name.startswith("ranks/") else int(name == "time/other")  # after the parts of a step
    return (order.index(name), "") if name in order else (len(order) + place, name)
