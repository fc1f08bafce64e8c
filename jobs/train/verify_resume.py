"""`patchline verify-resume`: checks whether a killed run of this recipe continues exactly on this machine.

Each topology trains once without a break, and once with kills; the two runs must have the same bits. If there are
several topologies, one more run changes from each to the next. Its losses can only be equal up to rounding. The ranks
are real processes, killed with SIGKILL.
"""

import json
import logging
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from jobs import exit_codes
from jobs.output import put, show_table
from jobs.ranks import Ranks, log_of, start_ranks
from jobs.record import record_text
from jobs.settings.runs import VerifyResumeJob
from jobs.train.resume_verdict import ResumeOutcome, as_json, explanations, outcome_of, outcome_table, resumed_from
from pipeline.runs.comparison import StoredRun
from pipeline.runs.starts import last_step
from pipeline.training.settings.job import LoggersConfig, TrainingJob
from shards.errors import TransientError, UserError, WillNotSucceedError
from shards.files.local_files import read_tail
from shards.output.progress import Fact, Ticker
from shards.store import open_store

_POLL_SECONDS = 0.01

_MOST_DELAY_SECONDS = 5.0  # longest wait within a step

_SAVE_DELAY_SECONDS = 0.03  # longest wait once the first file of a save exists

_TAIL_LINES, _TAIL_BYTES = 12, 1 << 16

__all__ = ["VerifyResumeJob", "run", "verify"]

log = logging.getLogger(__name__)

_S3 = "s3://"


class StartRanks(Protocol):
    """Starts `patchline WORDS` on a number of ranks. Rank N writes to log_dir/rank-N.log."""

    def __call__(self, words: list[str], *, num_ranks: int, log_dir: Path) -> Ranks: ...


@dataclass(frozen=True, kw_only=True)
class TrialTopology:
    """The number of ranks, and the ZeRO stage that shards across them."""

    num_ranks: int
    zero_stage: int

    def __str__(self) -> str:
        return f"{self.num_ranks} {'rank' if self.num_ranks == 1 else 'ranks'}, ZeRO-{self.zero_stage}"


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When a run is killed: after the metrics of `step` are written, or while the checkpoint of `step` is saved
    (`is_in_save`). `save_steps`: the steps between two checkpoints. `delay`: how long to wait before the kill, as a
    share of a step's time or, during a save, of `_SAVE_DELAY_SECONDS`."""

    step: int
    save_steps: int
    is_in_save: bool
    delay: float


@dataclass(frozen=True, kw_only=True)
class Command:
    """A run: the words of its command, and the files that it writes. `start`: a function that starts its ranks. `tick`:
    a function that is called with the latest step during the run."""

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
    """Spreads kills over the run after its first save, one in each of `num_kills` equal parts. Kills during a save
    alternate with kills between two saves, as far as the parts have steps of both kinds."""
    draw = random.Random(seed)  # noqa: S311 - moments, not secrets
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
    """Trains to the end. Raises the error for the run's exit code if it fails."""
    ranks = command.begin(topology)
    _finish(command, ranks)


def run_killed(command: Command, topologies: Sequence[TrialTopology], moments: Sequence[Moment]) -> list[str]:
    """Kills the run at each moment that it reaches, and continues it to the end. Each start uses the next topology in
    turn. Returns a description of each kill."""
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


def _finish(command: Command, ranks: Ranks) -> None:
    code = ranks.wait(each_time=lambda: command.tick(last_step(command.run.run_dir)))
    _refuse_failure(command, code)


def _wait_for(command: Command, ranks: Ranks, moment: Moment) -> bool:
    """Waits for the moment. Returns False if the run ended before it."""
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
    """Whether the run has reached the moment's step, and the last checkpoint due before that step is complete. That
    checkpoint no longer matters once the run is `save_steps` steps past the moment. `saved`: the newest checkpoint when
    the ranks were started."""
    if step < moment.step:
        return False
    due = (moment.step - 1) // moment.save_steps * moment.save_steps
    return due <= saved or step >= moment.step + moment.save_steps or due in run.checkpoints()


def _is_saving(run: StoredRun, step: int, latest: int) -> bool:
    """Whether a file of this step's checkpoint exists, finished or not."""
    if run.store.url.startswith("s3:"):
        return latest >= step - 1 and any(True for _ in run.store.list(f"step-{step:08d}"))
    return any(Path(run.store.url).glob(f"step-{step:08d}/*/*"))


