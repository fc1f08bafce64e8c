"""Reads the lines of some steps out of metrics.jsonl, a few at a time, while a run writes it."""

import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.training.reporting.metrics import tag_of
from pipeline.training.settings.loggers import Line
from shards.files.json_lines import is_finite, is_step, object_in
from shards.local_file import open_local_file

_STEP = re.compile(rb'\{"step": (\d{1,18})[,}]')  # as Metrics writes it


def lines_between(path: Path, *, after: int, last: int, most_at_once: int) -> Iterator[list[Line]]:
    """The lines of the steps `after` + 1 to `last`, under the names that their values have in TensorBoard."""
    found: list[Line] = []
    with open_local_file(path) as file:
        for text in file:
            quick = _STEP.match(text)
            if quick and not after < int(quick[1]) <= last:
                continue
            line = _line(text)
            if line and after < line.step <= last:
                found.append(line)
            if len(found) == most_at_once:
                yield found
                found = []
    if found:
        yield found


def _is_float(value: object) -> bool:
    """Whether it is a number that a float holds; NaN and infinity are."""
    return is_finite(value) or (isinstance(value, float) and not math.isfinite(value))


def _line(text: bytes) -> Line | None:
    """None if it is no line of metrics, such as one that is being written."""
    values = object_in(text) if text.endswith(b"\n") else None
    if values is None or not is_step(values.get("step")):
        return None
    step: int = values.pop("step")
    tagged = {tag_of(name): float(value) for name, value in values.items() if _is_float(value)}
    return Line(step=step, values=tagged, time_ms=time.time_ns() // 1_000_000)
