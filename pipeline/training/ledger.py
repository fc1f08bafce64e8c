"""Where a run's wall time went: start-up, compute, data wait, checkpoint stall, evaluation. One line per save."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

Account = Literal["restarts", "startup", "compute", "data_wait", "checkpoint", "evaluation"]
ACCOUNTS: tuple[Account, ...] = ("restarts", "startup", "compute", "data_wait", "checkpoint", "evaluation")
FILE_NAME = "ledger.jsonl"
_MOST_GAP_SECONDS = 366 * 86400.0


class Ledger:
    """Seconds by account over the whole run; goodput is the share of compute.

    A continued run starts from the totals of its last line; `restarts` is the time since then: lost work, and the
    wait for the new start.
    """

    def __init__(self, run_dir: Path) -> None:
        self.seconds: dict[Account, float] = dict.fromkeys(ACCOUNTS, 0.0)
        last = last_line(run_dir)
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
        with (run_dir / FILE_NAME).open("a") as file:
            file.write(json.dumps(line) + "\n")


def last_line(run_dir: Path) -> dict[str, Any]:
    """The last complete line of a run's ledger; empty if no checkpoint was ever committed."""
    path = run_dir / FILE_NAME
    lines = path.read_text().splitlines() if path.exists() else []
    for line in reversed(lines):
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:  # half-written when the run was killed
            continue
        return found
    return {}
