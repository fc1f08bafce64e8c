"""`patchline ls`: prints a table of the runs in a folder. Each run has one line, with the reasons for its state below
it.

The command changes nothing, and never reads the whole of a large file.
"""

import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobs import exit_codes
from jobs.origin import Nearest, nearest, prepare_recipes
from jobs.output import advice, fitted, put, wrapped
from jobs.record import Leaves, is_scored, read_leaves
from jobs.settings.runs import LsJob, SortColumn
from jobs.stages import WITH_SMOKE
from pipeline.runs.facts import SIGNS_OF_A_RUN, STATES, RunFacts, read_facts
from pipeline.shared_settings import RECORD_FILE, SCORES_FOLDER
from shards.config_values import whole_number
from shards.errors import PASSING_FAULTS, Finding, InvalidDataError, UserError
from shards.files.looks import is_a_folder, is_there
from shards.output.quantities import DAY_SECONDS
from shards.output.terminal import columns_of, printable_name
from shards.pool import Pool

__all__ = ["LsJob", "run"]

log = logging.getLogger(__name__)
_MOST_DEPTH, _MOST_FOLDERS = 3, 20_000
_PIPE_COLUMNS = 160
_THREADS = 8  # hides the latency of a file server
_DESCENDING = ("step", "accuracy", "images", "goodput", "seen")
_HEADS = ("run", "recipe", "state", "step", "loss", "accuracy", "images/s", "goodput", "seen")
_LEFT = (True, True, True, False, False, False, False, False, False)
_LEAST_NAME, _LEAST_RECIPE = 12, 8
_LATEST_TO_GO = ("goodput", "images/s", "accuracy", "loss")  # columns that a narrow terminal leaves out, in this order
_GAP, _INDENT = "  ", "    "
_UNITS = ((DAY_SECONDS, "d"), (3600, "h"), (60, "min"))
Cells = list[str]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run's folder. Fields that its record does not give are empty (`stage`, `model`) or None (`num_steps`,
    `recipe`). If `state` is not empty, it is shown instead of the state in `facts`. `findings`: the findings about the
    run's jobs, if Slurm was asked."""

    path: str
    stage: str
    recipe: Nearest | None
    model: str
    num_steps: int | None
    facts: RunFacts
    reasons: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    state: str = ""


def run(job: LsJob) -> int:
    """Prints the table, or a line of JSON for each run. Returns 0 even if there are no runs, or if some are damaged."""
    now = time.time()
    root = Path(job.dir)
    folders = folders_below(root)
    if folders:
        prepare_recipes()
    pool = Pool(_THREADS, name="ls")
    try:
        futures = [pool.submit(lambda path=path: run_at(root, path, now)) for path in folders]  # type: ignore[misc]
        runs = [one for one in (future.result() for future in futures) if one]
    finally:
        pool.close()
    runs = in_order(runs, by=job.sort, reverse=job.reverse)
    if job.json:
        put("".join(json.dumps(as_json(one), allow_nan=False) + "\n" for one in runs))
        return exit_codes.DONE
    if not runs:
        log.info("no run in %s, down to %d levels: a run's folder has a %s", job.dir, _MOST_DEPTH, RECORD_FILE)
        return exit_codes.DONE
    put(run_table(runs, now=now, columns=columns_of(sys.stdout) or _PIPE_COLUMNS))
    return exit_codes.DONE


def run_table(runs: Sequence[Run], *, now: float, columns: int) -> str:
    """Returns the lines of the table. Only commands to copy may be longer than `columns`. Names are shortened to fit,
    and their control characters are escaped."""
    cells = [_cells(one, now) for one in runs]
    kept = _columns_that_fit(cells, columns)
    widths = _widths(cells, kept, columns)
    lines = [_line([_HEADS[at] for at in kept], kept, widths)]
    for one, own in zip(runs, cells, strict=True):
        shown = [fitted(own[at], width) if at < 2 else own[at] for at, width in zip(kept, widths, strict=True)]
        lines.append(_line(shown, kept, widths))
        width = max(columns - len(_INDENT), _LEAST_NAME)
        parts = [part for reason in one.reasons for part in wrapped(reason, width, most_lines=3)]
        for finding in one.findings:
            parts += wrapped(finding.found, width, most_lines=3)
            parts += advice(finding.todo, width) if finding.todo else []
        lines += [f"{_INDENT}{part}" for part in parts]
    return "".join(f"{line}\n" for line in lines)