def _refuse_failure(command: Command, code: int) -> None:
    """Raises the error for the exit code of a run, with the last lines of its first rank. Does nothing if the run is
    done."""
    if code == exit_codes.DONE:
        return
    message = f"{command.name} ended with code {code}; its last lines:\n{_tail(log_of(command.log_dir, 0))}"
    if code == exit_codes.USER_MISTAKE:
        raise UserError(message)
    if code == exit_codes.WILL_NOT_SUCCEED:
        raise WillNotSucceedError(message)
    raise TransientError(message)


def _tail(path: Path) -> str:
    tail = read_tail(path, most_bytes=_TAIL_BYTES)
    return "\n".join(tail.data.decode(errors="replace").splitlines()[-_TAIL_LINES:]) if tail else "(no log)"


def run(job: VerifyResumeJob, *, environ: Mapping[str, str]) -> int:
    """Runs, kills, continues and compares. Returns 1 if any run differs, otherwise 0.

    `environ`: the environment, passed on because only the command line may read it.
    """
    return verify(job, start=partial(start_ranks, environ=environ, is_quiet=True))


def verify(job: VerifyResumeJob, *, start: StartRanks) -> int:
    """Does the work of `run`, with ranks that `start` starts."""
    if job.command == "finetune" and not job.initial.weights:
        raise UserError("--initial.weights is missing: a fine-tuning recipe starts from weights; give RUN/weights")
    with _folder(job) as (folder, kept):
        trial = _Trial(job, folder=folder, start=start)
        outcomes = trial.outcomes()
        is_same = all(each.is_right for each in outcomes)
        if job.keep or not is_same:
            kept.append(folder)
        where = str(folder) if kept else None
        if job.json:
            put(json.dumps(as_json(job, outcomes, folder=where), allow_nan=False) + "\n")
        else:
            show_table(outcome_table(job, outcomes, folder=where))
        for line in explanations(outcomes):
            log.log(logging.INFO if is_same else logging.ERROR, "%s", line)
        if not is_same and job.device != "cpu" and not job.engine.deterministic:
            log.error("GPUs compute the same bits again only with --engine.deterministic; try with it")
    return exit_codes.DONE if is_same else exit_codes.FAULTS_FOUND


class _Trial:
    """The runs of one verification, in a folder."""

    def __init__(self, job: VerifyResumeJob, *, folder: Path, start: StartRanks) -> None:
        self._job, self._folder, self._start = job, folder, start
        self._training = _training_job(job)
        self._topologies = [
            TrialTopology(num_ranks=num_ranks, zero_stage=stage)
            for num_ranks in job.ranks
            for stage in job.stages or (job.engine.zero_stage,)
        ]
        (folder / "trial.yaml").write_text(record_text(job.command, self._training))
        self._num_runs = 2 * len(self._topologies) + (len(self._topologies) > 1)
        self._num_begun = 0

    def outcomes(self) -> list[ResumeOutcome]:
        """Makes all runs, and returns every comparison."""
        found, unbroken = [], dict[TrialTopology, StoredRun]()
        for number, topology in enumerate(self._topologies):
            whole = self._whole(f"unbroken-{number}", topology)
            unbroken[topology] = whole
            found.append(self._interrupted(f"killed-{number}", [topology], expected=whole))
        if len(self._topologies) > 1:
            found.append(self._changing(unbroken))
        return found

    def _whole(self, name: str, topology: TrialTopology) -> StoredRun:
        with self._command(name, f"{topology}, unbroken") as command:
            run_whole(command, topology)
            return command.run

    def _interrupted(self, name: str, topologies: list[TrialTopology], *, expected: StoredRun) -> ResumeOutcome:
        """Compares a killed run with an unbroken one on the same topology."""
        title = str(topologies[0])
        run, kills = self._killed(name, title, topologies, expected)
        return outcome_of(self._job, title=title, kills=kills, expected=expected, found=run)

    def _changing(self, unbroken: dict[TrialTopology, StoredRun]) -> ResumeOutcome:
        """Compares a run that changes from topology to topology with the unbroken run of the first one."""
        first = unbroken[self._topologies[0]]
        run, kills = self._killed("changing", "changing topology", self._topologies, first)
        title = f"{self._topologies[0]}, then each other in turn"
        others = [unbroken[topology] for topology in self._topologies[1:]]
        return outcome_of(self._job, title=title, kills=kills, expected=first, found=run, others=others)

    def _killed(
        self, name: str, shown: str, topologies: list[TrialTopology], expected: StoredRun
    ) -> tuple[StoredRun, list[str]]:
        more = () if len(topologies) > 1 else self._same_micro_batch(expected)
        moments = planned_moments(
            max(self._job.kills, len(topologies) - 1),
            num_steps=self._training.steps,
            save_steps=self._training.checkpoint.every_steps,
            seed=self._job.kill_seed + self._num_begun,
        )
        with self._command(name, f"{shown}, killed and continued", more=more) as command:
            kills = run_killed(command, topologies, moments)
        if not kills:
            raise UserError(f"the run on {shown} ended before it could be killed; give more --steps")
        if not any(resumed_from(command.run)):
            raise UserError(
                f"no kill of the run on {shown} found a checkpoint: every start began again at step 0, which proves "
                "nothing; give more --steps, or a smaller --checkpoint.every-steps"
            )
        log.info(
            "%s: killed %s; continued from steps %s", shown, ", ".join(kills), _shown(resumed_from(command.run)[1:])
        )
        return command.run, kills

    def _same_micro_batch(self, expected: StoredRun) -> tuple[str, ...]:
        """Returns the flag for the unbroken run's micro-batch. Without it, the run would choose a micro-batch by the
        memory that is free now, which could change the bits."""
        return ("--micro-batch", str(expected.engine()[0]))

    @contextmanager
    def _command(self, name: str, shown: str, *, more: tuple[str, ...] = ()) -> Iterator[Command]:
        """Yields a command, and shows its progress on the terminal."""
        self._num_begun += 1
        log.info("run %d of %d: %s", self._num_begun, self._num_runs, shown)
        run_dir, url = self._folder / name, self._training.checkpoint.url
        where = f"{url.rstrip('/')}/{self._folder.name}/{name}" if url else str(run_dir / "checkpoints")
        words = (self._job.command, str(self._folder / "trial.yaml"), "--run-dir", str(run_dir), *more)
        words = (*words, "--checkpoint.url", where)
        total = self._training.steps
        with Ticker() as ticker:

            def tick(step: int) -> None:
                text = f"{shown}: step {step} of {total}"
                ticker.tick(lambda: [Fact(full=f"run {self._num_begun} of {self._num_runs}, {text}", short=text)])

            stored = StoredRun(run_dir=run_dir, store=open_store(where))
            yield Command(name=shown, words=words, run=stored, start=self._start, tick=tick)


