"""Small real training runs on real processes, for tests."""

import json
import os
from pathlib import Path
from typing import Any

from jobs.launch import Ranks
from pipeline.training.metrics import read_metrics
from tests.rigs.forked_ranks import fork_ranks
from tests.rigs.forks import ONE_THREAD

STEPS = 16
TINY = (
    *("--model.width", "32", "--model.depth", "2", "--model.mlp-width", "64", "--model.num-heads", "2"),
    *("--steps", str(STEPS), "--global-batch", "32", "--schedule.warmup-steps", "2"),
    *("--checkpoint.every-steps", "4", "--checkpoint.keep-newest", "4", "--device", "cpu"),
)
AT_ONCE = ("--checkpoint.asynchronous", "off")  # a step after a save is then a step after its commit


def pretrain_words(url: str, run_dir: Path, *more: str) -> list[str]:
    """Arguments of a `patchline pretrain` that takes a few seconds."""
    return ["pretrain", "digits_smoke", "--data.url", url, "--run-dir", str(run_dir), *TINY, *more]


def start(words: list[str], *, num_ranks: int, log_dir: Path) -> Ranks:
    """Starts `patchline WORDS` on real processes; ranks above 0 write to log_dir."""
    return fork_ranks(words, num_ranks=num_ranks, environ={**ONE_THREAD, **os.environ}, log_dir=log_dir)


def run(words: list[str], *, num_ranks: int, log_dir: Path) -> int:
    """Runs `patchline WORDS` to its end and returns the exit code."""
    return start(words, num_ranks=num_ranks, log_dir=log_dir).wait()


class FinishedRuns:
    """Finished runs that several tests read or copy, each trained once per session. Do not change them."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self._made: dict[tuple[int, tuple[str, ...]], Path] = {}

    def get(self, num_ranks: int, *options: str) -> Path:
        """The run directory of the tiny run with `num_ranks` ranks and these options."""
        key = num_ranks, options
        if key not in self._made:
            run_dir = self.folder / f"run-{len(self._made)}"
            logs = self.folder / f"logs-{len(self._made)}"
            ranks = start(pretrain_words(self.url, run_dir, *options), num_ranks=num_ranks, log_dir=logs)
            if ranks.wait() != 0:
                codes = [process.returncode for process in ranks.processes]
                said = "\n".join(log.read_text() for log in logs.glob("rank-*.log"))
                raise AssertionError(
                    f"{num_ranks} ranks with {options} ended with {codes}; those above 0 said:\n{said}"
                )
            self._made[key] = run_dir
        return self._made[key]


def losses(run_dir: Path) -> dict[int, float]:
    """The loss of every step in metrics.jsonl; a step that occurs twice is an error."""
    lines: list[dict[str, Any]] = read_metrics(run_dir)
    steps = [int(line["step"]) for line in lines]
    if len(steps) != len(set(steps)):
        raise AssertionError(f"steps written twice in {run_dir}: {steps}")
    return {int(line["step"]): float(line["loss"]) for line in lines}


def resumed_steps(run_dir: Path) -> list[int]:
    """The step that each start of the run resumed from, 0 for scratch, in order."""
    attempts = sorted((run_dir / "checkpoints" / "attempts").glob("*.json"))
    origins = [json.loads(attempt.read_text())["resumed_from"] for attempt in attempts]
    return [int(origin["step"]) if origin else 0 for origin in origins]
