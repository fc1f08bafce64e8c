"""What a start takes, part by part, from the beginning of the process to the first step.

Rank 0 writes it into RUN/starts.jsonl once its first step is launched, as a line of its own: the line of the start
itself is written earlier, so that a start that is killed is on record, too. Loads no torch.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pipeline.runs.starts import FILE_NAME, age_of_process
from shards.files.json_lines import Line, append_line, is_finite, read_lines

StartPart = Literal["imports", "data", "rendezvous", "checkpoint", "model", "load", "loop", "first_batch", "first_step"]
# Each ends where the next begins. `imports`: from the kernel's start of the process to the job, with the libraries;
# `data`: the job is checked against its data, and torch.compile is tried; `checkpoint`: found and verified; `model`:
# with the check of gradients and DeepSpeed; `load`: the checkpoint's tensors, or initial weights; `loop`: curves,
# batches and saves; `first_step`: until it is launched, which on a CPU is its end; blocks are compiled there.
START_PARTS: tuple[StartPart, ...] = (
    *("imports", "data", "rendezvous", "checkpoint", "model", "load", "loop", "first_batch", "first_step"),
)


class StartParts:
    """A stopwatch of one start, made when the imports have ended. Parts that a start does not have take no time."""

    def __init__(self) -> None:
        self.seconds: dict[StartPart, float] = {"imports": age_of_process()}
        self._until, self._is_over = time.monotonic(), False

    def ends(self, part: StartPart) -> None:
        """A part ends now; it began when the one before it ended."""
        began, self._until = self._until, time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + self._until - began

    def has_begun(self, run_dir: Path, *, attempt: str) -> None:
        """A step has been launched: after the first, appends a line to RUN/starts.jsonl."""
        if self._is_over:
            return
        self._is_over = True
        self.ends("first_step")
        seconds = {part: round(self.seconds.get(part, 0.0), 3) for part in START_PARTS}
        append_line(run_dir / FILE_NAME, {"attempt": attempt, "unix_time": round(time.time(), 3), "parts": seconds})


def read_start_parts(run_dir: Path) -> list[Line]:
    """The lines of RUN/starts.jsonl with the parts of a start: `attempt`, `unix_time` of its first step, `parts` in
    seconds."""
    return read_lines(run_dir / FILE_NAME, is_usable=_has_parts).objects


def _has_parts(line: Mapping[str, Any]) -> bool:
    parts = line.get("parts")
    return (
        isinstance(line.get("attempt"), str)
        and is_finite(line.get("unix_time"))
        and isinstance(parts, dict)
        and all(is_finite(parts.get(part)) and parts[part] >= 0 for part in START_PARTS)
    )
