"""Interrupts a training command by three different faults, and compares the run with its uninterrupted twin.

    python -m tests.soak.interrupted --twin runs/twin --run-dir runs/interrupted --out result.json -- \
        patchline pretrain cifar10_small --data.url data/cifar10 --processes 2 --hang.step-seconds 60

Each fault is STEP:KIND, in rising order, and the same command starts the run again:

    killed-rank   SIGKILL to the last rank, as by the out-of-memory killer
    power-cut     SIGKILL to every process when a checkpoint's first file is there
    stopped-rank  SIGSTOP to the last rank; the other ranks must notice it by themselves

The twin has run the same command, with another --run-dir, and may still be running: what both have is compared. The
result: for each fault, when it came, how the command ended, where it continued; the first steps and tensors that
differ. The exit code is 0 if nothing differs. Runs of days are driven as well as short ones: what is waited for is read
from the run directory.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoints.attempts import read_attempts
from pipeline.runs.comparison import StoredRun, compare_checkpoints, different_losses
from pipeline.training.reporting.metrics import read_metrics
from shards.store import open_store

KINDS = ("killed-rank", "power-cut", "stopped-rank")
FAULTS = ("1100:killed-rank", "2000:power-cut", "2900:stopped-rank")
_POLL_SECONDS = 0.02
_DEAD_SECONDS = 900.0  # to end by itself after a fault


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One of KINDS, once a line of `step` or a later one is in the metrics."""

    step: int
    kind: str


def fault_of(text: str) -> Fault:
    """ValueError for what is not STEP:KIND."""
    step, _, kind = text.partition(":")
    if kind not in KINDS:
        raise ValueError(f"{text!r} is not STEP:KIND; kinds are {', '.join(KINDS)}")
    return Fault(step=int(step), kind=kind)


class Interrupted:
    """A command that is started, and the processes of its run."""

    def __init__(self, words: Sequence[str], run_dir: Path) -> None:
        self._run_dir, self._words, self._pause = run_dir, [*words, "--run-dir", str(run_dir)], threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """In a session of its own: a power cut ends all of it."""
        self._process = subprocess.Popen(self._words, start_new_session=True)

    def last_step(self) -> int:
        """Of the lines in its metrics, 0 before the first."""
        try:
            return max((int(line["step"]) for line in read_metrics(self._run_dir)), default=0)
        except FileNotFoundError:
            return 0

    def inflict(self, fault: Fault) -> dict[str, object]:
        """Waits for the fault's step, inflicts it, and waits for the command's end."""
        self._await_step(fault.step)
        saved, pids = self._files(), self._pids()
        while fault.kind == "power-cut" and not self._files() - saved:
            self._check()
            self._pause.wait(_POLL_SECONDS / 10)
        began = time.monotonic()
        if fault.kind == "power-cut":
            for pid in (self.process.pid, *pids):
                os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pids[-1], signal.SIGKILL if fault.kind == "killed-rank" else signal.SIGSTOP)
        step = self.last_step()
        code = self.process.wait(_DEAD_SECONDS)
        seconds = round(time.monotonic() - began, 1)
        return {"fault": fault.kind, "after_step": step, "exit_code": code, "seconds_to_the_end": seconds}

    def wait(self) -> int:
        """For the command's own end."""
        return self.process.wait()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The command."""
        assert self._process is not None
        return self._process

    def _await_step(self, step: int) -> None:
        while self.last_step() < step:
            self._check()
            self._pause.wait(1.0)

    def _check(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"the command ended with {self.process.returncode} before its fault")

    def _files(self) -> set[Path]:
        return set((self._run_dir / "checkpoints").glob("step-*/*/*"))

    def _pids(self) -> list[int]:
        """Of the ranks, in their order: the command's own children."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ranks: dict[int, int] = {}
        for child in map(int, children):
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            ranks |= {int(each.removeprefix(b"RANK=")): child for each in variables if each.startswith(b"RANK=")}
        return [ranks[rank] for rank in sorted(ranks)]


def comparison(twin: Path, run_dir: Path) -> dict[str, object]:
    """What both runs have: losses and other values of each step, and the tensors of their common checkpoints."""
    expected, found = (StoredRun(run_dir=each, store=open_store(str(each / "checkpoints"))) for each in (twin, run_dir))
    steps = [set(each.losses()[0].tolist()) for each in (expected, found)]
    last = min(map(max, steps))
    losses = [each for each in different_losses(expected, found)[1] if each.step <= last]
    common = sorted(expected.checkpoints().keys() & found.checkpoints().keys())
    compared = [compare_checkpoints(expected, found, step=step) for step in common]
    return {
        "lines_compared": sum(step <= last for step in steps[0] & steps[1]),
        "last_step": last,
        "first_different_loss": losses[0].step if losses else None,
        "checkpoints_compared": common,
        "tensors_compared": sum(each.num_tensors for each in compared),
        "first_different_tensor": next((f"{c.first.slot} {c.first.name}" for c in compared if c.first), None),
        "accuracy": {each.name: _accuracies(each).get(last) for each in (twin, run_dir)},
        "different_accuracies": sorted(
            step
            for step, value in _accuracies(run_dir).items()
            if step <= last and _accuracies(twin).get(step) != value
        ),
    }


def _accuracies(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["test_accuracy"] for line in read_metrics(run_dir) if "test_accuracy" in line}


def main() -> int:
    """0 if the run equals its twin as far as both went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--twin", type=Path, required=True)
    parser.add_argument("--faults", type=fault_of, nargs="*", default=[fault_of(each) for each in FAULTS])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("words", nargs="+", help="the command, after --")
    options = parser.parse_args()
    run = Interrupted(options.words, options.run_dir)
    faults = []
    for fault in options.faults:
        run.start()
        faults.append(run.inflict(fault))
        sys.stderr.write(f"{faults[-1]}\n")
    run.start()
    code = run.wait()
    origins = [each.resumed_from for each in read_attempts(open_store(str(options.run_dir / "checkpoints")))]
    compared = comparison(options.twin, options.run_dir)
    result = {
        "command": " ".join(options.words),
        "faults": faults,
        "continued_from": [origin.step if origin else 0 for origin in origins][1:],
        "exit_code": code,
        **compared,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    is_same = not (compared["first_different_loss"] or compared["first_different_tensor"])
    return 0 if is_same and not compared["different_accuracies"] and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
