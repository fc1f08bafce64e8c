"""`patchline vtab WEIGHTS --data-root URL --run-dir DIR`: fine-tunes on each task of VTAB-1k, and shows the means.

A task is a dataset URL/TASK of 1,000 images with a test set URL/TASK-test, as `patchline pack vtab` makes them. The
tasks are run one after the other, with `patchline finetune vtab_TASK` in DIR/TASK or, with --seeds N, in
DIR/seed-0/TASK and so on. If the command is repeated, it runs missing tasks and continues interrupted ones. With
several seeds, vtab.json has a mean for each seed, and the mean and deviation of these means, as in the VTAB row of the
paper's Table 2.
"""

import json
import logging
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jobs import exit_codes
from jobs.arguments import take_own_flags
from jobs.output import put
from jobs.recipes.paper_vtab import GROUPS, TASKS, VtabTask
from jobs.submittable import Override, job_of_words
from jobs.train.sweep_plan import seeds_of
from jobs.train.trials import Trial, TrialScore, refuse_others, run_all, score_of
from shards.config_values import shown_value
from shards.dataset import open_dataset
from shards.errors import UnreachableError, UserError
from shards.files.local_files import write_whole
from shards.output.terminal import printable_name
from shards.what_is_there import NoDatasetError

log = logging.getLogger(__name__)
USAGE = "patchline vtab WEIGHTS --data-root URL --run-dir DIR [--tasks NAME ...] [--seeds N] [--any.field VALUE ...]"
_NUM_IMAGES = 1000


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    """A task and its run. `lacks`: which part of its data is missing, in words."""

    task: VtabTask
    score: TrialScore | None = None
    lacks: str = ""

    @property
    def accuracy(self) -> float | None:
        """The task's accuracy; None if it is not known."""
        return self.score.accuracy if self.score else None


def task_facts(rows: Sequence[TaskRow]) -> dict[str, Any]:
    """Returns the scores as vtab.json has them."""
    return {
        "tasks": {
            row.task.name: {
                "accuracy": row.accuracy,
                "state": row.score.state if row.score else "missing",
                "command": shlex.join(["patchline", *row.score.trial.words]) if row.score else "",
            }
            for row in rows
        },
        **{name: mean_of(rows, tasks) for name, tasks in GROUPS.items()},
        "mean": mean_of(rows, TASKS),
    }


def task_table(rows: Sequence[TaskRow]) -> str:
    """Returns the table. It has a line for each task and, for each group and for all 19 tasks, the mean or the number
    of tasks with a score."""
    return lines_of(rows, words=words_of, summary=partial(_summary, rows))


def lines_of(
    rows: Sequence[TaskRow], *, words: Callable[[TaskRow], str], summary: Callable[[Sequence[VtabTask]], str]
) -> str:
    """Returns the table. `words`: makes the text of a task. `summary`: makes the text of a group, and of all 19
    tasks."""
    lines = []
    for name, tasks in GROUPS.items():
        own = [row for row in rows if row.task in tasks]
        lines += [f"{name if row is own[0] else '':<12}  {row.task.name:<20}  {words(row)}" for row in own]
        if own:
            lines.append(f"{'':<12}  {summary(tasks)}")
    lines.append(f"{'all':<12}  {summary(TASKS)}")
    return "".join(f"{line}\n" for line in lines)


def words_of(row: TaskRow) -> str:
    """Returns the task's accuracy, or why it has none."""
    if row.accuracy is not None:
        return f"{row.accuracy:.4f}"
    return f"missing: {printable_name(row.lacks)}" if row.lacks else row.score.state if row.score else ""


def _summary(rows: Sequence[TaskRow], tasks: Sequence[VtabTask]) -> str:
    mean, scored = mean_of(rows, tasks), sum(row.accuracy is not None for row in rows if row.task in tasks)
    if mean is None:
        return f"{scored} of {len(tasks)} tasks have a score: no mean"
    return f"{f'mean of {len(tasks)}':<20}  {mean:.4f}"


