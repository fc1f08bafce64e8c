"""The ledger of a run: where its wall time went (restarts, pauses, start-up, compute, data wait, checkpoint stall,
evaluation). It gets one line per save."""

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from shards.files.local_files import KeptWrites, Line, append_line, is_finite, is_step, read_lines
from shards.output.quantities import DAY_SECONDS

if TYPE_CHECKING:
    from pipeline.checkpoints.manifest import CheckpointId

log = logging.getLogger(__name__)
Account = Literal["restarts", "paused", "startup", "compute", "data_wait", "checkpoint", "evaluation"]
ACCOUNTS: tuple[Account, ...] = ("restarts", "paused", "startup", "compute", "data_wait", "checkpoint", "evaluation")
FILE_NAME = "ledger.jsonl"
COMMIT = "commit_seconds"
NUM_SAVES = 5
_MOST_GAP_SECONDS = 366.0 * DAY_SECONDS
_ROUNDING_SECONDS = 0.01


class Ledger:
    """The seconds of each account over the whole run. The goodput is the share of `compute` in all accounts but
    `paused`.

    A run that resumes continues from the totals of its last line. The time since that line counts as `restarts`: lost
    work, and the wait for the new start. After a pause (`Cause.is_pause`), it counts as `paused` instead. `says`:
    whether this rank logs that lines were skipped.
    """

    def __init__(self, run_dir: Path, *, says: bool = False) -> None:
        self.run_dir = run_dir
        self._writes = KeptWrites(run_dir / FILE_NAME)
        self.seconds: dict[Account, float] = dict.fromkeys(ACCOUNTS, 0.0)
        self._gap_seconds = 0.0  # between the last line and the last call of `resume`
        self.resume(says=says)

    def resume(self, *, says: bool = False) -> None:
        """Continues from the last line. Called when a run starts, and after it has gone back to a checkpoint."""
        last, paused = last_line(self.run_dir, says=says), self.seconds["paused"]
        if last:
            self.seconds |= {account: float(last["seconds"][account]) for account in ACCOUNTS}
            gap = time.time() - float(last["unix_time"])  # meaningless if the clock was set in between
            self._gap_seconds = gap if 0 < gap < _MOST_GAP_SECONDS else 0.0
            self.seconds["restarts"] += self._gap_seconds
            self.count_as_pause(paused - self.seconds["paused"])  # after a rewind, the pause before this start

    def count_as_pause(self, seconds: float = math.inf) -> None:
        """Moves the time between the last line and this start, at most `seconds` of it, from `restarts` to `paused`.
        Called if the run was paused."""
        moved = max(0.0, min(seconds, self._gap_seconds))
        self.seconds["restarts"] -= moved
        self.seconds["paused"] += moved
        self._gap_seconds -= moved

    def complete(self, checkpoint: "CheckpointId", seconds: object) -> None:
        """Adds the missing line of the checkpoint from which the run resumes, if the run was killed between the commit
        and that line, so that the work before the commit does not count as lost. `seconds`: the result of `record` in
        the checkpoint's manifest; ignored if it cannot follow the last line."""
        last = last_line(self.run_dir)
        if not last or not isinstance(seconds, dict) or not _are_seconds(seconds):
            return
        more = [float(seconds[account]) - float(last["seconds"][account]) for account in ACCOUNTS]
        unix_time = float(last["unix_time"]) + sum(more)
        if min(more) < -_ROUNDING_SECONDS or sum(more) < _ROUNDING_SECONDS or unix_time > time.time():
            return
        own = {account: float(seconds[account]) for account in ACCOUNTS}
        line = {"step": checkpoint.step, "attempt": checkpoint.attempt, "unix_time": round(unix_time, 3)}
        append_line(self.run_dir / FILE_NAME, {**line, "seconds": _record(own)})
        self.resume()

    @contextmanager
    def time(self, account: Account) -> Iterator[None]:
        """Adds the time spent inside the `with` block to one account."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[account] += time.monotonic() - began

    def record(self) -> dict[str, float]:
        """Returns the seconds of each account, rounded, with their sum and the goodput."""
        return _record(self.seconds)

    def append(self, run_dir: Path, *, step: int, attempt: str, **more: Mapping[str, int] | float) -> None:
        """Appends a line to RUN/ledger.jsonl: the run's totals up to the checkpoint of `step`. `more`: either
        `commit_seconds`, which `save_seconds` reads, or the details of a rewind, which no code reads. If the disk is
        full, the line is written later."""
        line = {"step": step, "attempt": attempt, "unix_time": round(time.time(), 3), "seconds": self.record()}
        self._writes.do(partial(append_line, run_dir / FILE_NAME, {**line, **more}))


def _record(seconds: Mapping[Account, float]) -> dict[str, float]:
    total = sum(seconds.values())
    rounded: dict[str, float] = {account: round(spent, 3) for account, spent in seconds.items()}
    return {
        **rounded,
        "total": round(total, 3),
        "goodput": round(goodput(seconds["compute"], total - seconds["paused"]), 4),
    }


def goodput(compute_seconds: float, running_seconds: float) -> float:
    """Returns the share of a run's seconds in which it made updates that were kept. `running_seconds`: without
    pauses."""
    return compute_seconds / max(running_seconds, 1e-9)


def last_line(run_dir: Path, *, says: bool = False) -> dict[str, Any]:
    """Returns the last complete line of a run's ledger; empty if there is none. `says`: whether to log how many lines
    were skipped. A run that is killed while it writes leaves an incomplete line."""
    path = run_dir / FILE_NAME
    lines = read_lines(path, is_usable=_is_usable)
    if says and lines.num_unusable:
        log.warning("%s: skipped %d lines that are no lines of a ledger", path, lines.num_unusable)
    return lines.objects[-1] if lines.objects else {}


def save_seconds(run_dir: Path) -> float:
    """Returns how long a save of the run takes, from its beginning until all ranks know of the commit: the median of
    the last five, since one of them may have waited for a storage that was away. Returns 0 if there is none."""
    lines = read_lines(
        run_dir / FILE_NAME, is_usable=lambda line: is_finite(line.get(COMMIT)), containing=COMMIT.encode()
    )
    return median(float(line[COMMIT]) for line in lines.objects[-NUM_SAVES:]) if lines.objects else 0.0


def last_saved(run_dir: Path) -> "CheckpointId | None":
    """Returns the checkpoint of the last complete line. Returns None if there is no such line, or if it names no
    checkpoint."""
    # `ls` needs only the rest of this module, and the manifest takes long to load.
    from pipeline.checkpoints.manifest import MANIFEST_NAME, CheckpointId, id_from_path  # noqa: PLC0415

    last = last_line(run_dir)
    if not last:
        return None
    found = CheckpointId(step=last["step"], attempt=str(last.get("attempt")))
    return id_from_path(f"{found.folder}/{MANIFEST_NAME}")


def _is_usable(line: Line) -> bool:
    seconds = line.get("seconds")
    return (
        is_step(line.get("step"))
        and is_finite(line.get("unix_time"))
        and isinstance(seconds, dict)
        and _are_seconds(seconds)
    )


def _are_seconds(found: Mapping[str, Any]) -> bool:
    return all(is_finite(found.get(account)) and found[account] >= 0 for account in ACCOUNTS)
