"""JSON of strangers as typed values: bounded in depth, without repeated keys, checked against a dataclass.

@dataclass(frozen=True, kw_only=True)
class ShardFacts:
    path: str
    num_bytes: Annotated[int, Range(0)]

facts = read_record(ShardFacts, data)
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import lru_cache
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from shards.schema.config_values import allowed_instead, shown_value, without_none, without_range

Record = TypeVar("Record")
MOST_DEPTH = 64  # of lists and objects inside each other
_CONTAINERS = frozenset({dict, list})
_TOO_DEEP = f"lists and objects are nested more than {MOST_DEPTH} deep"


def parse_json(data: bytes | str) -> Any:
    """The value of a JSON text. ValueError if it is broken, nested deeper than MOST_DEPTH, or names a key twice.

    NaN and Infinity are no JSON, though Python writes them.
    """
    text = data.decode() if isinstance(data, bytes) else data
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _refuse_depth(value)
    return value


def read_record(kind: type[Record], data: bytes | str) -> Record:
    """The dataclass `kind` from a JSON object. ValueError names the first field that is missing, unknown, of the wrong
    type or out of its range."""
    return record_from(kind, parse_json(data))


def record_from(kind: type[Record], value: Any, *, where: str = "") -> Record:
    """The dataclass `kind` from a parsed JSON object; `where` comes before a field's name in messages.

    Lists become tuples, objects become the dataclasses or dicts that the fields declare. ValueError as `read_record`.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where.rstrip('.') or 'the JSON'} is {shown_value(value)}; allowed: an object")
    declared = _declared(kind)  # type: ignore[arg-type]  # a class is hashable
    if unknown := sorted(value.keys() - declared.keys()):
        raise ValueError(f"{where}{shown_value(unknown[0])} is no field; allowed: {', '.join(declared)}")
    missing = [name for name, (field, _) in declared.items() if _is_required(field) and name not in value]
    if missing:
        raise ValueError(f"{where}{missing[0]} is missing")
    found = {name: _converted(item, declared[name][1], f"{where}{name}") for name, item in value.items()}
    return kind(**found)


@lru_cache(maxsize=64)
def _declared(kind: type) -> dict[str, tuple[Field[Any], Any]]:
    """Each field of a dataclass, and its type with the range beside it."""
    types = get_type_hints(kind, include_extras=True)
    return {field.name: (field, types[field.name]) for field in fields(kind) if field.init}


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _converted(value: Any, kind: Any, name: str) -> Any:
    """The value as its field declares it."""
    kinds = without_none(kind)
    if value is None and len(get_args(kind)) > len(kinds):
        return None
    (plain,) = kinds
    inner = without_range(plain)
    if is_dataclass(inner) and isinstance(inner, type):
        return record_from(inner, value, where=f"{name}.")
    if get_origin(inner) is tuple:
        return _tuple_of(value, get_args(inner), name)
    if get_origin(inner) in (dict, Mapping):
        return _dict_of(value, get_args(inner)[1], name)
    if inner is Any or inner is dict:
        return value
    if inner is float and type(value) is int:
        value = float(value) if abs(value) < 1 << 1000 else value
    if allowed := allowed_instead(value, kind):
        raise ValueError(f"{name} is {shown_value(value)}; {allowed}")
    return value


def _tuple_of(value: Any, kinds: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is {shown_value(value)}; allowed: a list")
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    if len(kinds) != len(value):
        raise ValueError(f"{name} has {len(value)} entries; allowed: {len(kinds)}")
    return tuple(_converted(item, one, f"{name}.{n}") for n, (item, one) in enumerate(zip(value, kinds, strict=True)))


def _dict_of(value: Any, kind: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {shown_value(value)}; allowed: an object")
    return {key: _converted(item, kind, f"{name}.{shown_value(key)}") for key, item in value.items()}


def _refuse_depth(value: Any) -> None:
    level = [value] if type(value) in _CONTAINERS else []
    for _ in range(MOST_DEPTH):
        if not level:
            return
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) in _CONTAINERS  # by identity: twice as fast, and a JSON text has no other kinds
        ]
    if level:
        raise ValueError(_TOO_DEEP)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{shown_value(twice)} is named twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
