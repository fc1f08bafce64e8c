"""Kills a real run on real processes at given moments, and starts it again with the same command."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jobs.ranks import Ranks
from tests.rigs.training import start

Moment = Callable[[Path], bool]
_POLL_SECONDS = 0.01
_DEADLINE_SECONDS = 240.0


def attempts_at_least(count: int) -> Moment:
    """True once the run has been started `count` times and each start is recorded."""
    return lambda run_dir: len(list((run_dir / "checkpoints" / "attempts").glob("*.json"))) >= count


@dataclass(frozen=True)
class StepAtLeast:
    """See `step_at_least`."""

    step: int

    def __call__(self, run_dir: Path) -> bool:
        """Whether it is reached."""
        path = run_dir / "metrics.jsonl"
        return path.exists() and f'"step": {self.step},' in path.read_text()


def step_at_least(step: int) -> StepAtLeast:
    """True once metrics.jsonl has the line of `step`, whole or partly written."""
    return StepAtLeast(step)


def saving(step: int) -> Moment:
    """True once any file of the checkpoint of `step` exists: its files are being written, or have just been."""
    return lambda run_dir: any((run_dir / "checkpoints").glob(f"step-{step:08d}/*/*"))


def sent_after_a_checkpoint(last_sent: Callable[[], int]) -> Moment:
    """True once a service has a step after the run's only checkpoint, which is asked for at step 20."""

    def reached(run_dir: Path) -> bool:
        saved = list((run_dir / "checkpoints").glob("step-*/*/MANIFEST.json"))
        if saved:
            return last_sent() > int(saved[0].parts[-3].removeprefix("step-"))
        request = run_dir / "SAVE"
        if step_at_least(20)(run_dir) and not request.exists():
            request.touch()
        return False

    return reached


def after_seconds(seconds: float) -> Moment:
    """True `seconds` after the first call."""
    began: list[float] = []

    def passed(_: Path) -> bool:
        began.append(time.monotonic())
        return began[-1] - began[0] >= seconds

    return passed


def run_and_kill(words: list[str], run_dir: Path, *, moment: Moment, num_ranks: int, log_dir: Path) -> bool:
    """Starts the command and kills all ranks (SIGKILL) at the moment; False if the run ended before it. A run that is
    to be killed after a step waits there: it does not train on while a busy machine holds up the kill."""
    stands_after = moment.step if isinstance(moment, StepAtLeast) else 0
    ranks = start(words, num_ranks=num_ranks, log_dir=log_dir, stands_after=stands_after)
    try:
        return wait_until(ranks, moment, run_dir)
    finally:
        ranks.kill()


def wait_until(ranks: Ranks, moment: Moment, run_dir: Path) -> bool:
    """Waits for the moment; False if the ranks ended before it."""
    pause = threading.Event()
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while ranks.poll():
        if moment(run_dir):
            return True
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so within {_DEADLINE_SECONDS:.0f} s, and the ranks still run")
        pause.wait(_POLL_SECONDS)
    return False
