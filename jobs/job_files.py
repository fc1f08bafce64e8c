"""Reads a job from a YAML file: each value strictly by the type of its field, and each fault with its line.

The file becomes a tree that keeps line numbers and the spelling of every value: PyYAML itself reads YAML 1.1, in which
`1e-3` is a text, `on` is true and `010` is eight. Numbers may be written as in YAML or in Python (`1e-3`,
`16_000_000_000`); nothing is converted from another type. Files are bounded in size and depth. Aliases, tags and
duplicate keys are refused, so that no value grows or is dropped.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml

from jobs.mistakes import known_instead
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import at_home, read_local_file
from shards.schema.config_values import allowed_instead, shown_text, without_range

MOST_BYTES = 256 * 1024  # a job has 4 kB
MOST_DEPTH = 16


@dataclass(frozen=True, kw_only=True)
class Scalar:
    """A single value as it is written; `is_plain`: without quotes."""

    text: str
    is_plain: bool
    line: int

    @property
    def is_nothing(self) -> bool:
        """YAML's null: an empty value, `~` or `null`."""
        return self.is_plain and self.text in ("", "~", "null", "Null", "NULL")


@dataclass(frozen=True, kw_only=True)
class Items:
    """A list."""

    items: "tuple[Tree, ...]"
    line: int


@dataclass(frozen=True, kw_only=True)
class Fields:
    """A mapping; `lines` says where each name is."""

    entries: "dict[str, Tree]"
    lines: dict[str, int]
    line: int


Tree = Scalar | Items | Fields


def read_tree(path: Path, *, todo: str = "give a recipe's name or a YAML file") -> Tree:
    """The only document of a file. UserError if it cannot be read (`todo`: what to give instead), is not YAML, or is
    larger than a job may be."""
    try:
        content = read_local_file(path, most_bytes=MOST_BYTES)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; {todo}") from error
    except InvalidDataError as error:
        raise InvalidDataError(f"{error}; a job is a YAML file of about 4 KiB") from error
    try:
        node = _Loader(content).get_single_node()
        return Scalar(text="", is_plain=True, line=1) if node is None else _tree(node)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UserError(f"{path} is not YAML that a job can be read from: {line}{error.problem}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {str(error).splitlines()[0]}") from error


class _Loader(yaml.SafeLoader):
    """Composes nodes without aliases and tags, to a bounded depth."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _refused(f"the alias *{event.anchor}; write out what it stands for", event)
        if event.tag is not None:
            raise _refused(f"the tag {event.tag}; leave it out", event)
        if self.depth == MOST_DEPTH:
            raise _refused(f"nested deeper than {MOST_DEPTH} levels", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _refused(problem: str, node: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _tree(node: yaml.Node) -> Tree:
    line = node.start_mark.line + 1
    if isinstance(node, yaml.ScalarNode):
        text = at_home(node.value) if "/" in node.value else node.value  # `~` alone is YAML's null
        return Scalar(text=text, is_plain=node.style is None, line=line)
    if isinstance(node, yaml.SequenceNode):
        return Items(items=tuple(_tree(item) for item in node.value), line=line)
    return _fields(node, line)


def _fields(node: yaml.Node, line: int) -> Fields:
    entries: dict[str, Tree] = {}
    lines: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _refused("a field's name is a word, here it is a list or a group", key)
        if key.value in entries:
            raise _refused(f"{key.value} is given on line {lines[key.value]} already; remove one", key)
        entries[key.value], lines[key.value] = _tree(value), key.start_mark.line + 1
    return Fields(entries=entries, lines=lines, line=line)


_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_DECIMAL = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?")
_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_MOST_DIGITS = 400  # of a whole number: any with more is far out of range, and Python reads no more than 4,300
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_MOST_FAULTS = 8  # that a message lists
Config = TypeVar("Config")
_WRONG = object()  # in place of a faulty value, until the whole file is read


@dataclass(frozen=True, kw_only=True)
class Report:
    """What reading a tree found: faults by line, among them the unknown fields, and missing fields."""

    root: type
    optional: Mapping[str, tuple[str, ...]]
    faults: list[tuple[int, str]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def fault(self, tree: Tree, message: str) -> Any:
        """Record a fault; the placeholder of the value."""
        self.faults.append((tree.line, message))
        return _WRONG


def job_from(
    tree: Fields, *, kind: type, base: Any, optional: Mapping[str, tuple[str, ...]] = _NOTHING
) -> tuple[Any, Report]:
    """The job in `tree`, and the report; the job is valid only if the report has no faults and no missing fields.

    `base` (a job, or None) has the fields that the tree lacks. Without it, only the fields in `optional` (by class) may
    be missing: they get their defaults.
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
    """The dataclass in a YAML file that is no job; `base` and `optional` as for `job_from`. UserError with the lines of
    what is wrong. `example` is a file to copy, and `todo` says what to give instead of a file that cannot be read."""
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
        report.faults.append((tree.line if name else 0, str(error)))  # a whole job has no line of its own
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
    """A value or null; or a group whose `kind` says which of several it is (by default, that of the base)."""
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
