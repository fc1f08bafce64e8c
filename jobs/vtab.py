"""`patchline vtab WEIGHTS --data-root URL --run-dir DIR`: fine-tunes on each task of VTAB-1k, and shows the mean.

A task is a dataset URL/TASK of 1,000 images with its test set URL/TASK-test. Each is a run of `patchline finetune
vtab_TASK` in DIR/TASK, one after the other; the same command again runs what is missing, and continues what was
interrupted.
"""

import json
import logging
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import exit_codes
from jobs.recipes.paper_vtab import GROUPS, TASKS, VtabTask
from jobs.screen import put
from jobs.submitted import Override, job_of_words, value_in
from jobs.trials import Score, Trial, refuse_others, run_all, score_of
from pipeline.checkpoints.json_lines import write_whole
from shards.config_values import shown_value
from shards.dataset import open_dataset
from shards.errors import UnreachableError, UserError
from shards.terminal import printable_name

log = logging.getLogger(__name__)
USAGE = "patchline vtab WEIGHTS --data-root URL --run-dir DIR [--tasks NAME ...] [--any.field VALUE ...]"
_NUM_IMAGES = 1000
_OWN = ("--data-root", "--run-dir", "--tasks")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A task, and its run; `lacks`: what is missing of its data."""

    task: VtabTask
    score: Score | None = None
    lacks: str = ""

    @property
    def accuracy(self) -> float | None:
        """None: not known yet, or never."""
        return self.score.accuracy if self.score else None


def run(words: list[str], *, override: Override, environ: Mapping[str, str]) -> int:
    """Runs the tasks whose data is there, writes DIR/vtab.json and prints the table. The exit code of the first run
    that ends otherwise than with 0, but for one that cannot succeed. UserError if there is no data for any task, or if
    one was run with other values."""
    if not words or words[0].startswith("-"):
        raise UserError(f"usage: {USAGE}")
    root, folder, names, more = _taken(words[1:])
    tasks = [task for task in TASKS if not names or task.name in names]
    lacks = {task.name: _lacks(root, task) for task in tasks}
    trials = {task.name: _trial(task, words[0], root, folder, more) for task in tasks if not lacks[task.name]}
    if not trials:
        raise UserError(
            f"{root} has no task of VTAB: {lacks[tasks[0].name]}; pack each as TASK and TASK-test, TASK one of "
            f"{', '.join(task.name for task in TASKS)}"
        )
    for trial in trials.values():
        job_of_words(list(trial.words), override)
    refuse_others(list(trials.values()), override)
    code = run_all(list(trials.values()), environ, override)
    if code == exit_codes.USER_MISTAKE:
        return code  # the run has said why
    scores = {name: score_of(trial, override) for name, trial in trials.items()}
    rows = [Row(task=task, score=scores.get(task.name), lacks=lacks[task.name]) for task in tasks]
    write_whole(folder / "vtab.json", (json.dumps(facts_of(rows), indent=2, allow_nan=False) + "\n").encode())
    put(table_of(rows))
    return code


def facts_of(rows: Sequence[Row]) -> dict[str, Any]:
    """As in vtab.json."""
    return {
        "tasks": {
            row.task.name: {
                "accuracy": row.accuracy,
                "state": row.score.state if row.score else "missing",
                "command": shlex.join(["patchline", *row.score.trial.words]) if row.score else "",
            }
            for row in rows
        },
        **{name: _mean(rows, tasks) for name, tasks in GROUPS.items()},
        "mean": _mean(rows, TASKS),
    }


def table_of(rows: Sequence[Row]) -> str:
    """A line for each task, the mean of each whole group, and the mean of all 19, or how many are missing."""
    lines = []
    for name, tasks in GROUPS.items():
        own = [row for row in rows if row.task in tasks]
        lines += [f"{name if row is own[0] else '':<12}  {row.task.name:<20}  {_words(row)}" for row in own]
        if own:
            lines.append(f"{'':<12}  {_summary(own, tasks)}")
    lines.append(f"{'all':<12}  {_summary(rows, TASKS)}")
    return "".join(f"{line}\n" for line in lines)


def _words(row: Row) -> str:
    if row.accuracy is not None:
        return f"{row.accuracy:.4f}"
    return f"missing: {printable_name(row.lacks)}" if row.lacks else row.score.state if row.score else ""


def _summary(rows: Sequence[Row], tasks: Sequence[VtabTask]) -> str:
    mean, scored = _mean(rows, tasks), sum(row.accuracy is not None for row in rows if row.task in tasks)
    if mean is None:
        return f"{scored} of {len(tasks)} tasks have a score: no mean"
    return f"{f'mean of {len(tasks)}':<20}  {mean:.4f}"


def _mean(rows: Sequence[Row], tasks: Sequence[VtabTask]) -> float | None:
    """None, if one of the tasks has no score."""
    found = [row.accuracy for row in rows if row.task in tasks and row.accuracy is not None]
    return statistics.fmean(found) if len(found) == len(tasks) else None


def _taken(words: Sequence[str]) -> tuple[str, Path, list[str], list[str]]:
    """The root of the data, the folder, the names of tasks, and the flags of the runs. UserError for wrong ones."""
    names, more, group = [], [], ""
    for word in words:
        group = word.partition("=")[0] if word.startswith("--") else group
        if group == "--tasks":
            names += [one for one in (word.partition("=")[2] if word.startswith("--") else word,) if one]
        elif group not in _OWN:
            more.append(word)
    known = [task.name for task in TASKS]
    for name in names:
        if name not in known:
            raise UserError(f"{shown_value(name)} is no task of VTAB; allowed: {', '.join(known)}")
    root, run_dir = (value_in(list(words), flag) for flag in ("--data-root", "--run-dir"))
    for flag, value in (("--data-root", root), ("--run-dir", run_dir)):
        if not value:
            raise UserError(f"{flag} is missing. usage: {USAGE}")
    return root.rstrip("/"), Path(run_dir), names, more


def _lacks(root: str, task: VtabTask) -> str:
    """What is missing of a task's data; a training set of another size than VTAB-1k's gets a warning."""
    try:
        train, _ = (open_dataset(f"{root}/{task.name}{ending}") for ending in ("", "-test"))
    except UnreachableError:
        raise
    except UserError as error:
        return str(error).partition(",")[0]
    if train.num_samples != _NUM_IMAGES:
        log.warning("%s has %s images; VTAB-1k has %s", task.name, f"{train.num_samples:,}", f"{_NUM_IMAGES:,}")
    return ""


def _trial(task: VtabTask, weights: str, root: str, folder: Path, more: Sequence[str]) -> Trial:
    data = (f"--data.url={root}/{task.name}", f"--evaluation.url={root}/{task.name}-test")
    words = ("finetune", f"vtab_{task.name}", f"--initial.weights={weights}", *data, *more)
    return Trial(folder=folder / task.name, values=(), words=(*words, f"--run-dir={folder / task.name}"))
