"""Small real training runs on real processes, for tests."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from jobs import exit_codes
from jobs.ranks import Ranks
from pipeline.training.reporting.metrics import read_metrics
from pipeline.training.zero.engine import Engine
from pipeline.training.zero.flat_blocks import views_of
from tests.rigs.cpu_seconds import METER
from tests.rigs.forked_ranks import fork_ranks
from tests.rigs.forks import ONE_THREAD
from tests.rigs.made_once import MadeOnce

STEPS = 16
TINY = (
    *("--model.width", "32", "--model.depth", "2", "--model.mlp-width", "64", "--model.num-heads", "2"),
    *("--steps", str(STEPS), "--global-batch", "32", "--schedule.warmup-steps", "2"),
    *("--checkpoint.every-steps", "4", "--checkpoint.keep-newest", "4", "--device", "cpu"),
)
DIVERGES = (
    *("--schedule.learning-rate", "1e30", "--clip-norm", "0", "--max-skipped-updates", "2"),
    *("--engine.precision", "fp32", "--checkpoint.every-steps", "1"),
)
AT_ONCE = ("--checkpoint.asynchronous", "off")  # a step after a save is then a step after its commit


def pretrain_words(url: str, run_dir: Path, *more: str) -> list[str]:
    """Arguments of a `patchline pretrain` that takes a few seconds."""
    return ["pretrain", "digits_smoke", "--data.url", url, "--run-dir", str(run_dir), *TINY, *more]


def start(words: list[str], *, num_ranks: int, log_dir: Path, stands_after: int = 0) -> Ranks:
    """Starts `patchline WORDS` on real processes; ranks above 0 write to log_dir. `stands_after`: see `fork_ranks`."""
    environ = {**ONE_THREAD, **os.environ}
    return fork_ranks(words, num_ranks=num_ranks, environ=environ, log_dir=log_dir, stands_after=stands_after)


def run(words: list[str], *, num_ranks: int, log_dir: Path) -> int:
    """Runs `patchline WORDS` to its end and returns the exit code."""
    return start(words, num_ranks=num_ranks, log_dir=log_dir).wait()


class FinishedRuns:
    """Ended runs that several tests read or copy, each trained once per run of pytest. Do not change them: a test that
    needs to change one copies it."""

    def __init__(self, made_once: MadeOnce, url: str) -> None:
        self.url = url
        self._made_once = made_once

    def get(self, num_ranks: int, *options: str, code: int = exit_codes.DONE) -> Path:
        """The run directory of the tiny run with `num_ranks` ranks and these options, which ended with `code`."""
        key = json.dumps([num_ranks, flags_in(options), code])
        name = f"run-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        return self._made_once.folder(name, partial(self._train, num_ranks, options, code)) / "run"

    def diverged(self) -> Path:
        """A run whose loss is not finite after its first updates, and which the guard ended. It saved every step."""
        return self.get(1, *DIVERGES, code=exit_codes.WILL_NOT_SUCCEED)

    def scored(self) -> Path:
        """A run with the scores of its last step: on the digits that it was trained on, and of two shots of them."""
        fewshot = ("--fewshot.url", self.url, "--fewshot.test-url", self.url, "--fewshot.shots", "2")
        return self.get(1, "--evaluation.url", self.url, *fewshot)

    def _train(self, num_ranks: int, options: Sequence[str], code: int, folder: Path) -> None:
        with METER.apart(f"tests/rigs::{num_ranks} ranks {' '.join(options)}"[:150], "run"):
            words = pretrain_words(self.url, folder / "run", *options)
            ranks = start(words, num_ranks=num_ranks, log_dir=folder / "logs")
            if ranks.wait() != code:
                codes = [process.returncode for process in ranks.processes]
                said = "\n".join(log.read_text() for log in (folder / "logs").glob("rank-*.log"))
                raise AssertionError(
                    f"{num_ranks} ranks with {options} ended with {codes}, not {code}; those above 0 said:\n{said}"
                )


def flags_in(options: Sequence[str]) -> list[list[str]]:
    """Each flag with its values, in the order of the names and without a default: the same run has the same ones."""
    flags: list[list[str]] = []
    for word in options:
        if word.startswith("--"):
            flags.append([word])
        else:
            flags[-1].append(word)
    return sorted(flag for flag in flags if flag != ["--engine.zero-stage", "1"])


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


def weights_in_model(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights in an engine's model by name, in its own precision. Not for stage 3, where the model has them
    only while it runs."""
    for name, tensor in engine.module.named_parameters():
        yield from views_of(tensor.detach(), engine.layout[name])
