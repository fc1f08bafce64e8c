"""Edits of JSON by structure: values of other types and sizes, fields missing, repeated, unknown, nested deep.

The edited text may be no JSON any more (a key twice, NaN, 5,000 digits): `raw` texts stand in the tree as marked
strings until it is written. Lines of JSON, the header of a safetensors file and YAML in flow style are edited alike.
"""

import json
import re
import struct
from collections.abc import Sequence
from random import Random
from typing import Any

from tests.fuzz.byte_edits import Edit

VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 255, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 62, 1 << 63),
    *(-(1 << 63), 10**30, 0.5, -1.5, 1e308, "", "x", "1", "-1", "../../x", "/etc/passwd", "a\0b", "\ud800", "²"),
    *("\x1b]0;x\x07", "a\nb", [], {}, [1], [[]], {"a": 1}, {"": None}, ["x", 1, None], "fp32", "9" * 40),
)
RAW = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-0", "0x1", "1_000", "tru", "'x'", "", "*a", "&a [*a]", "!!int 1"),
    *("!!python/object/apply:os.getcwd []", "~", "1:30", "{a: b", "2024-01-01", "<<", "? [a] : b", "\t- x", "\0"),
)
_MARK = re.compile(r'"@@raw ((?:[^"\\]|\\.)*)@@"')
_STOPS = 0.25  # how often the way into the tree ends at an object or a list


def propose(rng: Random, data: bytes) -> Edit:
    """An edit of a JSON document."""
    return propose_in(rng, json.loads(data))


def propose_in(rng: Random, tree: Any) -> Edit:
    """An edit of a tree."""
    path, value = _way(rng, tree)
    name = rng.choice(("set", "set", "set", "near", "near", "drop", "drop", "twice", "more", "move", "raw", "deep"))
    if name == "near":
        return ["set", path, rng.choice(_near(value))]
    if name == "set":
        return ["set", path, rng.choice(VALUES)]
    if name == "move":
        return ["set", path, _way(rng, tree)[1]]
    if name == "raw":
        return ["raw", path, rng.choice(RAW)]
    if name == "deep":
        return [rng.choice(("deep", "digits", "long")), path, rng.choice((20, 70, 1_000, 5_000, 200_000))]
    return [name, path]


def apply(data: bytes, edit: Edit) -> bytes:
    """The document after the edit."""
    return written(edited(json.loads(data), edit))


def propose_lines(rng: Random, data: bytes) -> Edit:
    """An edit of a file with one JSON object per line."""
    return propose_in(rng, _lines(data))


def apply_lines(data: bytes, edit: Edit) -> bytes:
    """The lines after the edit."""
    tree = edited(_lines(data), edit)
    return b"\n".join(written(line) for line in tree) + b"\n" if isinstance(tree, list) else written(tree)


def propose_header(rng: Random, data: bytes) -> Edit:
    """An edit of the header of a safetensors file."""
    return propose(rng, _header(data)[0])


def apply_header(data: bytes, edit: Edit) -> bytes:
    """The file after the edit of its header, whose length is the right one."""
    header, rest = _header(data)
    header = apply(header, edit)
    return struct.pack("<Q", len(header)) + header + rest


def edited(tree: Any, edit: Edit) -> Any:
    """The tree after an edit; the same one if nothing is at its path."""
    name, path, *rest = edit
    if not path:
        return _instead(name, "", tree, rest) if name in ("set", "raw", "deep", "digits", "long") else tree
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    key = path[-1]
    value = parent[key]
    if name == "drop":
        del parent[key]
    elif isinstance(parent, list) and name in ("twice", "more"):
        parent.insert(key, value)
    elif name == "more":
        parent[f"{key}_of_old"] = value
    else:
        parent[key] = _instead(name, key, value, rest)
    return tree


def written(tree: Any) -> bytes:
    """As JSON, with the raw texts in their places."""
    return _MARK.sub(lambda found: json.loads(f'"{found[1]}"'), json.dumps(tree)).encode("utf-8", "replace")


def _instead(name: str, key: Any, value: Any, rest: Sequence[Any]) -> Any:
    if name == "set":
        return rest[0]
    if name == "twice":
        return f"@@raw {json.dumps(value)}, {json.dumps(key)}: {json.dumps(value)}@@"
    if name == "raw":
        return f"@@raw {rest[0]}@@"
    number = int(rest[0])
    texts = {"deep": "[" * number + "]" * number, "digits": "9" * number, "long": json.dumps("x" * number)}
    return f"@@raw {texts[name]}@@"


def _way(rng: Random, tree: Any) -> tuple[list[Any], Any]:
    """A random path into the tree, and the value there."""
    path: list[Any] = []
    while isinstance(tree, dict | list) and tree and (not path or rng.random() > _STOPS):
        path.append(rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree)))
        tree = tree[path[-1]]
    return path, tree


def _near(value: Any) -> list[Any]:
    """Values like this one: one more, another type, a part of it."""
    if isinstance(value, bool) or value is None:
        return [not value, int(bool(value)), str(value)]
    if isinstance(value, int | float):
        return [
            value + 1,
            value - 1,
            -value,
            value * 2,
            value + 0.5,
            float(value),
            str(value),
            [value],
            value + (1 << 32),
        ]
    if isinstance(value, str):
        return [value[1:], value[:-1], value + "x", value.upper(), value[::-1], [value], {value: value}, len(value)]
    if isinstance(value, list):
        return [value[1:], value + value, value[::-1], {str(n): item for n, item in enumerate(value)}, str(value)]
    return [list(value.values()), [value], str(value), dict(list(value.items())[1:])]


def _lines(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.splitlines()]


def _header(data: bytes) -> tuple[bytes, bytes]:
    end = 8 + struct.unpack("<Q", data[:8])[0]
    return data[8:end], data[end:]
