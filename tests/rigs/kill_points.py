"""Kills parts of a real run at random moments: all of it, one of its ranks, or the writer of one rank's checkpoints."""

import os
import random
import signal
import threading
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jobs import exit_codes
from pipeline.checkpoints.attempts import list_committed
from pipeline.checkpoints.manifest import MANIFEST_NAME, manifest_from_json
from pipeline.checkpoints.rank_file_in import RankFiles
from shards.store import open_store
from tests.rigs.kills import step_at_least, wait_until
from tests.rigs.training import losses, pretrain_words, run, start
from tests.rigs.writers import writers_of

Victim = Literal["all", "rank", "writer"]
VICTIMS: tuple[Victim, ...] = ("all", "rank", "writer")
NUM_RANKS, STEPS, SAVE_STEPS = 2, 40, 2
_MOST_DELAY_SECONDS = 0.03  # after a step: a few steps of so small a model
_MOST_STEPS_MORE = 4  # before all are killed
COMBINATIONS = tuple((stage, name) for stage in (1, 2, 3) for name in ("adamw", "sgd"))
COMBINATIONS += ((1, "muon"), (2, "muon"))


def words_of(url: str, run_dir: Path, stage: int, optimizer: str) -> list[str]:
    """A run with dropout, mixup and EMA, that saves every other step in the background."""
    rate = "0.03" if optimizer == "sgd" else "1e-3"
    return pretrain_words(
        url,
        run_dir,
        *("--steps", str(STEPS), "--checkpoint.every-steps", str(SAVE_STEPS), "--checkpoint.asynchronous", "on"),
        *("--engine.zero-stage", str(stage), "--engine.precision", "fp32"),
        *("--optimizer.name", optimizer, "--schedule.learning-rate", rate),
        *("--model.dropout", "0.1", "--data.mixup.alpha", "0.2", "--ema-decay", "0.9"),
    )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run came to: the loss of each step, and the checksum of its weights."""

    losses: dict[int, float]
    weights: int


def outcome_of(run_dir: Path) -> Outcome:
    """Of a finished run."""
    weights = (run_dir / "weights" / "model.safetensors").read_bytes()
    return Outcome(losses=losses(run_dir), weights=zlib.crc32(weights))


def unbroken(url: str, run_dir: Path, stage: int, optimizer: str) -> Outcome:
    """The run without any kill."""
    assert run(words_of(url, run_dir, stage, optimizer), num_ranks=NUM_RANKS, log_dir=run_dir.parent) == 0
    return outcome_of(run_dir)


@dataclass(kw_only=True)
class KilledRun:
    """One run, killed again and again. `faults`: what was wrong; `kills`: who was killed, after which step."""

    words: Sequence[str]
    run_dir: Path
    draw: random.Random
    kills: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def kill(self, victim: Victim) -> bool:
        """Starts the run and kills the victim after a random step that was not yet committed; False if none is left.
        After the death of all, or of one rank, the newest committed checkpoint must verify; without a writer, the run
        must go on to its end."""
        first = self._newest() + 1
        if first >= STEPS or (self.run_dir / "DONE").exists():
            return False
        step, delay = self.draw.randrange(first, STEPS), self.draw.uniform(0, _MOST_DELAY_SECONDS)
        # A busy machine may hold up the kill of all. Whoever outlives a rank or a writer must not stand.
        stands_after = min(step + _MOST_STEPS_MORE, STEPS) if victim == "all" else 0
        words, log_dir = list(self.words), self.run_dir.parent
        ranks = start(words, num_ranks=NUM_RANKS, log_dir=log_dir, stands_after=stands_after)
        pids = [process.pid for process in ranks.processes]
        try:
            if not wait_until(ranks, step_at_least(step), self.run_dir):
                return False
            threading.Event().wait(delay)
            own = writers_of(pids[self.draw.randrange(NUM_RANKS)])
            self._strike(victim, pids, own)
            if victim == "all":
                ranks.kill()
            code = ranks.wait()
        finally:
            ranks.kill()
        self.kills.append(f"{victim} after step {step}")
        if victim == "writer" and code != exit_codes.DONE:
            self.faults.append(f"without a writer the run ended with {code}")
        self._verify()
        return True

    def finish(self, expected: Outcome) -> bool:
        """Runs to the end; whether it came to what the unbroken run came to."""
        code = run(list(self.words), num_ranks=NUM_RANKS, log_dir=self.run_dir.parent)
        if code != exit_codes.DONE:
            self.faults.append(f"the last start ended with {code}")
        elif outcome_of(self.run_dir) != expected:
            self.faults.append("losses or weights differ from those of the unbroken run")
        return not self.faults

    def _strike(self, victim: Victim, pids: Sequence[int], writers: Sequence[int]) -> None:
        with suppress(ProcessLookupError):
            if victim == "rank":
                os.kill(pids[self.draw.randrange(NUM_RANKS)], signal.SIGKILL)
            for pid in writers if victim == "writer" else ():
                os.kill(pid, signal.SIGKILL)

    def _newest(self) -> int:
        store = open_store(str(self.run_dir / "checkpoints"))
        return max((each.step for each in list_committed(store)), default=0)

    def _verify(self) -> None:
        store = open_store(str(self.run_dir / "checkpoints"))
        newest = max(list_committed(store), key=lambda each: each.step, default=None)
        if newest is None:
            return
        manifest = manifest_from_json(store.read(f"{newest.folder}/{MANIFEST_NAME}"))
        files = RankFiles(store, manifest)
        for name in manifest.files:
            try:
                files.verify(name)
            except (ValueError, EOFError) as error:
                self.faults.append(f"{newest.folder}/{name}: {error}")
