"""`patchline vtab WEIGHTS --data-root URL --run-dir DIR`: fine-tunes on each task of VTAB-1k, and shows the mean.

A task is a dataset URL/TASK of 1,000 images with its test set URL/TASK-test. Each is a run of `patchline finetune
vtab_TASK` in DIR/TASK, one after the other; with --seeds N, in DIR/seed-0/TASK and so on. The same command again runs
what is missing, and continues what was interrupted.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import exit_codes
from jobs.output import put
from jobs.recipes.paper_vtab import TASKS, VtabTask
from jobs.submittable import Override, job_of_words, value_in
from jobs.train.sweep_plan import seeds_of
from jobs.train.trials import Trial, refuse_others, run_all, score_of
from jobs.train.vtab_rows import Row, facts_of, table_of
from jobs.train.vtab_seeds import facts_of_seeds, table_of_seeds
from shards.dataset import open_dataset
from shards.errors import UnreachableError, UserError
from shards.files.json_lines import write_whole
from shards.schema.config_values import shown_value

log = logging.getLogger(__name__)
USAGE = "patchline vtab WEIGHTS --data-root URL --run-dir DIR [--tasks NAME ...] [--seeds N] [--any.field VALUE ...]"
_NUM_IMAGES = 1000
_OWN = ("--data-root", "--run-dir", "--tasks", "--seeds")


@dataclass(frozen=True, kw_only=True)
class _Words:
    """The words of a command, taken apart. `seeds`: of each task's runs; None: one, with the seed of its recipe."""

    root: str
    folder: Path
    names: tuple[str, ...]
    seeds: tuple[int | None, ...]
    more: tuple[str, ...]


def run(words: list[str], *, override: Override, environ: Mapping[str, str]) -> int:
    """Runs the tasks whose data is there, writes DIR/vtab.json and prints the table. The exit code of the first run
    that ends otherwise than with 0, but for one that cannot succeed. UserError if there is no data for any task, or if
    one was run with other values."""
    if not words or words[0].startswith("-"):
        raise UserError(f"usage: {USAGE}")
    taken = _taken(words[1:])
    tasks = [task for task in TASKS if not taken.names or task.name in taken.names]
    lacks = {task.name: _lacks(taken.root, task) for task in tasks}
    there = [task for task in tasks if not lacks[task.name]]
    trials = {(seed, task.name): _trial(task, words[0], taken, seed) for seed in taken.seeds for task in there}
    if not trials:
        raise UserError(
            f"{taken.root} has no task of VTAB: {lacks[tasks[0].name]}; pack each as TASK and TASK-test, TASK one of "
            f"{', '.join(task.name for task in TASKS)}"
        )
    for trial in trials.values():
        job_of_words(list(trial.words), override)
    refuse_others(list(trials.values()), override)
    code = run_all(list(trials.values()), environ, override)
    if code == exit_codes.USER_MISTAKE:
        return code  # the run has said why
    scores = {key: score_of(trial, override) for key, trial in trials.items()}
    rows = {
        seed: [Row(task=task, score=scores.get((seed, task.name)), lacks=lacks[task.name]) for task in tasks]
        for seed in taken.seeds
    }
    facts, table = _shown(rows)
    write_whole(taken.folder / "vtab.json", (json.dumps(facts, indent=2, allow_nan=False) + "\n").encode())
    put(table)
    return code


def _shown(rows: Mapping[int | None, Sequence[Row]]) -> tuple[dict[str, Any], str]:
    """What vtab.json says, and the table."""
    if None in rows:
        return facts_of(rows[None]), table_of(rows[None])
    by_seed = {seed: found for seed, found in rows.items() if seed is not None}
    return facts_of_seeds(by_seed), table_of_seeds(by_seed)


def _taken(words: Sequence[str]) -> _Words:
    """UserError for wrong words."""
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
    seeds: tuple[int | None, ...] = (None,)
    if any(word.partition("=")[0] == "--seeds" for word in words):
        seeds = tuple(range(seeds_of(value_in(list(words), "--seeds"))))
        if any(word.partition("=")[0] == "--seed" for word in words):
            raise UserError("--seed and --seeds do not go together; --seeds N runs each task with the seeds 0 to N-1")
    return _Words(root=root.rstrip("/"), folder=Path(run_dir), names=tuple(names), seeds=seeds, more=tuple(more))


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


def _trial(task: VtabTask, weights: str, taken: _Words, seed: int | None) -> Trial:
    data = (f"--data.url={taken.root}/{task.name}", f"--evaluation.url={taken.root}/{task.name}-test")
    words = ("finetune", f"vtab_{task.name}", f"--initial.weights={weights}", *data, *taken.more)
    folder, seeded = taken.folder / task.name, tuple[str, ...]()
    if seed is not None:
        folder, seeded = taken.folder / f"seed-{seed}" / task.name, (f"--seed={seed}",)
    return Trial(folder=folder, values=(), words=(*words, f"--run-dir={folder}", *seeded), seed=seed)
