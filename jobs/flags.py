"""Reads the flags of a job from its dataclasses. Each field that is not a group has a flag with a sentence, the kind of
its value, and its default.

A field's sentence is the string literal below it in the source. If a field has no sentence and takes its default from a
field of another dataclass (`seed: int = PackSpec.seed`), it has the sentence of that field.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from shards.config_values import without_none, without_range

_PLACES = {
    **dict.fromkeys(("run_dir", "run", "dir", "folder"), "DIR"),
    "url": "URL",
    "against": "URL",
    "part": "I/N",
    **dict.fromkeys(("path", "root", "out", "weights"), "PATH"),
}
_ENDINGS = {"_url": "URL", "_file": "FILE", "_csv": "FILE", "files": "FILE"}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag such as `--data.url URL`. `takes` names the flag's value in help; it is empty for a switch (`--deep`,
    `--no-deep`). `default` is the value in the job.

    `kind` is the type of one value, with its range.
    """

    name: str
    takes: str
    sentence: str
    default: object
    kind: Any = str
    choices: tuple[str, ...] = ()
    is_many: bool = False
    may_be_none: bool = False

    @property
    def off(self) -> str:
        """The name that turns a switch off, such as `--data.augment.no-flip`."""
        return self._with("no-")

    @property
    def names(self) -> tuple[str, ...]:
        """The spellings of the flag on the command line."""
        return (self.name,) if self.takes else (self.name, self.off)

    @property
    def group(self) -> str:
        """The part of the name before the last dot; empty for the job's own fields."""
        return self.name.removeprefix("--").rpartition(".")[0]

    @property
    def usage(self) -> str:
        """The flag as help shows it: `--steps INT`, `--deep` or, for a switch that is on,
        `--data.augment.[no-]flip`."""
        if self.takes:
            return f"{self.name} {self.takes}"
        return self._with("[no-]") if self.default else self.name

    def _with(self, before_last: str) -> str:
        first, dot, last = self.name.removeprefix("--").rpartition(".")
        return f"--{first}{dot}{before_last}{last}"


def flags_of(job: Any, prefix: str = "--") -> Iterator[Flag]:
    """Yields every flag of a job, in the order of its fields: first the job's own fields, then those of its groups."""
    inner = []
    for field in fields(job):
        value = getattr(job, field.name)
        name = prefix + field.name.replace("_", "-")
        if is_dataclass(value):
            inner.append((value, f"{name}."))
            continue
        (kind,) = without_none(field.type)
        plain = without_range(kind)
        choices = tuple(str(word) for word in get_args(plain)) if get_origin(plain) is Literal else ()
        if len(choices) != 1:  # a field with a single choice just names the kind of its group, so it has no flag
            yield Flag(
                name=name,
                takes=_takes(field.name, plain, choices),
                sentence=sentences(type(job)).get(field.name, ""),
                default=value,
                kind=get_args(plain)[0] if get_origin(plain) is tuple else kind,
                choices=choices,
                is_many=get_origin(plain) is tuple,
                may_be_none=NoneType in get_args(field.type),
            )
    for value, name in inner:
        yield from flags_of(value, name)


def groups_of(job: Any, prefix: str = "") -> dict[str, str]:
    """Returns the groups of flags in a job, as `Flag.group` names them, with their sentences."""
    found: dict[str, str] = {}
    for field in fields(job):
        inner = getattr(job, field.name)
        if is_dataclass(inner):
            name = prefix + field.name.replace("_", "-")
            found |= {name: sentences(type(job)).get(field.name, ""), **groups_of(inner, f"{name}.")}
    return found


def default_text(flag: Flag) -> str:
    """Returns the flag's default as help shows it: on or off for a switch, none for None, and an empty string for an
    empty default."""
    value = flag.default
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(str(item) for item in value)
    return "none" if value is None else str(value)


def sentences(kind: type) -> dict[str, str]:
    """Returns the sentence of each field of a dataclass, including inherited fields."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        for field, said in _in_module(one.__module__).get(one.__name__, {}).items():
            if isinstance(said, _Of):
                said_there = sentences(vars(sys.modules[one.__module__])[said.dataclass])
                found |= {field: said_there[said.field]} if said.field in said_there else {}
            else:
                found[field] = said
    return found


@dataclass(frozen=True)
class _Of:
    """The field of another dataclass that gives a field its default and its sentence."""

    dataclass: str
    field: str


@cache
def _in_module(module: str) -> dict[str, dict[str, str | _Of]]:
    """Returns the sentences in a module's source, by class and field. Returns an empty dictionary if there is no
    source."""
    file = getattr(sys.modules[module], "__file__", None)
    if not file or not Path(file).is_file():
        return {}
    tree = ast.parse(Path(file).read_bytes())
    return {node.name: _in_class(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _in_class(node: ast.ClassDef) -> dict[str, str | _Of]:
    found: dict[str, str | _Of] = {}
    for field, below in zip(node.body, [*node.body[1:], None], strict=True):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            found[field.target.id] = " ".join(below.value.value.split())
        elif isinstance(field.value, ast.Attribute) and isinstance(field.value.value, ast.Name):
            found[field.target.id] = _Of(field.value.value.id, field.value.attr)
    return found


def _takes(name: str, kind: Any, choices: tuple[str, ...]) -> str:
    if kind is bool:
        return ""
    if choices:
        return f"{{{','.join(choices)}}}"
    if get_origin(kind) is tuple:
        item = without_range(get_args(kind)[0])
        return "URL WEIGHT ..." if get_origin(item) is tuple else f"{_word(name, item)} ..."
    return _word(name, kind)


def _word(name: str, kind: Any) -> str:
    if kind in (int, float):
        return str(kind.__name__).upper()
    ending = next((word for end, word in _ENDINGS.items() if name.endswith(end)), "TEXT")
    return _PLACES.get(name, ending)
