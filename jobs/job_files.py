"""A YAML file as a tree that keeps line numbers, and the spelling of every value.

The type of a field decides how its value is read (jobs/fields.py): PyYAML itself reads YAML 1.1, in which `1e-3` is a
text, `on` is true and `010` is eight. Files are bounded in size and depth. Aliases, tags and duplicate keys are
refused, so that no value grows or is dropped.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shards.errors import InvalidDataError, UserError
from shards.local_file import read_local_file

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
        return Scalar(text=node.value, is_plain=node.style is None, line=line)
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
