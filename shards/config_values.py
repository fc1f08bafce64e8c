"""Checks the fields of configurations against their types and the ranges declared beside them.

    @dataclass(frozen=True, kw_only=True)
    class Example:
        steps: Annotated[int, Range(1)] = 1000
        dropout: Annotated[float, Range(0, below=1, zero="off")] = 0.0

        def __post_init__(self) -> None:
            refuse_wrong_values(self, where="example.")

The command line and the YAML reader check single values with `allowed_instead`: their messages name the flag or line.

Two sets of settings are compared with `differences`, field by field: when a run is resumed, when a packing is
continued, and by `patchline diff`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from shards.errors import UserError
from shards.output.terminal import printable_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_MOST_CHARACTERS = 200  # a message shows at most this much of a value
_MOST_WHOLE = (1 << 63) - 1  # the largest value of an int64 (NumPy, Arrow)
_MOST_DIGITS = 19  # the number of digits of _MOST_WHOLE
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DIGEST_SHOWN = 12
_PLAIN = re.compile(r"[^\s'\",;\[\]{}]+")


@dataclass(frozen=True)
class Range:
    """The numbers that a field may hold: from `least`, or above `above`, to `most`, or below `below`.

    `zero` says what 0 means.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    zero: str = ""

    def holds(self, value: float) -> bool:
        """Returns whether a number is within all bounds."""
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        """Returns the range as messages show it: `1 or more`, `0 (off) to below 1`."""
        low = _spelt(self.least) if self.above is None else f"above {_spelt(self.above)}"
        low += f" ({self.zero})" if self.zero else ""
        if self.most is None and self.below is None:
            return f"{low} or more" if self.above is None else low
        return f"{low} to {_spelt(self.most)}" if self.below is None else f"{low} to below {_spelt(self.below)}"


def refuse_wrong_values(config: "DataclassInstance", *, where: str) -> None:
    """Raises UserError for the first field of a dataclass with a wrong value; `where` comes before the field's name.

    A value must have the field's own type: True is not an int, a list is not a tuple, NaN and infinity are not floats.
    The one exception is that a float may be written as an int.
    """
    for field in fields(config):
        fault = _fault(f"{where}{field.name}", getattr(config, field.name), field.type)
        if fault:
            raise UserError(fault)


def allowed_instead(value: Any, kind: Any) -> str:
    """Returns `allowed: ...` if a field of type `kind` may not hold the value, otherwise an empty string."""
    or_none = ", or none" if NoneType in _parts(kind)[1] else ""
    if value is None and or_none:
        return ""
    kinds = without_none(kind)
    if len(kinds) > 1:  # the field takes one of several configurations
        return "" if isinstance(value, kinds) else f"allowed: {', '.join(one.__name__ for one in kinds)}"
    allowed = _allowed(value, *kinds)
    if not allowed and without_range(*kinds) is int and abs(value) > _MOST_WHOLE:
        allowed = f"whole numbers of 64 bits, to {_MOST_WHOLE:,}"
    return f"allowed: {allowed}{or_none}" if allowed else ""


def shown_value(value: Any) -> str:
    """Returns a wrong value as messages show it, cut after 200 characters. A tuple of numbers or texts is shown as it
    is typed on a command line, such as `4 8 16`."""
    if is_dataclass(value):
        return f"{type(value).__name__}(...)"
    try:
        if isinstance(value, tuple) and all(type(item) in (int, float, str) for item in value):
            return shown_text(" ".join(map(_typed, value)) or "none")
        return shown_text(repr(value))
    except ValueError:  # Python does not print numbers of more than 4,300 digits
        return "a number of thousands of digits"
    except RecursionError:
        return "deeply nested"


def _typed(item: float | str) -> str:
    return item if isinstance(item, str) and item.isprintable() and _PLAIN.fullmatch(item) else repr(item)


def shown_text(text: str) -> str:
    """Returns a text as messages show it, cut after 200 characters."""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def whole_number(text: str) -> int | None:
    """Returns the number that decimal digits spell. Returns None for anything else, and for numbers that may not fit in
    64 bits."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def without_none(kind: Any) -> tuple[Any, ...]:
    """Returns the types in a union except None. For any other type, returns that type alone."""
    origin, args = _parts(kind)
    return tuple(one for one in args if one is not NoneType) if origin in (Union, UnionType) else (kind,)


def without_range(kind: Any) -> Any:
    """Returns a type without the range that is declared beside it."""
    origin, args = _parts(kind)
    return args[0] if origin is Annotated else kind


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the origin and the arguments of a type. They are cached, since `ls` compares a thousand runs with recipes
    of 40,000 values."""
    return get_origin(kind), get_args(kind)


def _fault(name: str, value: Any, kind: Any) -> str:
    """Returns the message about a field's value, or about the first wrong item of a tuple; empty if all values are
    right."""
    (*_, plain) = without_none(kind)
    if _parts(plain)[0] is tuple and isinstance(value, tuple):
        kinds = _parts(plain)[1]
        kinds = kinds[:1] * len(value) if kinds[-1] is Ellipsis else kinds
        if len(kinds) != len(value):
            return f"{name} has {len(value)} entries; allowed: {len(kinds)}"
        items = enumerate(zip(value, kinds, strict=True))
        return next(filter(None, (_fault(f"{name}.{number}", item, one) for number, (item, one) in items)), "")
    allowed = allowed_instead(value, kind)
    return f"{name} is {shown_value(value)}; {allowed}" if allowed else ""


def _allowed(value: Any, kind: Any) -> str:
    """Returns what is allowed instead of the value, such as `a whole number` or `0 to 1`; empty if the value is
    right."""
    origin, args = _parts(kind)
    if origin is Literal:
        is_choice = any(type(value) is type(word) and value == word for word in args)
        return "" if is_choice else ", ".join(map(str, args))
    if origin is tuple:
        return "" if isinstance(value, tuple) else "a tuple"
    if origin is Annotated:
        type_, *rules = args
        outside = (str(rule) for rule in rules if isinstance(rule, Range) and not rule.holds(value))
        return _allowed(value, type_) or next(outside, "")
    if kind is int:
        return "" if _is_whole(value) else "a whole number"
    if kind is float:
        return "" if _is_finite(value) else "a finite number"
    if isinstance(value, kind):
        return ""
    return "true and false" if kind is bool else "a text" if kind is str else str(kind.__name__)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    try:
        return (_is_whole(value) or isinstance(value, float)) and isfinite(value)
    except OverflowError:  # a whole number beyond the range of floats
        return False


def _spelt(bound: float | None) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A field with two different values. None may also mean that one side does not have the field."""

    field: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{printable_name(self.field)}: before {shown(self.before)}, now {shown(self.now)}"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Returns every field whose values differ, in the order of `before`, then those that only `now` has."""
    was, is_now = flattened(before), flattened(now)
    return [
        Difference(field=field, before=was.get(field), now=is_now.get(field))
        for field in dict.fromkeys([*was, *is_now])
        if was.get(field) != is_now.get(field)
    ]


def flattened(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values by dotted name. Mappings are flattened at any depth. Sequences are values, and become lists as
    in JSON and YAML."""
    leaves: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            leaves |= {f"{name}.{inner}": leaf for inner, leaf in flattened(value).items()}
        else:
            leaves[name] = _plain(value)
    return leaves


def as_lines(found: Iterable[Difference]) -> str:
    """Returns the differences for a message, one indented line each."""
    return "\n".join(f"  {difference}" for difference in found)


def shown(value: Any) -> str:
    """Returns a value as YAML shows it. A sha256 is shortened, and a text is quoted only if necessary."""
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
