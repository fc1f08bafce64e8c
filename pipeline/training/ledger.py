"""Where a run's wall time went: start-up, compute, data wait, checkpoint stall, evaluation. One line a save."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

Account = Literal["startup", "compute", "data_wait", "checkpoint", "evaluation"]
ACCOUNTS: tuple[Account, ...] = ("startup", "compute", "data_wait", "checkpoint", "evaluation")


class Ledger:
    """Seconds by account since this process started; goodput is the share of compute."""

    def __init__(self) -> None:
        self.seconds: dict[Account, float] = dict.fromkeys(ACCOUNTS, 0.0)

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
        """One line of RUN/ledger.jsonl: this attempt's totals up to `step`."""
        with (run_dir / "ledger.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "attempt": attempt, "seconds": self.record()}) + "\n")