def _cells(one: Run, now: float) -> Cells:
    facts = one.facts
    is_usual = facts.loss is not None and math.isfinite(facts.loss) and 1e-3 <= abs(facts.loss) < 1e4
    step = "" if facts.step is None else f"{facts.step:,}"
    steps = f"/{one.num_steps:,}" if one.num_steps is not None else ""
    return [
        printable_name(one.path),
        printable_name(one.recipe.words()) if one.recipe else "-",
        one.state or facts.state,
        f"{step or '0'}{steps}" if step or steps else "-",
        "-" if facts.loss is None else f"{facts.loss:.4f}" if is_usual else f"{facts.loss:.3g}",
        "-" if facts.accuracy is None else f"{facts.accuracy:.3f}",
        "-" if facts.images_per_second is None else f"{facts.images_per_second:,.0f}",
        "-" if facts.goodput is None else f"{facts.goodput:.0%}",
        "-" if facts.last_seen is None else _ago(now - facts.last_seen),
    ]


def _ago(seconds: float) -> str:
    """Returns words such as `12 s ago` or `3 h ago`. Negative seconds, from a host whose clock is ahead, give `0 s
    ago`."""
    unit, name = next(((unit, name) for unit, name in _UNITS if seconds >= unit), (1, "s"))
    return f"{max(0, seconds) // unit:.0f} {name} ago"


def _widest(cells: Sequence[Cells], at: int) -> int:
    return max(len(_HEADS[at]), *(len(row[at]) for row in cells))


def _columns_that_fit(cells: Sequence[Cells], columns: int) -> list[int]:
    """Returns the indices of the columns that fit into the terminal."""
    kept = list(range(len(_HEADS)))
    for name in ("", *_LATEST_TO_GO):
        kept = [at for at in kept if _HEADS[at] != name]
        least = _LEAST_NAME + _LEAST_RECIPE + sum(_widest(cells, at) for at in kept[2:])
        if least + len(_GAP) * (len(kept) - 1) <= columns:
            break
    return kept


