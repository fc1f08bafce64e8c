"""Starts the runs of a command that needs several, one after the other, each in its own folder, and reads their scores.

Chains, sweeps, VTAB and `patchline submit` share one rule for whether an existing run has the values of a job.
"""

import logging
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from jobs import exit_codes
from jobs.arguments import take_run_flags
from jobs.ranks import run_ranks
from jobs.record import read_leaves, read_record
from jobs.submittable import Override, job_of_words, place_of
from pipeline.checkpoints.manifest import STEPS
from pipeline.runs.facts import RunFacts, State, read_facts
from pipeline.shared_settings import RECORD_FILE
from pipeline.training.saving.may_continue import OF_POSITION, WARMUP, other_values
from pipeline.training.settings.job import TrainingJob
from shards.config_values import Difference, as_lines, differences, whole_number
from shards.errors import InvalidDataError, UserError
from shards.output.terminal import printable_name

_READING = (
    *("reading.", "num_threads", "steps_ahead", "memory_limit_bytes", "max_quarantined", "allow_other_decoder"),
    "huffman_decoder",
)
_HOW_READ = tuple(f"data.{name}" for name in _READING)
_PATHS = ("initial.weights", "teacher.weights", "evaluation.url", "fewshot.url", "fewshot.test_url")
log = logging.getLogger(__name__)
Metric = Literal["accuracy", "mean_per_class"]
METRICS: tuple[Metric, ...] = get_args(Metric)
_EARLIER = "earlier"
_OFF = ("0", "0.0")


def run_changes(before: Mapping[str, Any], now: Mapping[str, Any], *, is_done: bool, extends: bool) -> list[Difference]:
    """Returns the fields in which another job differs from a run's recorded job and must not.

    These are the differences that `other_values` finds, and the following ones of the data:

    - `seed`, `global_batch` and `data` must stay the same. How the data is read may change, as training allows, too.
    - `data.url` and `data.mix` are compared as text. A dataset may move, so the caller decides whether its content has
      changed.
    - `steps` must stay the same, but may grow if the job `extends` the run.
    - `schedule.warmup_steps` must stay the same. It is not compared if the job `extends` the run, which keeps its own.
    - `model.num_classes` must stay the same, but may be 0 now, which stands for the classes of the dataset.
    - Paths of other inputs may be spelled differently (training itself is stricter), but must not become empty.
    """
    own = [each for each in differences(before, now) if each.field.startswith((*OF_POSITION, STEPS))]
    found = other_values(before, now, is_done=is_done) + own
    return [each for each in found if not _is_free(each, extends=extends)]


def _is_free(change: Difference, *, extends: bool) -> bool:
    if change.field == STEPS:
        return extends and isinstance(change.before, int) and bool(change.now > change.before)
    if change.field in _PATHS and all(path and isinstance(path, str) for path in (change.before, change.now)):
        return place_of(change.before) == place_of(change.now)
    is_of_data = change.field == "model.num_classes" and change.now == 0
    return is_of_data or change.field.startswith(_HOW_READ) or (extends and change.field == WARMUP)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A run of a command that starts several. `values`: the run's values of the grid, by flag. `words`: the run's whole
    command after `patchline`. `metric`: the score by which runs are compared."""

    folder: Path
    values: tuple[tuple[str, str], ...]
    words: tuple[str, ...]
    metric: Metric = "accuracy"
    seed: int | None = None
    """The seed of a repetition of the best try; None for other runs."""

    @property
    def name(self) -> str:
        """A name such as `tries/learning-rate=0.03`."""
        return f"{self.folder.parent.name}/{self.folder.name}"


@dataclass(frozen=True, kw_only=True)
class TrialScore:
    """The state and the score of a run. `accuracy`: the last score by the trial's metric; None if the run is not done
    or has no score. If the run averages its weights, this is the score of the averaged weights, which are those in
    RUN/weights."""

    trial: Trial
    state: State
    accuracy: float | None
    why: str = ""


def score_of(trial: Trial, override: Override) -> TrialScore:
    """Reads the score from the run's folder. A run that does not exist, or is done with other values, counts as never
    started."""
    facts = _facts(trial)
    if facts is None:
        return TrialScore(trial=trial, state="never started", accuracy=None)
    if facts.state == "done" and _changes(trial, override, is_done=True):
        return TrialScore(
            trial=trial, state="never started", accuracy=None, why="its folder has a run with other values"
        )
    accuracy = facts.accuracy if facts.state == "done" else None
    why = facts.reasons[0] if facts.reasons else ""
    if facts.state == "done" and accuracy is None:
        why = why or "it has no score of the weights that it ended with; evaluate them, or run it in another folder"
    return TrialScore(trial=trial, state=facts.state, accuracy=accuracy, why=why)


def refuse_others(trials: Sequence[Trial], override: Override) -> None:
    """Raises UserError if one of the folders has a finished run with other values."""
    for trial in trials:
        facts = _facts(trial)
        if facts and facts.state == "done":
            _refuse(trial, _changes(trial, override, is_done=True))


def make_room(trials: Sequence[Trial], override: Override, *, free: Collection[str]) -> None:
    """Moves runs that differ from these trials only in the fields `free` into SWEEP/earlier. Raises UserError if a run
    differs in other fields, or if a run to be moved is running."""
    for trial in trials:
        facts = _facts(trial)
        if facts is None:
            continue
        changed = _changes(trial, override, is_done=facts.state == "done")
        if any(change.field not in free for change in changed):
            _refuse(trial, changed)
        if changed and facts.state == "running":
            raise UserError(f"{trial.folder} is running with other values:\n{as_lines(changed)}\nStop it first")
        if changed:
            place = _earlier(trial)
            place.parent.mkdir(parents=True, exist_ok=True)
            trial.folder.rename(place)
            what = "; ".join(map(str, changed))
            log.info("%s: put aside as %s (%s)", printable_name(trial.name), place, printable_name(what))


def _facts(trial: Trial) -> RunFacts | None:
    """Returns the facts of a trial's run, or None if there is no run."""
    try:
        leaves = read_leaves(trial.folder / RECORD_FILE)
    except (OSError, InvalidDataError):
        return None
    num_steps, is_averaged = whole_number(leaves.get("job.steps", "")), leaves.get("job.ema_decay", "0") not in _OFF
    score = f"test_{'ema_' if is_averaged else ''}{trial.metric}"
    return read_facts(trial.folder, num_steps=num_steps, is_scored=True, score=score)