def mean_of(rows: Sequence[TaskRow], tasks: Sequence[VtabTask]) -> float | None:
    """Returns the mean over the tasks, or None if one of them has no score."""
    found = [row.accuracy for row in rows if row.task in tasks and row.accuracy is not None]
    return statistics.fmean(found) if len(found) == len(tasks) else None


@dataclass(frozen=True, kw_only=True)
class VtabFlags:
    """The flags of the command itself. Without `seeds`, each task is run once, with the seed of its recipe."""

    data_root: str = ""
    run_dir: str = ""
    tasks: tuple[str, ...] = ()
    seeds: str | None = None

    def __post_init__(self) -> None:
        known = [task.name for task in TASKS]
        for name in self.tasks:
            if name not in known:
                raise UserError(f"{shown_value(name)} is no task of VTAB; allowed: {', '.join(known)}")
        for flag, value in (("--data-root", self.data_root), ("--run-dir", self.run_dir)):
            if not value:
                raise UserError(f"{flag} is missing. usage: {USAGE}")


def run(words: list[str], *, override: Override, environ: Mapping[str, str]) -> int:
    """Runs the tasks that have data, writes DIR/vtab.json and prints the table. Returns the exit code of the first run
    that failed; runs that cannot succeed do not count as failed. Raises UserError if no task has data, or if a task was
    already run with other values."""
    if not words or words[0].startswith("-"):
        raise UserError(f"usage: {USAGE}")
    flags, more = take_own_flags(VtabFlags, words[1:])
    root, seeds = flags.data_root.rstrip("/"), _seeds(flags, more)
    tasks = [task for task in TASKS if not flags.tasks or task.name in flags.tasks]
    lacks = {task.name: _lacks(root, task) for task in tasks}
    there = [task for task in tasks if not lacks[task.name]]
    trials = {
        (seed, task.name): _trial(task, flags, weights=words[0], seed=seed, more=more)
        for seed in seeds
        for task in there
    }
    if not trials:
        raise UserError(
            f"{root} has no task of VTAB: {lacks[tasks[0].name]}; pack each as TASK and TASK-test, for example with\n"
            f"{_packing(root, tasks[0].name)}\nTASK is one of {', '.join(task.name for task in TASKS)}"
        )
    for task in tasks:
        if lacks[task.name]:
            log.warning("%s is left out: %s; pack it with\n%s", task.name, lacks[task.name], _packing(root, task.name))
    for trial in trials.values():
        job_of_words(list(trial.words), override)
    refuse_others(list(trials.values()), override)
    code = run_all(list(trials.values()), environ, override)
    if code == exit_codes.USER_MISTAKE:
        return code  # the run has already said why
    scores = {key: score_of(trial, override) for key, trial in trials.items()}
    rows = {
        seed: [TaskRow(task=task, score=scores.get((seed, task.name)), lacks=lacks[task.name]) for task in tasks]
        for seed in seeds
    }
    facts, table = _shown(rows)
    write_whole(Path(flags.run_dir) / "vtab.json", (json.dumps(facts, indent=2, allow_nan=False) + "\n").encode())
    put(table)
    return code


def _shown(rows: Mapping[int | None, Sequence[TaskRow]]) -> tuple[dict[str, Any], str]:
    """Returns the content of vtab.json, and the table."""
    if None in rows:
        return task_facts(rows[None]), task_table(rows[None])
    by_seed = {seed: found for seed, found in rows.items() if seed is not None}
    return seed_facts(by_seed), seed_table(by_seed)


def _seeds(flags: VtabFlags, more: Sequence[str]) -> tuple[int | None, ...]:
    """Returns the seeds of each task's runs."""
    if flags.seeds is None:
        return (None,)
    seeds = tuple(range(seeds_of(flags.seeds)))
    if any(word.partition("=")[0] == "--seed" for word in more):
        raise UserError("--seed and --seeds do not go together; --seeds N runs each task with the seeds 0 to N-1")
    return seeds


