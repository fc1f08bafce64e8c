"""Runs of `patchline verify-resume`: real ranks that train to the end, or are killed with SIGKILL and continued."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from jobs import exit_codes
from jobs.ranks import Ranks, log_of
from pipeline.checkpoints.attempts import read_attempts
from pipeline.runs.comparison import StoredRun
from pipeline.training.reporting.metrics import read_metrics
from shards.errors import TransientError, UserError, WillNotSucceedError

_POLL_SECONDS = 0.01
_MOST_DELAY_SECONDS = 5.0  # within a step
_SAVE_DELAY_SECONDS = 0.03  # after the first file of a save is there
_TAIL_LINES, _TAIL_BYTES = 12, 1 << 16


class StartRanks(Protocol):
    """Starts `patchline WORDS` on some ranks; all of them write to log_dir/rank-N.log."""

    def __call__(self, words: list[str], *, num_ranks: int, log_dir: Path) -> Ranks: ...


@dataclass(frozen=True, kw_only=True)
class TrialTopology:
    """How many ranks, and what ZeRO shards across them."""

    num_ranks: int
    zero_stage: int

    def __str__(self) -> str:
        return f"{self.num_ranks} {'rank' if self.num_ranks == 1 else 'ranks'}, ZeRO-{self.zero_stage}"


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The moment of a kill: after the line of `step`, or while the checkpoint of `step` is saved; there is one every
    `save_steps`. `delay`: the share of a step, or of a short while, that is waited then."""

    step: int
    save_steps: int
    is_in_save: bool
    delay: float


@dataclass(frozen=True, kw_only=True)
class Command:
    """A run: its words, and what it writes. `start`: how its ranks are started. `tick`: called while it runs, with its
    latest step."""

    name: str
    words: tuple[str, ...]
    run: StoredRun
    start: StartRanks
    tick: Callable[[int], None] = lambda _: None

    @property
    def log_dir(self) -> Path:
        """The folder to which all ranks write, beside the run directory."""
        return self.run.run_dir.with_name(f"{self.run.run_dir.name}-logs")

    def begin(self, topology: TrialTopology) -> Ranks:
        """Starts the ranks."""
        words = [*self.words, "--engine.zero-stage", str(topology.zero_stage)]
        return self.start(words, num_ranks=topology.num_ranks, log_dir=self.log_dir)


def planned_moments(num_kills: int, *, num_steps: int, save_steps: int, seed: int) -> list[Moment]:
    """Kills spread over the run after its first save, one in each of as many equal parts: in a save and between two in
    turn, as far as a part has both. Pure."""
    draw = random.Random(seed)  # noqa: S311 - moments, no secrets
    num_left = max(1, num_steps - 1 - save_steps)
    moments = []
    for number in range(num_kills):
        first = min(save_steps + number * num_left // num_kills + 1, num_steps - 1)
        last = max(first, min(save_steps + (number + 1) * num_left // num_kills, num_steps - 1))
        saves = [step for step in range(first, last + 1) if step % save_steps == 0]
        others = [step for step in range(first, last + 1) if step % save_steps]
        is_in_save = bool(saves) and (number % 2 == 0 or not others)
        step = draw.choice(saves if is_in_save else others or [first])
        moments.append(Moment(step=step, save_steps=save_steps, is_in_save=is_in_save, delay=draw.random()))
    return moments


def run_whole(command: Command, topology: TrialTopology) -> None:
    """Trains to the end. An error as the run's own if it fails."""
    ranks = command.begin(topology)
    _finish(command, ranks)


def run_killed(command: Command, topologies: Sequence[TrialTopology], moments: Sequence[Moment]) -> list[str]:
    """Kills the run at each moment that it reaches, and continues it to the end: start i on topology i, or i modulo
    their number. Returns what was done, in words."""
    done: list[str] = []
    for number, moment in enumerate(moments):
        with command.begin(topologies[number % len(topologies)]) as ranks:
            is_reached = _wait_for(command, ranks, moment)
        if not is_reached:
            _refuse_failure(command, ranks.wait())
            return done
        where = f"while step {moment.step} was saved" if moment.is_in_save else f"after step {moment.step}"
        done.append(f"{where} (latest line: step {last_step(command.run.run_dir)})")
    _finish(command, command.begin(topologies[len(moments) % len(topologies)]))
    return done


def resumed_from(run: StoredRun) -> list[int]:
    """The step that each start of a run continued from, 0 for its beginning."""
    return [attempt.resumed_from.step if attempt.resumed_from else 0 for attempt in read_attempts(run.store)]


def last_step(run_dir: Path) -> int:
    """The latest step in the metrics, 0 before there is one."""
    try:
        return max((int(line["step"]) for line in read_metrics(run_dir)[-1:]), default=0)
    except FileNotFoundError:
        return 0


def _finish(command: Command, ranks: Ranks) -> None:
    code = ranks.wait(each_time=lambda: command.tick(last_step(command.run.run_dir)))
    _refuse_failure(command, code)


def _wait_for(command: Command, ranks: Ranks, moment: Moment) -> bool:
    """Waits for the moment; False if the run ended before it."""
    seen, began, step_seconds = 0, time.monotonic(), 0.0
    saved = max(command.run.checkpoints(), default=0)
    while ranks.poll():
        step = last_step(command.run.run_dir)
        command.tick(step)
        if step > seen:
            now = time.monotonic()
            seen, began, step_seconds = step, now, (now - began) if seen else 0.0
        if moment.is_in_save and (_is_saving(command.run, moment.step, step) or step > moment.step):
            time.sleep(moment.delay * _SAVE_DELAY_SECONDS)
            return ranks.poll()
        if not moment.is_in_save and _is_between(command.run, moment, step, saved=saved):
            time.sleep(min(moment.delay * step_seconds, _MOST_DELAY_SECONDS))
            return ranks.poll()
        time.sleep(_POLL_SECONDS)
    return False


def _is_between(run: StoredRun, moment: Moment, step: int, *, saved: int) -> bool:
    """Whether the step is reached, and the last save before it is committed, unless that takes longer than the steps to
    the next. `saved`: the newest checkpoint at the start."""
    if step < moment.step:
        return False
    due = (moment.step - 1) // moment.save_steps * moment.save_steps
    return due <= saved or step >= moment.step + moment.save_steps or due in run.checkpoints()


def _is_saving(run: StoredRun, step: int, latest: int) -> bool:
    """Whether a file of this step's checkpoint is there, finished or not."""
    if run.store.url.startswith("s3:"):
        return latest >= step - 1 and any(True for _ in run.store.list(f"step-{step:08d}"))
    return any(Path(run.store.url).glob(f"step-{step:08d}/*/*"))


def _refuse_failure(command: Command, code: int) -> None:
    """The error that a run ended with, and the last lines of its first rank."""
    if code == exit_codes.DONE:
        return
    message = f"{command.name} ended with code {code}; its last lines:\n{_tail(log_of(command.log_dir, 0))}"
    if code == exit_codes.USER_MISTAKE:
        raise UserError(message)
    if code == exit_codes.WILL_NOT_SUCCEED:
        raise WillNotSucceedError(message)
    raise TransientError(message)


def _tail(path: Path) -> str:
    if not path.exists():
        return "(no log)"
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:])
