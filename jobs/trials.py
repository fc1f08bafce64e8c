"""Runs of a command that starts several, one after the other, each in a folder of its own, and what they scored."""

import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs import exit_codes
from jobs.processes import run_ranks
from jobs.record_leaves import read_leaves
from jobs.run_flags import take_run_flags
from pipeline.training.run_facts import read_facts
from pipeline.training.run_state import State
from shards.config_values import whole_number
from shards.errors import InvalidDataError
from shards.terminal import printable_name

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A run of a sweep. `values`: what it has of the grid, by flag; `words`: its whole command after `patchline`."""

    folder: Path
    values: tuple[tuple[str, str], ...]
    words: tuple[str, ...]
    seed: int | None = None
    """Of a repetition of the best."""

    @property
    def name(self) -> str:
        """Such as `tries/learning-rate=0.03`."""
        return f"{self.folder.parent.name}/{self.folder.name}"


@dataclass(frozen=True, kw_only=True)
class Score:
    """What is known of a run. `accuracy`: the last one, None until the run is done, and for one without."""

    trial: Trial
    state: State
    accuracy: float | None
    why: str = ""


def score_of(trial: Trial) -> Score:
    """What the run's folder says; a run that is not there has never started."""
    try:
        num_steps = whole_number(read_leaves(trial.folder / "job.yaml").get("job.steps", ""))
    except (OSError, InvalidDataError):
        return Score(trial=trial, state="never started", accuracy=None)
    facts = read_facts(trial.folder, num_steps=num_steps, is_scored=True)
    accuracy = facts.accuracy if facts.state == "done" else None
    return Score(trial=trial, state=facts.state, accuracy=accuracy, why=facts.reasons[0] if facts.reasons else "")


def run_all(trials: Sequence[Trial], environ: Mapping[str, str]) -> int:
    """Runs those that are not done; 0, or the code of the first that ended otherwise and may still succeed."""
    for number, trial in enumerate(trials, start=1):
        if score_of(trial).state == "done":
            log.info("run %s of %s, %s: done before", number, len(trials), printable_name(trial.name))
            continue
        log.info("run %s of %s: patchline %s", number, len(trials), printable_name(shlex.join(trial.words)))
        fields, options = take_run_flags(trial.words[0], list(trial.words[2:]))
        words = [*trial.words[:2], *fields, *options.words()]
        code = run_ranks(words, num_ranks=options.processes, environ=environ, run_dir=str(trial.folder))
        if code == exit_codes.WILL_NOT_SUCCEED:
            log.warning("%s cannot succeed, and is no candidate", printable_name(trial.name))
        elif code:
            advice = "" if code == exit_codes.USER_MISTAKE else "; the same command goes on"
            log.info("%s ended with %s%s", printable_name(trial.name), code, advice)
            return code
    return exit_codes.DONE