def _lacks(root: str, task: VtabTask) -> str:
    """Returns which part of a task's data is missing, or an empty string. Warns if the training set does not have
    VTAB-1k's size."""
    try:
        train, _ = (open_dataset(f"{root}/{task.name}{ending}") for ending in ("", "-test"))
    except UnreachableError:
        raise
    except NoDatasetError as error:
        return error.brief
    except UserError as error:
        return error.what
    if train.num_samples != _NUM_IMAGES:
        log.warning("%s has %s images; VTAB-1k has %s", task.name, f"{train.num_samples:,}", f"{_NUM_IMAGES:,}")
    return ""


def _packing(root: str, task: str) -> str:
    """Returns the commands that pack a task's data. TFDS stands for the data folder of TensorFlow Datasets."""
    command = f"  patchline pack vtab --source.task {task} --source.root TFDS"
    train, test = (shlex.quote(f"{root}/{task}{ending}") for ending in ("", "-test"))
    return f"{command} --out {train}\n{command} --split test --out {test}"


def _trial(task: VtabTask, flags: VtabFlags, *, weights: str, seed: int | None, more: Sequence[str]) -> Trial:
    root = flags.data_root.rstrip("/")
    data = (f"--data.url={root}/{task.name}", f"--evaluation.url={root}/{task.name}-test")
    words = ("finetune", f"vtab_{task.name}", f"--initial.weights={weights}", *data, *more)
    folder, seeded = Path(flags.run_dir) / task.name, tuple[str, ...]()
    if seed is not None:
        folder, seeded = Path(flags.run_dir) / f"seed-{seed}" / task.name, (f"--seed={seed}",)
    return Trial(folder=folder, values=(), words=(*words, f"--run-dir={folder}", *seeded), seed=seed)


Rows = Mapping[int, Sequence[TaskRow]]


def seed_facts(by_seed: Rows) -> dict[str, Any]:
    """Returns the scores as vtab.json has them: the mean over the seeds for each group and for all tasks, the
    deviations of these means in `deviations`, and the scores of each seed in `seeds`."""
    spans: dict[str, Sequence[VtabTask]] = {**GROUPS, "mean": TASKS}
    found = {name: _spread(_means(by_seed, tasks)) for name, tasks in spans.items()}
    return {
        "seeds": [{"seed": seed, **task_facts(rows)} for seed, rows in by_seed.items()],
        **{name: mean for name, (mean, _) in found.items()},
        "deviations": {name: deviation for name, (_, deviation) in found.items()},
    }


def seed_table(by_seed: Rows) -> str:
    """Returns a line for each task, with the mean over the seeds, and one for each group and for all 19 tasks."""
    first = next(iter(by_seed.values()))
    return lines_of(first, words=partial(_task, by_seed), summary=partial(_summary_of_seeds, by_seed))


def _task(by_seed: Rows, first: TaskRow) -> str:
    rows = [row for rows in by_seed.values() for row in rows if row.task is first.task]
    if first.lacks:
        return words_of(first)
    known = [row.accuracy for row in rows if row.accuracy is not None]
    if len(known) == len(rows):
        return _words(_spread(known))
    seed, row = next((seed, row) for seed, row in zip(by_seed, rows, strict=True) if row.accuracy is None)
    return f"{len(known)} of {len(rows)} seeds have a score: seed {seed} {words_of(row)}"


def _summary_of_seeds(by_seed: Rows, tasks: Sequence[VtabTask]) -> str:
    found, num_means = _means(by_seed, tasks), sum(mean is not None for mean in _means(by_seed, tasks))
    if num_means < len(found):
        return f"{num_means} of {len(found)} seeds have a score of all {len(tasks)} tasks: no mean"
    few = " (one seed: no deviation)" if len(found) == 1 else ""
    return f"{f'mean of {len(tasks)}':<20}  {_words(_spread(found))}{few}"


def _means(by_seed: Rows, tasks: Sequence[VtabTask]) -> list[float | None]:
    return [mean_of(rows, tasks) for rows in by_seed.values()]


def _spread(found: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Returns the mean and the standard deviation. Both are None if a value is missing. The deviation is also None for
    a single value."""
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None, None
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None


def _words(spread: tuple[float | None, float | None]) -> str:
    mean, deviation = spread
    return f"{mean:.4f}" + ("" if deviation is None else f" ± {deviation:.4f}")
