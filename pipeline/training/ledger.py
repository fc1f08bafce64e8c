"""Where a run's wall time went: start-up, compute, data wait, checkpoint stall, evaluation. One line per save."""

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pipeline.training.json_lines import Line, is_finite, is_step, naming, read_lines
from pipeline.training.manifest import MANIFEST_NAME, CheckpointId, id_from_path

log = logging.getLogger(__name__)
Account = Literal["restarts", "startup", "compute", "data_wait", "checkpoint", "evaluation"]
ACCOUNTS: tuple[Account, ...] = ("restarts", "startup", "compute", "data_wait", "checkpoint", "evaluation")
FILE_NAME = "ledger.jsonl"
_MOST_GAP_SECONDS = 366 * 86400.0


class Ledger:
    """Seconds by account over the whole run; goodput is the share of compute.

    A continued run starts from the totals of its last line; `restarts` is the time since then: lost work, and the
    wait for the new start. `says`: whether this rank logs that lines were skipped.
    """

    def __init__(self, run_dir: Path, *, says: bool = False) -> None:
        self.seconds: dict[Account, float] = dict.fromkeys(ACCOUNTS, 0.0)
        last = last_line(run_dir, says=says)
        if last:
            self.seconds |= {account: float(last["seconds"][account]) for account in ACCOUNTS}
            gap = time.time() - float(last["unix_time"])  # says nothing if the clock was set in between
            self.seconds["restarts"] += gap if 0 < gap < _MOST_GAP_SECONDS else 0.0

    @contextmanager
    def time(self, account: Account) -> Iterator[None]:
        """Adds the time spent inside to one account."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[account] += time.monotonic() - began

    def record(self) -> dict[str, float]:
        """Rounded seconds by account, their sum and the goodput (share of compute)."""
        total = sum(self.seconds.values())
        rounded: dict[str, float] = {account: round(spent, 3) for account, spent in self.seconds.items()}
        return {
            **rounded,
            "total": round(total, 3),
            "goodput": round(self.seconds["compute"] / max(total, 1e-9), 4),
        }

    def append(self, run_dir: Path, *, step: int, attempt: str) -> None:
        """One line of RUN/ledger.jsonl: the run's totals up to `step`."""
        line = {"step": step, "attempt": attempt, "unix_time": round(time.time(), 3), "seconds": self.record()}
        path = run_dir / FILE_NAME
        end = "" if _ends_with_a_line(path) else "\n"
        with naming(path), path.open("a") as file:
            file.write(f"{end}{json.dumps(line)}\n")


def last_line(run_dir: Path, *, says: bool = False) -> dict[str, Any]:
    """The last complete line of a run's ledger; empty if no checkpoint was ever committed. `says`: log how many lines
    were skipped, which a run that was killed while writing leaves half-written."""
    path = run_dir / FILE_NAME
    lines = read_lines(path, is_usable=_is_usable)
    if says and lines.num_unusable:
        log.warning("%s: skipped %d lines that are no lines of a ledger", path, lines.num_unusable)
    return lines.objects[-1] if lines.objects else {}


def last_saved(run_dir: Path) -> CheckpointId | None:
    """The checkpoint of the last complete line; None if there is none, or it does not name one."""
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
        and all(is_finite(seconds.get(account)) and seconds[account] >= 0 for account in ACCOUNTS)
    )


def _ends_with_a_line(path: Path) -> bool:
    """Whether another line may follow: not after a half-written one, which would spoil it."""
    if not path.exists() or not path.stat().st_size:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