def _shown(steps: list[int]) -> str:
    return ", ".join(map(str, steps))


def _training_job(job: VerifyResumeJob) -> TrainingJob:
    """Returns the job of all runs. The job saves often enough for each kill to find a new checkpoint, and has no
    loggers, since these are not the user's runs."""
    training = TrainingJob(**{field.name: getattr(job, field.name) for field in fields(TrainingJob)})
    every = training.checkpoint.every_steps
    if not every or every * job.kills >= job.steps:
        every = max(1, job.steps // (job.kills + 2))
        log.info("the runs save every %s, so that each kill finds another checkpoint", f"{every} steps")
    kept = job.steps // every + 1 if job.compare == "all" else training.checkpoint.keep_newest
    checkpoint = replace(
        training.checkpoint, every_steps=every, every_seconds=0.0, auto_interval=False, keep_newest=kept, keep_every=0
    )
    return replace(training, run_dir="", log_every_steps=1, checkpoint=checkpoint, loggers=LoggersConfig())


@contextmanager
def _folder(job: VerifyResumeJob) -> Iterator[tuple[Path, list[Path]]]:
    """Yields a new folder for the runs, and a list. The folder and its checkpoints are removed at the end, unless the
    folder is put into the list or an error other than UserError ends the block."""
    try:
        Path(job.run_dir or ".").mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="verify-resume-", dir=job.run_dir or None)).resolve()
    except OSError as error:
        raise UserError(
            f"cannot make a folder in {job.run_dir or tempfile.gettempdir()!r}: {error.strerror}",
            todo="give --run-dir a folder that this user may write to",
        ) from error
    kept: list[Path] = []
    try:
        yield folder, kept
    except UserError:
        raise
    except Exception:
        kept.append(folder)
        log.error("the runs are kept in %s", folder)
        raise
    finally:
        if not kept:
            _remove(job, folder)


def _remove(job: VerifyResumeJob, folder: Path) -> None:
    """Removes the runs, and their checkpoints if they are in another place."""
    url = job.checkpoint.url
    if url.startswith(_S3):
        store = open_store(f"{url.rstrip('/')}/{folder.name}")
        for path in list(store.list()):
            store.delete(path)
    elif url:
        shutil.rmtree(Path(url) / folder.name, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
