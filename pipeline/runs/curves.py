"""Reads a run's metrics.jsonl in bounded memory: its curves, the means of its loss, and the lines with its scores. Does
not load torch.

The file is read line by line. For a curve with more than MOST_POINTS points, only the first, the smallest, the largest
and the last of each stretch of steps are kept. No spike is lost, because a spike is the largest value of its stretch. A
picture shows the same four points of each of its columns.

What a long file contains is kept beside it, in metrics.summary (`summary_file.py`), so that the next reader only reads
the lines that were added since.
"""

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shards.files.local_files import MOST_LINE_BYTES, Line, is_finite, is_step, object_by, open_local_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

COLUMNS = 480
MOST_POINTS = 1 << 15  # of a curve
NUM_STRETCHES = 1 << 12
_LINES_A_CHECK = 1 << 10
_SHOWN = re.compile(r"(loss|test_loss|test_accuracy|learning_rate|grad_norm|images_per_second|data_wait_share)")
_GROUPS = re.compile(
    r"(time|perf|memory)/[ -~]{1,80}|ranks/(data_wait|own_step|own_step_median|checkpoint)"
    r"|eval/[ -~]{1,80}/(ema_)?accuracy|fewshot/[0-9]{1,9}_shots"
)
_MAIN_SCORES = ("test_accuracy", "test_ema_accuracy")
_SCORES = re.compile(r"test_(ema_)?accuracy|eval/.{1,1000}/(ema_)?accuracy|fewshot/[0-9]{1,9}_shots")
MOST_CURVES = 48
MOST_SCORES = 256
_MOST_NAMES = 4096
MOST_KEPT_BYTES = 1 << 16  # longer lines are not kept
_LEAST = 1e-250  # smaller values become 0, because scales cannot divide by them
_MOST = 1e300  # the limit of `is_finite`
_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A value over the steps. `steps` are ascending, and `values` are finite. `num_not_finite`: the number of steps
    that are left out because their value is not finite."""

    name: str
    steps: "array[int]"
    values: "array[float]"
    num_not_finite: int

    def envelope(self, columns: int = COLUMNS) -> list[tuple[int, float]]:
        """Returns at most four points of every column, in order: its first, smallest, largest and last. Returns all
        points if there are at most 2 x `columns`."""
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
        """Returns up to `number` points for a table, including the first and the last."""
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


def _ints() -> "array[int]":
    return array("q")


def _floats() -> "array[float]":
    return array("d")


@dataclass(kw_only=True)
class Growing:
    """The points of a curve so far. `shift`: stretches of 2^shift steps have been thinned; 0 means all points are
    there."""

    steps: "array[int]" = field(default_factory=_ints)
    values: "array[float]" = field(default_factory=_floats)
    num_not_finite: int = 0
    shift: int = 0

    def thin(self) -> None:
        """Keeps the first, the smallest, the largest and the last point of each of at most NUM_STRETCHES stretches, if
        there are more than MOST_POINTS points."""
        if len(self.steps) <= MOST_POINTS:
            return
        import numpy as np  # noqa: PLC0415 - short files need no NumPy

        steps, values = np.frombuffer(self.steps, dtype=np.int64), np.frombuffer(self.values, dtype=np.float64)
        begins, self.shift = _stretches(steps, self.shift)
        stretch = np.repeat(np.arange(begins.size), np.diff(begins, append=steps.size))
        kept = [begins, np.append(begins[1:], steps.size) - 1]
        for extreme in (np.minimum, np.maximum):
            places = np.flatnonzero(values == extreme.reduceat(values, begins)[stretch])
            kept.append(places[np.diff(stretch[places], prepend=-1) > 0])  # the first of equal ones
        places = np.unique(np.concatenate(kept))
        self.steps, self.values = array("q", steps[places].tobytes()), array("d", values[places].tobytes())


@dataclass(kw_only=True)
class Means:
    """Sums of a value over stretches of steps, each with its number of values and its last step. A stretch has one
    value until there are more than MOST_POINTS of them."""

    steps: "array[int]" = field(default_factory=_ints)
    sums: "array[float]" = field(default_factory=_floats)
    counts: "array[int]" = field(default_factory=_ints)
    shift: int = 0

    def add(self, step: int, value: float) -> None:
        """Adds a value."""
        self.steps.append(step)
        self.sums.append(value)
        self.counts.append(1)

    def thin(self) -> None:
        """Joins neighbours, as `Growing.thin` does."""
        if len(self.steps) <= MOST_POINTS:
            return
        import numpy as np  # noqa: PLC0415 - short files need no NumPy

        steps = np.frombuffer(self.steps, dtype=np.int64)
        begins, self.shift = _stretches(steps, self.shift)
        sums = np.add.reduceat(np.frombuffer(self.sums, dtype=np.float64), begins)
        counts = np.add.reduceat(np.frombuffer(self.counts, dtype=np.int64), begins)
        lasts = steps[np.append(begins[1:], steps.size) - 1]
        self.steps, self.sums = array("q", lasts.tobytes()), array("d", sums.tobytes())
        self.counts = array("q", counts.tobytes())

    def columns(self, columns: int) -> tuple[tuple[int, float], ...]:
        """Returns at most `columns` means, each over the same number of steps and with its last step."""
        if not self.steps:
            return ()
        first, width = self.steps[0], (self.steps[-1] - self.steps[0] + 1) / columns
        found: dict[int, list[int]] = {}
        for at, step in enumerate(self.steps):
            found.setdefault(int((step - first) / width), []).append(at)
        return tuple(
            (self.steps[own[-1]], fsum(self.sums[at] for at in own) / sum(self.counts[at] for at in own))
            for own in found.values()
        )


def _stretches(steps: "NDArray[np.int64]", shift: int) -> "tuple[NDArray[np.int64], int]":
    """Returns where each stretch of 2^shift steps begins, and the shift: the first one from `shift` on that gives at
    most NUM_STRETCHES."""
    import numpy as np  # noqa: PLC0415 - as above

    while True:
        begins = np.flatnonzero(np.diff(steps >> shift, prepend=-1))
        if begins.size <= NUM_STRETCHES:
            return begins, shift
        shift += 1


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The curves in the order in which they are shown, and what was left out. `num_unusable`: lines that are not
    metrics. `num_repeated`: lines of steps that an earlier line has reached, which a resumed run removes.
    `has_half_line`: whether the file ends within a line, because it is being written or the run was killed.

    `lines`: the lines that say how far the run has come and how it scored, in the order of the file: the last one, the
    last one with an epoch, the last one with each score, and the best one by each main score. `losses`: sums of the
    training loss.
    """

    curves: tuple[Curve, ...]
    num_unusable: int
    num_repeated: int
    has_half_line: bool = False
    lines: tuple[Line, ...] = ()
    losses: Means = field(default_factory=Means)

    def named(self, name: str) -> Curve | None:
        """Returns the curve with this name, or None."""
        return next((one for one in self.curves if one.name == name), None)


