"""Differences between two settings, field by field: each is flattened to dotted names, and a difference is a value.

All comparisons use it: resuming a run, continuing a packing, and `patchline diff`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shards.output.terminal import printable_name

_DIGEST = re.compile(r"[0-9a-f]{64}")
_DIGEST_SHOWN = 12
_PLAIN = re.compile(r"[^\s'\",;\[\]{}]+")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A field with two different values. None also means that one of the two does not have the field."""

    field: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{printable_name(self.field)}: before {shown(self.before)}, now {shown(self.now)}"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Every field whose values differ, in the order of `before`, then the fields that only `now` has."""
    was, is_now = flattened(before), flattened(now)
    return [
        Difference(field=field, before=was.get(field), now=is_now.get(field))
        for field in dict.fromkeys([*was, *is_now])
        if was.get(field) != is_now.get(field)
    ]


def flattened(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted name. Mappings are flattened at any depth; sequences are values (lists, as in JSON and YAML)."""
    leaves: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            leaves |= {f"{name}.{inner}": leaf for inner, leaf in flattened(value).items()}
        else:
            leaves[name] = _plain(value)
    return leaves


def as_lines(found: Iterable[Difference]) -> str:
    """The differences for a message, one indented line each."""
    return "\n".join(f"  {difference}" for difference in found)


def shown(value: Any) -> str:
    """A value as in YAML; a sha256 is shortened, and a text is quoted only if necessary."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    if not isinstance(value, str):
        return str(value)
    if _DIGEST.fullmatch(value):
        return f"{value[:_DIGEST_SHOWN]}..."
    return value if _PLAIN.fullmatch(value) else repr(value)


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
