"""Jobs as YAML: RUN/job.yaml, the record of a run, and the files that users write.

`patchline STAGE RUN/job.yaml` replays a record. A record has the two entries `stage` and `job`, with every field. A
user's file has its fields at the top level, beside `recipe:` and, optionally, `stage:`; without a recipe it must have
every field.

A record of another version of Patchline, which has other fields, is refused: nothing fills in what it lacks.

For lists of many runs, the values of a record are read as text by the path of their field, a hundred times faster than
as a job: only the YAML is checked.
"""

import errno
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from jobs.folders import make_folder
from jobs.job_files import MOST_BYTES, MOST_DEPTH, Fields, Report, Scalar, Tree, job_from, read_tree
from jobs.stages import STAGES
from jobs.warmup import scaled
from pipeline.training.settings.job import TrainingJob
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import read_local_file, write_whole
from shards.output.terminal import printable_name
from shards.schema.config_values import whole_number

_MOST_LEAVES = 4096  # a job has about 120
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, unless PyYAML was built without it
Leaves = dict[str, str]


def read_leaves(path: Path) -> Leaves:
    """`stage` and the fields of the job, such as `job.model.name`, items of lists by number. A null is "null".

    Raises OSError, and InvalidDataError if it is not a record.
    """
    data = read_local_file(path, most_bytes=MOST_BYTES)
    try:
        leaves = dict(_leaves(data))
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise InvalidDataError(f"it is not YAML: {line}{error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise InvalidDataError(f"it is not YAML: {str(error).partition(chr(10))[0]}") from error
    if "stage" not in leaves or not any(name.startswith("job.") for name in leaves):
        raise InvalidDataError("it has no stage and job, as a run's record has")
    return leaves


def is_scored(leaves: Leaves) -> bool:
    """Whether the model of a training job is scored while it is trained."""
    parts = ("job.data.held_out.share", "job.data.held_out.count")
    return bool(leaves.get("job.evaluation.url")) or any(leaves.get(name, "0") not in ("0", "0.0") for name in parts)


def leaves_of(job: Any) -> Leaves:
    """The same of a job in memory, without the first word `job.`."""
    return dict(_of_values("", asdict(job)))


@dataclass
class _Open:
    """A mapping or a list that is being read. `name`: of its current item, a number in a list."""

    is_list: bool
    name: str
    wants_name: bool

    def next_item(self) -> None:
        """The current item is complete."""
        self.name = str(int(self.name) + 1) if self.is_list else ""
        self.wants_name = not self.is_list


def _leaves(data: bytes) -> Iterator[tuple[str, str]]:
    """The scalars, with their paths. ValueError if they are too many or too deep; nothing here recurs."""
    opened: list[_Open] = []
    num_leaves = 0
    for event in yaml.parse(data, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has an alias")
        if isinstance(event, yaml.CollectionEndEvent):
            opened.pop()
        elif opened and opened[-1].wants_name and isinstance(event, yaml.ScalarEvent):
            opened[-1].name, opened[-1].wants_name = event.value, False
            continue
        elif isinstance(event, yaml.ScalarEvent):
            num_leaves += 1
            if num_leaves > _MOST_LEAVES:
                raise ValueError(f"it has more than {_MOST_LEAVES:,} values")
            yield ".".join(one.name for one in opened), event.value
        elif isinstance(event, yaml.CollectionStartEvent):
            is_list = isinstance(event, yaml.SequenceStartEvent)
            if len(opened) == MOST_DEPTH or (opened and opened[-1].wants_name):
                raise ValueError("it is nested too deeply, or has a group as a name")
            opened.append(_Open(is_list=is_list, name="0" if is_list else "", wants_name=not is_list))
            continue
        if opened:
            opened[-1].next_item()


def _of_values(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in items:
            yield from _of_values(f"{path}.{name}" if path else str(name), inner)
    elif isinstance(value, bool) or value is None:
        yield path, "null" if value is None else str(value).lower()
    else:
        yield path, str(value)


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
    """Write run_dir/job.yaml, completely or not at all; who may read the run directory is up to the umask.

    UserError if the folder cannot be made or written to.
    """
    path = run_dir / "job.yaml"
    try:
        make_folder(run_dir)
        write_whole(path, f"# patchline {stage} {printable_name(str(path))}\n{record_text(stage, job)}".encode())
    except OSError as error:
        if error.errno in _FULL:  # no mistake: the same command continues once there is room
            error.filename = str(path)
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
    job, report = job_from(file.job, kind=kind, base=base)
    if file.is_record:
        _refuse_other_fields(file.path, report)
    _refuse(file.path, report, stage=stage)
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


def _refuse_other_fields(path: Path, report: Report) -> None:
    """UserError if a record has other fields than this version writes."""
    found = (("unknown", report.unknown), ("missing", report.missing))
    others = [f"{what} {_listed(names)}" for what, names in found if names]
    if others:
        raise UserError(
            f"{path} is not a record of this version, which has every field and no other: {'; '.join(others)}; replay "
            "it with the version that wrote it, or write a file with `recipe: NAME` and what differs from it"
        )


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
