"""`patchline verify-resume`: does a killed run of this recipe, on this machine, continue exactly?

Each topology trains once to the end, and once with kills; the two must be the same bits. If there are several, one more
run changes from each to the next; it can only be the same to rounding.
"""

import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from jobs import exit_codes
from jobs.output import put, show_table
from jobs.ranks import start_ranks
from jobs.record import record_text
from jobs.settings.models import VerifyResumeJob
from jobs.train.killed_runs import (
    Command,
    StartRanks,
    TrialTopology,
    planned_moments,
    resumed_from,
    run_killed,
    run_whole,
)
from jobs.train.resume_verdict import ResumeOutcome, as_json, explanations, outcome_of, outcome_table
from pipeline.runs.comparison import StoredRun
from pipeline.training.settings.job import LoggersConfig, TrainingJob
from shards.errors import UserError
from shards.output.progress import Fact, Ticker
from shards.store import open_store

__all__ = ["VerifyResumeJob", "run", "verify"]

log = logging.getLogger(__name__)
_S3 = "s3://"


def run(job: VerifyResumeJob, *, environ: Mapping[str, str]) -> int:
    """Runs, kills, continues and compares; 1 if any run differs.

    `environ`: the caller's environment, which only the command line may read.
    """
    return verify(job, start=partial(start_ranks, environ=environ, is_quiet=True))


def verify(job: VerifyResumeJob, *, start: StartRanks) -> int:
    """The same with ranks that `start` starts."""
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
    """The runs of one trial, in a folder."""

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
        """Every comparison that was asked for."""
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
        """A run with kills, compared with an unbroken one on the same topology."""
        title = str(topologies[0])
        run, kills = self._killed(name, title, topologies, expected)
        return outcome_of(self._job, title=title, kills=kills, expected=expected, found=run)

    def _changing(self, unbroken: dict[TrialTopology, StoredRun]) -> ResumeOutcome:
        """A run that goes from topology to topology, compared with the unbroken one of the first."""
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
        """The unbroken run's, whatever memory is free now: another one would be a difference of its own."""
        return ("--micro-batch", str(expected.engine()[0]))

    @contextmanager
    def _command(self, name: str, shown: str, *, more: tuple[str, ...] = ()) -> Iterator[Command]:
        """A command with its progress on the terminal."""
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
    """The job of all runs. It saves often enough for every kill to find another checkpoint. No service gets their
    curves: they are no runs of the user's."""
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
    """A folder for the runs, removed at the end with their checkpoints, unless it is put into the list."""
    try:
        Path(job.run_dir or ".").mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="verify-resume-", dir=job.run_dir or None)).resolve()
    except OSError as error:
        raise UserError(
            f"cannot make a folder in {job.run_dir or tempfile.gettempdir()!r}: {error.strerror}; give --run-dir a "
            "folder that this user may write to"
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
    """The runs, and their checkpoints elsewhere."""
    url = job.checkpoint.url
    if url.startswith(_S3):
        store = open_store(f"{url.rstrip('/')}/{folder.name}")
        for path in list(store.list()):
            store.delete(path)
    elif url:
        shutil.rmtree(Path(url) / folder.name, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