def _changes(trial: Trial, override: Override, *, is_done: bool, exactly: bool = False) -> list[Difference]:
    """Returns the fields in which the trial's words differ from the job that its folder records. Raises UserError if
    the record cannot be read. Unless `exactly`, a dataset may move, since the run itself compares its content, and
    --extend may add steps."""
    record = read_record(trial.folder / RECORD_FILE, stage=trial.words[0], kind=TrainingJob)
    before, now = asdict(record), asdict(job_of_words(list(trial.words), override))
    found = run_changes(before, now, is_done=is_done, extends="--extend" in trial.words and not exactly)
    return [change for change in found if exactly or not _is_address(change)]


def _is_address(change: Difference) -> bool:
    if change.field == "data.mix":
        return [weight for _, weight in change.before] == [weight for _, weight in change.now]
    return change.field == "data.url"


def _refuse(trial: Trial, changed: Sequence[Difference]) -> None:
    if changed:
        raise UserError(
            f"{trial.folder} holds a run with other values:\n{as_lines(changed)}\n"
            "Use the same values, or another --run-dir"
        )


def _earlier(trial: Trial) -> Path:
    """Returns an unused path, such as SWEEP/earlier/seeds-0."""
    folder, name, number = trial.folder.parent.parent / _EARLIER, trial.name.replace("/", "-"), 1
    while (place := folder / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return place


def run_all(trials: Sequence[Trial], environ: Mapping[str, str], override: Override) -> int:
    """Runs the trials that are not done. Skips a trial that cannot succeed (exit code 78). Stops at the first trial
    with any other exit code than 0, and returns that code. Otherwise returns 0."""
    for number, trial in enumerate(trials, start=1):
        if _is_done(trial, override):
            log.info("run %s of %s, %s: done before", number, len(trials), printable_name(trial.name))
            continue
        log.info("run %s of %s: patchline %s", number, len(trials), printable_name(shlex.join(trial.words)))
        fields, options = take_run_flags(trial.words[0], list(trial.words[2:]))
        words = [*trial.words[:2], *fields, *options.words()]
        code = run_ranks(words, num_ranks=options.processes, environ=environ, run_dir=str(trial.folder))
        if code == exit_codes.WILL_NOT_SUCCEED:
            log.warning("%s cannot succeed, and is no candidate", printable_name(trial.name))
        elif code:
            advice = "" if code == exit_codes.USER_MISTAKE else "; the same command continues it"
            log.info("%s ended with %s%s", printable_name(trial.name), code, advice)
            return code
    return exit_codes.DONE


def _is_done(trial: Trial, override: Override) -> bool:
    """Whether the trial is done. Returns False if its dataset has moved or it has more steps, since the training
    command then decides."""
    facts = _facts(trial)
    return facts is not None and facts.state == "done" and not _changes(trial, override, is_done=True, exactly=True)
