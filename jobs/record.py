"""Reads and writes jobs as YAML: RUN/job.yaml, which is the record of a run, and the files that users write.

`patchline STAGE RUN/job.yaml` replays a record. A record has two entries, `stage` and `job`; `job` has every field. A
user's file has the fields at the top level, together with `recipe:` and, optionally, `stage:`. Without a recipe it must
have every field. A record with missing or unknown fields, written by another version of Patchline, is refused.

Each value is read strictly by the type of its field, and each fault is reported with its line. The file becomes a tree
that keeps line numbers and the spelling of every value, because PyYAML's own types are those of YAML 1.1, in which
`1e-3` is a string, `on` is true and `010` is eight. Numbers may be written as in YAML or in Python (`1e-3`,
`16_000_000_000`); nothing is converted from another type. Files are bounded in size and depth. Aliases, tags and
duplicate keys are refused, because they could make a value huge or hide one.

Commands that list many runs read a record's values as text (`read_leaves`). This is a hundred times faster than reading
a job, and checks only the YAML.
"""

import errno
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import yaml

from jobs.mistakes import known_instead
from jobs.output import make_folder
from jobs.recipes.shorter import scaled
from jobs.stages import STAGES, WITH_SMOKE
from pipeline.shared_settings import RECORD_FILE
from pipeline.training.settings.job import TrainingJob
from shards.config_values import allowed_instead, shown_text, whole_number, without_range
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import at_home, read_local_file, write_whole
from shards.files.looks import is_a_file
from shards.output.terminal import printable_name

MOST_BYTES = 256 * 1024  # a job's file has about 4 kB
MOST_DEPTH = 16
# Underscores stand between digits, as Python reads them.
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_DECIMAL = re.compile(r"[-+]?({0}\.?({0})?|\.{0})([eE][-+]?[0-9]+)?".format(r"[0-9]+(?:_[0-9]+)*"))
_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_MOST_DIGITS = 400  # a whole number with more is out of range; Python's own limit is 4,300
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_MOST_FAULTS = 8  # listed in a message
Config = TypeVar("Config")
_WRONG = object()  # stands for a faulty value until the whole file is read
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C parser, if PyYAML has it
Leaves = dict[str, str]
log = logging.getLogger(__name__)
Job = TypeVar("Job")
_MOST_SHOWN = 8
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Scalar(NamedTuple):  # a record has a hundred of these, and dataclasses would double the time of reading it
    """A single value as it is written. `is_plain`: whether it has no quotes."""

    text: str
    is_plain: bool
    line: int

    @property
    def is_nothing(self) -> bool:
        """Whether the value is YAML's null: empty, `~` or `null`, without quotes."""
        return self.is_plain and self.text in ("", "~", "null", "Null", "NULL")


@dataclass(frozen=True, kw_only=True)
class Items:
    """A list, and the line on which it begins."""

    items: "tuple[Tree, ...]"
    line: int


@dataclass(frozen=True, kw_only=True)
class Fields:
    """A mapping. `lines`: the line of each name."""

    entries: "dict[str, Tree]"
    lines: dict[str, int]
    line: int


Tree = Scalar | Items | Fields


