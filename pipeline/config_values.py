"""What the fields of a configuration may hold, by their types: one check for all of them."""

import math
from dataclasses import fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from shards.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Device = Literal["auto", "cpu", "cuda"]
LossName = Literal["softmax", "sigmoid"]


def refuse_wrong_values(config: "DataclassInstance", *, where: str) -> None:
    """UserError where a field of a dataclass holds what its type does not say; `where` is put before its name.

    int: a whole number, and no boolean; float: a finite number; bool, str; Literal: one of its words; tuple[int, ...];
    each also `| None`. Fields of other types, such as configurations inside, are left to themselves.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        kinds = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
        if value is None and NoneType in kinds:
            continue
        allowed = _allowed(value, kinds[0])
        if allowed:
            or_none = ", or none" if NoneType in kinds else ""
            raise UserError(f"{where}{field.name} is {value!r}; {allowed}{or_none}")


def _allowed(value: Any, kind: Any) -> str:
    """What is allowed instead of the value; empty where it is fine, or of a type that is not looked at."""
    if get_origin(kind) is Literal:
        return "" if value in get_args(kind) else f"allowed are {', '.join(get_args(kind))}"
    if kind == tuple[int, ...]:
        are_whole = isinstance(value, tuple) and all(_is_whole(item) for item in value)
        return "" if are_whole else "allowed are whole numbers"
    checks = {
        int: (_is_whole, "allowed is a whole number"),
        float: (_is_finite, "allowed is a finite number"),
        bool: (lambda v: isinstance(v, bool), "allowed are true and false"),
        str: (lambda v: isinstance(v, str), "allowed is a text"),
    }
    check, allowed = checks.get(kind, (lambda _: True, ""))
    return "" if check(value) else allowed


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    if not _is_whole(value) and not isinstance(value, float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can be
        return False