def _widths(cells: Sequence[Cells], kept: Sequence[int], columns: int) -> list[int]:
    """Returns the columns' widths. The first two columns, runs and recipes, share the space that the others leave."""
    others = [_widest(cells, at) for at in kept[2:]]
    room = max(_LEAST_NAME + _LEAST_RECIPE, columns - sum(others) - len(_GAP) * (len(kept) - 1))
    name, recipe = _widest(cells, 0), _widest(cells, 1)
    if name + recipe > room:
        recipe = min(recipe, max(_LEAST_RECIPE, room // 2, room - name))
        name = min(name, room - recipe)
    return [name, recipe, *others]


def _line(texts: Sequence[str], kept: Sequence[int], widths: Sequence[int]) -> str:
    from rich.cells import cell_len  # noqa: PLC0415 - not needed for help

    padded = []
    for text, at, width in zip(texts, kept, widths, strict=True):
        room = " " * max(0, width - cell_len(text))
        padded.append(text + room if _LEFT[at] else room + text)
    return _GAP.join(padded).rstrip()


def in_order(runs: Sequence[Run], *, by: SortColumn, reverse: bool) -> list[Run]:
    """Sorts the runs by a column. Losses and names are in ascending order, states in the order of `STATES`, and other
    numbers and times in descending order; `reverse` reverses each of these. Runs without a value always come last."""
    by_name = sorted(runs, key=lambda one: one.path)
    known = [one for one in by_name if _is_known(_key(one, by))]
    known.sort(key=lambda one: _key(one, by), reverse=(by in _DESCENDING) != reverse)
    return [*known, *(one for one in by_name if not _is_known(_key(one, by)))]


def _is_known(key: Any) -> bool:
    return key is not None and not (isinstance(key, float) and math.isnan(key))


def _key(one: Run, by: SortColumn) -> Any:
    """Returns the value that a run is sorted by; None if it is not known."""
    facts = one.facts
    return {
        "run": one.path,
        "recipe": one.recipe.words() if one.recipe else None,
        "state": STATES.index(facts.state),
        "step": facts.step,
        "loss": facts.loss,
        "accuracy": facts.accuracy,
        "images": facts.images_per_second,
        "goodput": facts.goodput,
        "seen": facts.last_seen,
    }[by]


def folders_below(root: Path) -> list[Path]:
    """Returns the folders that may be runs: the root, or those at most `_MOST_DEPTH` levels below it. Raises UserError
    if the root cannot be listed."""
    try:
        if _may_be_run({entry.name for entry in os.scandir(root)}):
            return [root]
    except OSError as error:
        raise UserError(
            f"cannot list {str(root)!r}: {error.strerror}", todo="give a folder of runs, or a run"
        ) from error
    found: list[Path] = []
    level, num_folders = [root], 0
    for _ in range(_MOST_DEPTH):
        below: list[Path] = []
        for folder, is_link, names in _inside(level):
            num_folders += 1
            if num_folders > _MOST_FOLDERS:
                log.warning("%s has more than %d folders; the others are left out", root, _MOST_FOLDERS)
                return found
            if names is None or _may_be_run(names):
                found.append(folder)
            elif not is_link:
                below.append(folder)
        level = below
    return found


def _inside(level: Sequence[Path]) -> Iterator[tuple[Path, bool, set[str] | None]]:
    """Yields each folder in these folders, whether it is a symbolic link, and the names in it (None: it cannot be
    listed)."""
    for folder in level:
        with os.scandir(folder) as entries:
            inner = sorted((entry.name, entry.is_symlink()) for entry in entries if _is_folder(entry))
        for name, is_link in inner:
            path = folder / name
            try:
                yield path, is_link, {entry.name for entry in os.scandir(path)}
            except OSError:
                yield path, is_link, None


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError as error:  # a link to itself, or failing storage, which must not hide a run
        return error.errno in PASSING_FAULTS


def _may_be_run(names: set[str]) -> bool:
    """Whether a folder with these names has a record, or at least two of a run's other files. A single file may come
    from another tool."""
    return RECORD_FILE in names or sum(name in names for name in SIGNS_OF_A_RUN) > 1


def run_at(root: Path, path: Path, now: float) -> Run | None:
    """Returns the run in a folder; None if its record belongs to a stage that does not train. The accuracy of a run
    that was not scored during its training is that of the newest `patchline evaluate RUN`."""
    reasons: list[str] = []
    leaves: Leaves = {}
    try:
        leaves = read_leaves(path / RECORD_FILE)
    except FileNotFoundError:
        if not is_unstarted(path):
            reasons.append(f"{RECORD_FILE} is missing")
    except OSError as error:
        reasons.append(f"{RECORD_FILE} cannot be read: {error.strerror or error}")
    except InvalidDataError as error:
        reasons.append(f"{RECORD_FILE} is damaged: {error}")
    stage = leaves.get("stage", "")
    if stage and stage not in WITH_SMOKE:
        return None
    num_steps = whole_number(leaves.get("job.steps", ""))
    if leaves and not num_steps:
        reasons.append(f"{RECORD_FILE} is damaged: it has no number of steps")
    facts = read_facts(path, num_steps=num_steps, is_scored=is_scored(leaves), now=now)
    if leaves and facts.accuracy is None:
        facts = replace(facts, accuracy=_later_accuracy(path, facts.step or 0))
    return Run(
        path=str(path.relative_to(root)) if path != root else path.name or str(path),
        stage=stage,
        recipe=nearest(stage, leaves, facts.origin) if stage else None,
        model=leaves.get("job.model.name", ""),
        num_steps=num_steps,
        facts=facts,
        reasons=(*facts.reasons, *reasons),
    )


def _later_accuracy(path: Path, step: int) -> float | None:
    """Returns the accuracy of the newest `patchline evaluate RUN`. Returns None if there is none, or if this user may
    not read it."""
    try:
        if not is_a_folder(path / SCORES_FOLDER):
            return None
        from jobs.reports.run_scores import evaluations_of  # noqa: PLC0415 - most lists need no scores

        kept, _ = evaluations_of(path, step=step)
    except OSError:
        return None
    return kept[0].score if kept else None


def is_unstarted(path: Path) -> bool:
    """Whether the folder belongs to a run that was submitted and has not started. The record is written at the first
    start."""
    others = (RECORD_FILE, *SIGNS_OF_A_RUN, "checkpoints")
    return is_a_folder(path / "submit") and not any(is_there(path / name) for name in others)


def as_json(one: Run) -> dict[str, Any]:
    """Returns the run as a JSON object. Numbers that are not finite become null."""
    facts = one.facts
    numbers = {
        "loss": facts.loss,
        "accuracy": facts.accuracy,
        "images_per_second": facts.images_per_second,
        "goodput": facts.goodput,
        "last_seen": facts.last_seen,
    }
    finite = {name: value if value is not None and math.isfinite(value) else None for name, value in numbers.items()}
    return {
        "run": one.path,
        "stage": one.stage or None,
        "recipe": one.recipe.recipe if one.recipe and one.recipe.recipe else None,
        "fields_changed": one.recipe.num_changed if one.recipe else None,
        "from_file": one.recipe.file if one.recipe and one.recipe.file else None,
        "model": one.model or None,
        "state": facts.state,
        "step": facts.step,
        "steps": one.num_steps,
        **finite,
        "reasons": list(one.reasons),
    }
