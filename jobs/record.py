"""Jobs as YAML: RUN/job.yaml, the record of a run, replayable with `patchline STAGE RUN/job.yaml`; and the files that
users write, a `recipe:` and the fields that differ from it.

A record has the two entries `stage` and `job`, with every field. A user's file has its fields at the top level, beside
`recipe:` and, optionally, `stage:`; without a recipe it must have every field.
"""

import errno
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from jobs.fields import Report, job_from
from jobs.job_files import Fields, Scalar, Tree, read_tree
from jobs.later_fields import LATER_FIELDS, RENAMED_FIELDS
from jobs.stages import STAGES
from jobs.warmup import scaled
from pipeline.training.settings.job import TrainingJob
from shards.errors import UserError
from shards.output.terminal import printable_name
from shards.schema.config_values import whole_number

log = logging.getLogger(__name__)
Job = TypeVar("Job")
_MOST_SHOWN = 8
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """A file before its fields are read; `stage` and `recipe` are empty if the file does not have them."""

    path: Path
    stage: str
    recipe: str
    job: Tree
    is_record: bool


def record_text(stage: str, job: Any) -> str:
    """A job as YAML with every field: what read_record reads back."""
    return str(yaml.safe_dump({"stage": stage, "job": _plain(asdict(job))}, sort_keys=False))


def write_record(run_dir: Path, *, stage: str, job: object) -> None:
    """Write run_dir/job.yaml, completely or not at all; the run directory becomes readable by its owner alone.

    UserError if the folder cannot be made or written to.
    """
    waiting, shown = run_dir / "job.yaml.part", printable_name(str(run_dir / "job.yaml"))
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        waiting.write_text(f"# patchline {stage} {shown}\n{record_text(stage, job)}")
        waiting.replace(run_dir / "job.yaml")
    except OSError as error:
        with suppress(OSError):
            waiting.unlink(missing_ok=True)
        if error.errno in _FULL:  # no mistake: the same command continues once there is room
            error.filename = str(run_dir / "job.yaml")
            raise
        what = f"cannot write job.yaml in {run_dir}: {error.strerror}"
        raise UserError(f"{what}; give --run-dir a folder that this user may write to") from error


def open_job(path: Path) -> JobFile:
    """The record or the user's file at `path`. UserError if it is neither."""
    tree = read_tree(path)
    if not isinstance(tree, Fields):
        raise UserError(f"{path} has no fields; add a line such as `recipe: digits_smoke`, and your changes")
    head = {}
    for name in ("stage", "recipe"):
        value = tree.entries.get(name)
        if value is not None and (not isinstance(value, Scalar) or value.is_nothing):
            raise UserError(f"{path}, line {value.line}: {name} must be a single word")
        head[name] = value.text if isinstance(value, Scalar) else ""
    if ".py" in head["recipe"]:  # the file may come from others: reading it must not execute anything
        todo = f"name it on the command line instead: patchline STAGE {head['recipe']}"
        raise UserError(f"{path}, recipe: {head['recipe']!r} is Python, which a YAML file cannot start; {todo}")
    if head["stage"] not in ("", *STAGES):
        raise UserError(f"{path}: stage is {head['stage']!r}; allowed: {', '.join(STAGES)}")
    if "job" in tree.entries:
        if set(tree.entries) != {"stage", "job"}:
            found = ", ".join(tree.entries)
            raise UserError(f"{path} has the entries {found}; allowed beside `job:` is `stage:`, and nothing else")
        return JobFile(path=path, job=tree.entries["job"], is_record=True, **head)
    own = {name: value for name, value in tree.entries.items() if name not in head}
    lines = {name: tree.lines[name] for name in own}
    return JobFile(path=path, job=Fields(entries=own, lines=lines, line=tree.line), is_record=False, **head)


def read_record(path: Path, *, stage: str, kind: type[Job], recipe: Callable[[str], Job] | None = None) -> Job:
    """The job of `stage` in a file; `recipe` makes the job of a recipe's name (None: the stage has no recipes).

    UserError if the file is of another stage, or a field is unknown, wrong, or missing without a recipe.
    """
    file = open_job(path)
    if file.stage and file.stage != stage:
        raise UserError(f"{path} is of the stage {file.stage!r}; run: patchline {file.stage} {path}")
    if file.recipe and recipe is None:
        raise UserError(f"{path}: patchline {stage} has no recipes; give every field instead of `recipe:`")
    try:
        base = recipe(file.recipe) if file.recipe and recipe else None
    except UserError as error:
        raise UserError(f"{path}, recipe: {error}") from error
    return _job_in(file, stage=stage, kind=kind, base=base)


def _job_in(file: JobFile, *, stage: str, kind: type[Job], base: Job | None) -> Job:
    if not isinstance(file.job, Fields):
        raise UserError(f"{file.path}, line {file.job.line}: `job:` has no fields; it must have every one")
    base = _warmed_up(file.job, base)
    if file.is_record:
        job, report = job_from(file.job, kind=kind, base=base, later=LATER_FIELDS, renamed=RENAMED_FIELDS)
    else:
        job, report = job_from(file.job, kind=kind, base=base)
    _refuse(file.path, report, stage=stage)
    if report.assumed:
        names = _listed(report.assumed)
        log.info("%s was written before these fields existed; they keep their former meaning: %s", file.path, names)
    result: Job = job
    return result


def _warmed_up(given: Fields, base: Job | None) -> Any:
    """The recipe's job, with a warm-up that fits the steps in the file, unless the file gives a warm-up itself."""
    steps, schedule = given.entries.get("steps"), given.entries.get("schedule")
    has_warmup = isinstance(schedule, Fields) and "warmup_steps" in schedule.entries
    number = whole_number(steps.text) if isinstance(steps, Scalar) else None
    if not isinstance(base, TrainingJob) or has_warmup or number is None:
        return base
    keep = f"schedule.warmup_steps: {base.schedule.warmup_steps}"
    fitted, note = scaled(base, steps=number, keep=keep)
    if note:
        log.info(note)
    return fitted


def _refuse(path: Path, report: Report, *, stage: str) -> None:
    if report.faults:
        faults = sorted(report.faults)[:_MOST_SHOWN]
        lines = [f"  line {line}: {message}" if line else f"  {message}" for line, message in faults]
        more = len(report.faults) - len(lines)
        end = [f"  and {more} more"] if more else []
        raise UserError("\n".join([f"{path} is not a job of patchline {stage}:", *lines, *end]))
    if report.missing:
        raise UserError(
            f"{path} names no recipe, so it must have every field. Missing are\n  {_listed(report.missing)}\n"
            f"Add `recipe: NAME` and keep what differs from it (`patchline {stage}` lists the recipes),\n"
            f"or give every field (`patchline show {stage} NAME` prints them)."
        )


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_SHOWN
    return ", ".join(names[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