NO_CURVES = Curves(curves=(), num_unusable=0, num_repeated=0)


@dataclass(kw_only=True)
class Reading:
    """What the lines of a file have contained so far.

    `grown`: the curves by name. `kept`: the lines of `Curves.lines` and their numbers, by what each is kept for.
    `num_bytes`, `crc32`: the number and the checksum of the bytes that were read, up to the end of a line.
    """

    grown: dict[str, Growing] = field(default_factory=dict)
    losses: Means = field(default_factory=Means)
    kept: dict[str, tuple[int, Line]] = field(default_factory=dict)
    num_lines: int = 0
    num_unusable: int = 0
    num_repeated: int = 0
    last: int = -1
    num_bytes: int = 0
    crc32: int = 0
    has_half_line: bool = False
    _scores: set[str] = field(default_factory=set)
    _known: set[str] = field(default_factory=set)

    def read(self, file: BufferedReader) -> None:
        """Reads the lines from the file's position on."""
        # Imported here, because short commands need neither. pydantic's parser is five times as fast as Python's.
        from isal.isal_zlib import crc32  # noqa: PLC0415
        from pydantic_core import from_json  # noqa: PLC0415

        while text := file.readline(MOST_LINE_BYTES):
            if len(text) < MOST_LINE_BYTES and not text.endswith(b"\n"):
                self.has_half_line = True
                break
            line = object_by(from_json, text) if text.endswith(b"\n") else None
            self.num_bytes += len(text)
            self.crc32 = crc32(text, self.crc32)
            self.num_lines += 1
            if line is None or not is_step(line.get("step")):
                self.num_unusable += 1
            else:
                self._take(line, is_short=len(text) <= MOST_KEPT_BYTES)
            if self.num_lines % _LINES_A_CHECK == 0:
                self.losses.thin()
                for one in self.grown.values():
                    one.thin()

    def _take(self, line: Line, *, is_short: bool) -> None:
        step: int = line["step"]
        for name in line:
            if name not in self._known:
                self._learn(name)
        if is_short:
            self._keep(line)
        loss: Any = line.get("loss")
        if is_finite(loss):
            self.losses.add(step, float(loss))
        if step <= self.last:
            self.num_repeated += 1
            return
        self.last = step
        for name, own in self.grown.items():
            value = line.get(name, _MISSING)
            if type(value) is float and _LEAST <= value < _MOST:  # nearly all are
                own.steps.append(step)
                own.values.append(value)
            elif value is _MISSING:
                continue
            elif is_finite(value):
                own.steps.append(step)
                own.values.append(float(value) if abs(value) >= _LEAST else 0.0)
            else:
                own.num_not_finite += 1

    def _learn(self, name: str) -> None:
        if len(self._known) < _MOST_NAMES:
            self._known.add(name)
        if _SCORES.fullmatch(name) and len(self._scores) < MOST_SCORES:
            self._scores.add(name)
        is_shown = _SHOWN.fullmatch(name) or _GROUPS.fullmatch(name)
        if is_shown and name not in self.grown and len(self.grown) < MOST_CURVES:
            self.grown[name] = Growing()

    def _keep(self, line: Line) -> None:
        numbered = self.num_lines, line
        self.kept["last"] = numbered
        epoch: Any = line.get("epoch")
        if is_finite(epoch) and epoch > 0:
            self.kept["epoch"] = numbered
        for name in self._scores & line.keys():
            value = line[name]
            if not is_finite(value) or not 0 <= value <= 1:
                continue
            self.kept[f"last {name}"] = numbered
            best = self.kept.get(f"best {name}")
            if name in _MAIN_SCORES and (best is None or value > best[1][name]):
                self.kept[f"best {name}"] = numbered

    def curves(self) -> Curves:
        """Returns what was read."""
        kept = dict(self.kept.values())  # by number, since a line may be kept for several reasons
        curves = [
            Curve(name=name, steps=one.steps, values=one.values, num_not_finite=one.num_not_finite)
            for name, one in sorted(self.grown.items(), key=lambda item: _rank(item[0]))
            if one.steps
        ]
        return Curves(
            curves=tuple(curves),
            num_unusable=self.num_unusable,
            num_repeated=self.num_repeated,
            has_half_line=self.has_half_line,
            lines=tuple(kept[number] for number in sorted(kept)),
            losses=self.losses,
        )


def read_tail_of_curves(path: Path, *, most_bytes: int) -> Curves:
    """Returns the curves in the last `most_bytes` of a file, beginning with a whole line. Raises what `open_local_file`
    raises, except for a missing file, which has no curves."""
    reading = Reading()
    try:
        file = open_local_file(path)
    except FileNotFoundError:
        return NO_CURVES
    with file:
        size = file.seek(0, 2)
        file.seek(max(0, size - most_bytes))
        if size > most_bytes:
            file.readline(MOST_LINE_BYTES)
        reading.read(file)
    return reading.curves()


def _rank(name: str) -> tuple[int, str]:
    order = ("loss", "test_accuracy", "test_loss", "learning_rate", "grad_norm", "images_per_second", "data_wait_share")
    place = 2 if name.startswith("ranks/") else int(name == "time/other")  # after the parts of a step
    return (order.index(name), "") if name in order else (len(order) + place, name)