def read_tree(path: Path, *, todo: str = "give a recipe's name or a YAML file") -> Tree:
    """Returns the only document of a file. Raises UserError if it cannot be read (`todo` says what to give instead), is
    not YAML, or is larger than a job may be."""
    try:
        content = read_local_file(path, most_bytes=MOST_BYTES)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", todo=todo) from error
    except InvalidDataError as error:
        raise InvalidDataError(f"{error}; a job is a YAML file of about 4 KiB") from error
    try:
        return _tree_of(content, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UserError(f"{path} is not YAML that a job can be read from: {line}{error.problem}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {str(error).splitlines()[0]}") from error


def _tree_of(content: bytes, loader: Any) -> Tree:
    """Returns the only document of a YAML text. Raises yaml.YAMLError if it has aliases, tags, duplicate keys or a
    second document, or is nested deeper than a job may be. An empty text gives an empty value."""
    events = yaml.parse(content, Loader=loader)
    next(events)  # the start of the stream
    if isinstance(next(events), yaml.StreamEndEvent):
        return Scalar(text="", is_plain=True, line=1)
    tree = _tree(next(events), events, depth=0)
    next(events)  # the end of the document
    if not isinstance(after := next(events), yaml.StreamEndEvent):
        raise _problem("but found another document", after)
    return tree


def _tree(event: Any, events: Iterator[Any], *, depth: int) -> Tree:
    """Returns the value that begins with this event. The value's other events are taken from `events`."""
    line = event.start_mark.line + 1
    if isinstance(event, yaml.AliasEvent):
        raise _problem(f"the alias *{event.anchor}; write out what it stands for", event)
    if event.tag is not None:
        raise _problem(f"the tag {event.tag}; leave it out", event)
    if depth == MOST_DEPTH:
        raise _problem(f"nested deeper than {MOST_DEPTH} levels", event)
    if isinstance(event, yaml.ScalarEvent):
        text = at_home(event.value) if "/" in event.value else event.value  # `~` alone is YAML's null
        return Scalar(text=text, is_plain=not event.style, line=line)
    if isinstance(event, yaml.SequenceStartEvent):
        own = itertools.takewhile(lambda one: not isinstance(one, yaml.SequenceEndEvent), events)
        return Items(items=tuple(_tree(one, events, depth=depth + 1) for one in own), line=line)
    return _fields(events, line, depth=depth + 1)


def _fields(events: Iterator[Any], line: int, *, depth: int) -> Fields:
    entries: dict[str, Tree] = {}
    lines: dict[str, int] = {}
    while not isinstance(key := next(events), yaml.MappingEndEvent):
        name = _tree(key, events, depth=depth)
        if not isinstance(name, Scalar):
            raise _problem("a field's name is a word, here it is a list or a group", key)
        if key.value in entries:
            raise _problem(f"{key.value} is given on line {lines[key.value]} already; remove one", key)
        entries[key.value], lines[key.value] = _tree(next(events), events, depth=depth), name.line
    return Fields(entries=entries, lines=lines, line=line)


def _problem(problem: str, event: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The faults found while a tree is read. `faults`: the line and the message of each. `unknown`: the unknown fields
    among them. `missing`: the missing fields."""

    root: type
    optional: Mapping[str, tuple[str, ...]]
    faults: list[tuple[int, str]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def fault(self, tree: Tree, message: str) -> Any:
        """Records a fault, and returns the placeholder for the value."""
        self.faults.append((tree.line, message))
        return _WRONG


def job_from(
    tree: Fields, *, kind: type, base: Any, optional: Mapping[str, tuple[str, ...]] = _NOTHING
) -> tuple[Any, Report]:
    """Returns the job in `tree`, and the report. The job is valid only if the report has no faults and no missing
    fields.

    Fields that the tree does not have are taken from the job `base`. If `base` is None, only the fields in `optional`
    (by class name) may be missing: they get their defaults.
    """
    report = Report(root=kind, optional=optional)
    return _group(kind, tree, base=base, name="", report=report), report


def read_config(
    path: Path,
    kind: type[Config],
    *,
    example: str,
    todo: str,
    base: Config | None = None,
    optional: Mapping[str, tuple[str, ...]] = _NOTHING,
) -> Config:
    """Returns the content of a YAML file that is not a job, as a `kind`. `base` and `optional` are as in `job_from`.
    Raises UserError with the line of each fault. `example` is a file to copy, and `todo` says what to give instead of a
    file that cannot be read."""
    tree = read_tree(path, todo=todo)
    if not isinstance(tree, Fields):
        raise UserError(f"{path} has no fields; copy {example} and change it")
    found, report = job_from(tree, kind=kind, base=base, optional=optional)
    faults = [
        f"{path}, line {line}: {message}" if line else f"{path}: {message}" for line, message in sorted(report.faults)
    ]
    faults += [f"{path}: {name} is missing" for name in report.missing]
    if faults:
        raise UserError("\n".join(faults[:_MOST_FAULTS]))
    config: Config = found
    return config


def _group(kind: type, tree: Tree, *, base: Any, name: str, report: Report) -> Any:
    if not isinstance(tree, Fields):
        return report.fault(tree, f"{name} is {_spelt(tree)}; allowed: a group of fields")
    prefix = f"{name}." if name else ""
    known = {each.name for each in fields(kind)}
    for given, line in tree.lines.items():
        if given not in known:
            own, instead = f"{prefix}{given}", known_instead(given, prefix, report.root)
            report.faults.append((line, f"unknown field {own}{instead}"))
            report.unknown.append(f"{own} (line {line}{instead})")
    values = {}
    for each in fields(kind):
        own = f"{prefix}{each.name}"
        if each.name in tree.entries:
            inner = getattr(base, each.name, None)
            values[each.name] = _value(each.type, tree.entries[each.name], base=inner, name=own, report=report)
        elif base is not None:
            values[each.name] = getattr(base, each.name)
        elif each.name not in report.optional.get(kind.__name__, ()):
            report.missing.append(own)
    if report.faults or report.missing:
        return _WRONG
    try:
        return kind(**values)
    except UserError as error:
        report.faults.append((tree.line if name else 0, str(error)))  # 0: the whole job
        return _WRONG


def _value(kind: Any, tree: Tree, *, base: Any, name: str, report: Report) -> Any:
    if is_dataclass(kind):
        return _group(kind, tree, base=base, name=name, report=report)  # type: ignore[arg-type]
    if get_origin(kind) in (Union, UnionType):
        return _one_of(get_args(kind), tree, base=base, name=name, report=report)
    if get_origin(kind) is tuple:
        return _items(get_args(kind), tree, name=name, report=report)
    if get_origin(kind) is Literal:
        return _choice(get_args(kind), tree, name=name, report=report)
    return _single(kind, tree, name=name, report=report)


def _one_of(kinds: tuple[Any, ...], tree: Tree, *, base: Any, name: str, report: Report) -> Any:
    """Reads a value or null, or a group that can be one of several dataclasses. Its entry `kind` says which (default:
    the kind of `base`)."""
    if NoneType in kinds:
        if isinstance(tree, Scalar) and tree.is_nothing:
            return None
        (only,) = (kind for kind in kinds if kind is not NoneType)
        return _value(only, tree, base=base, name=name, report=report)
    if not isinstance(tree, Fields):
        return report.fault(tree, f"{name} is {_spelt(tree)}; allowed: a group of fields")
    by_name = {kind.kind: kind for kind in kinds}
    given = tree.entries.get("kind")
    if given is None and base is None:
        report.missing.append(f"{name}.kind")
        return _WRONG
    wanted = given.text if isinstance(given, Scalar) else _spelt(given) if given else base.kind
    if wanted not in by_name:
        return report.fault(given or tree, f"{name}.kind is {wanted}; allowed: {', '.join(by_name)}")
    base = base if isinstance(base, by_name[wanted]) or base is None else by_name[wanted]()
    return _group(by_name[wanted], tree, base=base, name=name, report=report)


def _items(kinds: tuple[Any, ...], tree: Tree, *, name: str, report: Report) -> Any:
    if not isinstance(tree, Items):
        return report.fault(tree, f"{name} is {_spelt(tree)}; allowed: a list, as [a, b]")
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(tree.items)
    elif len(kinds) != len(tree.items):
        return report.fault(tree, f"{name} has {len(tree.items)} entries; allowed: {len(kinds)}")
    pairs = zip(kinds, tree.items, strict=True)
    return tuple(
        _value(kind, item, base=None, name=f"{name}.{number}", report=report)
        for number, (kind, item) in enumerate(pairs)
    )


def _choice(options: tuple[Any, ...], tree: Tree, *, name: str, report: Report) -> Any:
    for option in options:
        if isinstance(tree, Scalar) and tree.text == str(option) and (tree.is_plain or isinstance(option, str)):
            return option
    return report.fault(tree, f"{name} is {_spelt(tree)}; allowed: {', '.join(map(str, options))}")


def _single(kind: Any, tree: Tree, *, name: str, report: Report) -> Any:
    plain = without_range(kind)
    value = _read(plain, tree)
    if value is _WRONG:
        return report.fault(tree, f"{name} is {_spelt(tree)}; allowed: {_allowed(plain, tree)}")
    instead = allowed_instead(value, kind)
    return report.fault(tree, f"{name} is {_spelt(tree)}; {instead}") if instead else value


def _read(kind: type, tree: Tree) -> Any:
    if isinstance(tree, Scalar):
        text, is_plain = tree.text, tree.is_plain
        if kind is str and not (is_plain and (tree.is_nothing or _is_of_another_type(text))):
            return text
        if kind is bool and is_plain and text.lower() in _TRUTHS:
            return _TRUTHS[text.lower()]
        if kind is int and is_plain and _WHOLE.fullmatch(text):
            return int(text) if len(text) <= _MOST_DIGITS else _WRONG
        if kind is float and is_plain and _DECIMAL.fullmatch(text):
            return float(text)
    return _WRONG


def _is_of_another_type(text: str) -> bool:
    return bool(_WHOLE.fullmatch(text) or _DECIMAL.fullmatch(text)) or text.lower() in ("true", "false")


def _allowed(kind: type, tree: Tree) -> str:
    if kind is str:
        is_word = isinstance(tree, Scalar) and not tree.is_nothing
        return (
            f"a text, in quotes: '{shown_text(tree.text)}'"
            if is_word and isinstance(tree, Scalar)
            else "a text ('' for none)"
        )
    return {bool: "true or false", int: "a whole number", float: "a number"}[kind]


def _spelt(tree: Tree) -> str:
    if isinstance(tree, Scalar):
        return "empty" if tree.is_nothing else shown_text(tree.text if tree.is_plain else f"the text {tree.text!r}")
    return "a list" if isinstance(tree, Items) else "a group of fields"


def read_leaves(path: Path) -> Leaves:
    """Returns the values in a record as text, by path: `stage`, and fields such as `job.model.name`. Items of a list
    are numbered.

    Raises OSError if the file cannot be read, and InvalidDataError if it is not a record.
    """
    data, leaves = read_local_file(path, most_bytes=MOST_BYTES), Leaves()
    try:
        _put_leaves(leaves, "", _tree_of(data, _Loader))
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise InvalidDataError(f"it is not YAML: {line}{error.problem}") from error
    except yaml.YAMLError as error:
        raise InvalidDataError(f"it is not YAML: {str(error).partition(chr(10))[0]}") from error
    if "stage" not in leaves or not any(name.startswith("job.") for name in leaves):
        raise InvalidDataError("it has no stage and job, as a run's record has")
    return leaves


def is_scored(leaves: Leaves) -> bool:
    """Whether the model of a training job is scored while it is trained."""
    parts = ("job.data.held_out.share", "job.data.held_out.count")
    return bool(leaves.get("job.evaluation.url")) or any(leaves.get(name, "0") not in ("0", "0.0") for name in parts)


def leaves_of(job: Any) -> Leaves:
    """Returns the values of a job in memory, as `read_leaves` does for a file, but without `job.` at the beginning of
    each path."""
    return dict(_of_values("", asdict(job)))


def _put_leaves(found: Leaves, path: str, tree: Tree) -> None:
    """Puts the single values in a tree into `found`, by their paths."""
    if isinstance(tree, Scalar):
        found[path] = tree.text
        return
    items = tree.entries.items() if isinstance(tree, Fields) else enumerate(tree.items)
    for name, inner in items:
        _put_leaves(found, f"{path}.{name}" if path else str(name), inner)


def _of_values(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in items:
            yield from _of_values(f"{path}.{name}" if path else str(name), inner)
    elif isinstance(value, bool) or value is None:
        yield path, "null" if value is None else str(value).lower()
    else:
        yield path, str(value)


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """A job's file before its fields are read. `stage` and `recipe` are empty if the file does not have them."""

    path: Path
    stage: str
    recipe: str
    job: Tree
    is_record: bool


def record_text(stage: str, job: Any) -> str:
    """Returns a job with every field as YAML that `read_record` can read."""
    return str(yaml.safe_dump({"stage": stage, "job": _plain(asdict(job))}, sort_keys=False))


def write_record(run_dir: Path, *, stage: str, job: object) -> None:
    """Writes run_dir/job.yaml, completely or not at all. The umask decides who may read the run directory.

    Raises OSError if the disk is full, and UserError if the folder is a training run and `stage` is not, or if it
    cannot be made or written to for another reason.
    """
    path = run_dir / RECORD_FILE
    refuse_training_run(run_dir, stage=stage)
    try:
        make_folder(run_dir)
        write_whole(path, f"# patchline {stage} {printable_name(str(path))}\n{record_text(stage, job)}".encode())
    except OSError as error:
        if error.errno in _FULL:  # not the user's mistake: the command can be repeated once there is room
            error.filename = str(path)
            raise
        what = f"cannot write job.yaml in {run_dir}: {error.strerror}"
        raise UserError(what, todo="give --run-dir a folder that this user may write to") from error


def refuse_training_run(run_dir: Path, *, stage: str) -> None:
    """Raises UserError if the folder is a training run, whose record a record of another `stage` would replace: without
    it, the run could not be listed, reported or resumed. A record that cannot be read may be that of a run."""
    path = run_dir / RECORD_FILE
    if stage in WITH_SMOKE or not is_a_file(path):  # training checks on its own what it continues
        return
    try:
        found = open_job(path).stage
    except (UserError, InvalidDataError):
        found = ""
    if not found or found in WITH_SMOKE:
        kind = f"a run of patchline {found}" if found else "a job.yaml of unknown stage"
        what = f"--run-dir {str(run_dir)!r} has {kind}, and its record would be lost"
        raise UserError(what, todo=f"give --run-dir another folder, such as {str(run_dir) + '-' + stage!r}")


def open_job(path: Path) -> JobFile:
    """Returns the record or the user's file at `path`. Raises UserError if it is neither."""
    tree = read_tree(path)
    if not isinstance(tree, Fields):
        raise UserError(f"{path} has no fields; add a line such as `recipe: digits_smoke`, and your changes")
    head = {}
    for name in ("stage", "recipe"):
        value = tree.entries.get(name)
        if value is not None and (not isinstance(value, Scalar) or value.is_nothing):
            raise UserError(f"{path}, line {value.line}: {name} must be a single word")
        head[name] = value.text if isinstance(value, Scalar) else ""
    if ".py" in head["recipe"]:  # the file may be another user's, so reading it must not execute anything
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
    """Returns the job of `stage` in a file. `recipe` returns the job of the recipe with a given name (None: the stage
    has no recipes).

    Raises UserError if the file belongs to another stage, if a field is unknown or wrong, or if one is missing and
    there is no recipe.
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
    """Returns the recipe's job, with a warm-up that fits the steps in the file, unless the file gives a warm-up
    itself."""
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
    """Raises UserError if the fields of a record are not exactly those that this version writes."""
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
