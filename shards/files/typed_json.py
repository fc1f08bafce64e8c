"""Reads untrusted JSON as typed values. Its depth is limited, repeated keys are refused, and values are checked against
dataclasses.

    @dataclass(frozen=True, kw_only=True)
    class ShardFacts:
        path: str
        num_bytes: Annotated[int, Range(0)]

    facts = read_record(ShardFacts, data)

Lists of many objects of one kind are checked column by column, since a manifest may have tens of thousands of them. A
sealed text ends with a digest: the sha256 of all bytes before it. This reveals a single changed bit before the JSON is
used.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import lru_cache
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from shards.config_values import allowed_instead, shown_value, without_none, without_range

Record = TypeVar("Record")
MOST_DEPTH = 64  # levels of lists and objects inside each other
_CONTAINERS = frozenset({dict, list})
_TOO_DEEP = f"lists and objects are nested more than {MOST_DEPTH} deep"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_PATH_CHARACTERS = 1024  # an S3 key has at most 1024 bytes
_PLAIN_PATH = re.compile(r"(?:(?:\A|(?<=[^/])/)(?!\.{1,2}(?:/|\Z))[^/\0\ud800-\udfff]+)+")
_NOT_PLAIN = tuple(
    f"{before}{part}{after}" for part in ("", ".", "..") for before in ("/", "\n") for after in ("/", "\n")
)
_BEFORE, _AFTER = b', "digest": "', b'"}\n'


def parse_json(data: bytes | str) -> Any:
    """Returns the value of a JSON text. Raises ValueError if it is broken, nested deeper than MOST_DEPTH, or has a key
    twice.

    NaN and Infinity are refused: they are not JSON, although Python writes them.
    """
    text = data.decode() if isinstance(data, bytes) else data
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _refuse_depth(value)
    return value


def read_record(kind: type[Record], data: bytes | str) -> Record:
    """Returns a JSON object as the dataclass `kind`. Raises ValueError, which names the field, if a field is missing,
    unknown, of the wrong type or out of its range."""
    return record_from(kind, parse_json(data))


def record_from(kind: type[Record], value: Any, *, where: str = "") -> Record:
    """Returns a parsed JSON object as the dataclass `kind`. `where` comes before a field's name in messages.

    Lists become tuples, and objects become the dataclasses or dicts that the fields declare. Raises the same errors as
    `read_record`.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where.rstrip('.') or 'the JSON'} is {shown_value(value)}; allowed: an object")
    declared = _declared(kind)  # type: ignore[arg-type]  # a class is hashable
    if unknown := sorted(value.keys() - declared.keys()):
        raise ValueError(f"{where}{shown_value(unknown[0])} is not a field; allowed: {', '.join(declared)}")
    for name, (field, _) in declared.items():
        if name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where}{name} is missing")
    found = {name: _converted(item, declared[name][1], f"{where}{name}") for name, item in value.items()}
    return kind(**found)


@lru_cache(maxsize=64)
def _declared(kind: type) -> dict[str, tuple[Field[Any], Any]]:
    """Returns each field of a dataclass, and its type with the declared range."""
    types = get_type_hints(kind, include_extras=True)
    return {field.name: (field, types[field.name]) for field in fields(kind) if field.init}


def _converted(value: Any, kind: Any, name: str) -> Any:
    """Returns the value in the type that its field declares. Raises ValueError if it does not fit."""
    kinds = without_none(kind)
    if value is None and kinds != (kind,):
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
            if type(inner) in _CONTAINERS  # `type` is twice as fast as isinstance; JSON has no subclasses
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
    raise ValueError(f"{name} is not a JSON number")


def records_from(kind: type[Record], values: Any, *, name: str) -> tuple[Record, ...]:
    """Returns a list of JSON objects as dataclasses whose fields are all plain texts or numbers.

    Raises ValueError for the first value that is missing, unknown, of the wrong type or out of its range. Types and
    ranges are checked column by column, which is 20 times as fast as `record_from`.
    """
    if not isinstance(values, list):
        raise ValueError(f"{name} is {shown_value(values)}; allowed: a list")
    declared = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # it is a dataclass
    for number, value in enumerate(values):
        if not isinstance(value, dict) or value.keys() != declared:
            raise ValueError(f"{name}.{number} is {shown_value(value)}; allowed: an object with {sorted(declared)}")
    for field, type_ in get_type_hints(kind, include_extras=True).items():
        _refuse_column([value[field] for value in values], type_, name=name, field=field)
    return tuple(kind(**value) for value in values)


def not_plain(paths: Sequence[str]) -> str | None:
    """Returns the first path that is not plain and relative (no empty part, no . or .., no NUL, valid Unicode, not too
    long); None if all are."""
    joined = "\n".join(("", *paths, ""))
    is_safe = joined.count("\n") == len(paths) + 1 and max(map(len, paths), default=0) <= _MOST_PATH_CHARACTERS
    if not paths or (is_safe and is_unicode(joined) and not any(part in joined for part in (*_NOT_PLAIN, "\0"))):
        return None
    return next((path for path in paths if not _is_plain(path)), None)


def not_sha256(texts: Sequence[str]) -> str | None:
    """Returns the first text that is not a sha256 of 64 lower-case hex digits; None if all are."""
    return next((text for text in texts if not _SHA256.fullmatch(text)), None)


def is_unicode(text: str) -> bool:
    """Returns whether a text can be encoded as UTF-8. JSON may contain half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_column(column: list[Any], type_: Any, *, name: str, field: str) -> None:
    """Raises ValueError for the first wrong value of a column. Looks at single values only if the types, the least or
    the greatest value are wrong."""
    is_right = set(map(type, column)) <= {without_range(type_)}
    ends = () if type_ is str or not (is_right and column) else (min(column), max(column))
    if is_right and not any(allowed_instead(value, type_) for value in ends):
        return
    for number, value in enumerate(column):
        if allowed := allowed_instead(value, type_):
            raise ValueError(f"{name}.{number}.{field} is {shown_value(value)}; {allowed}")


def _is_plain(path: str) -> bool:
    return len(path) <= _MOST_PATH_CHARACTERS and _PLAIN_PATH.fullmatch(path) is not None


def sealed(text: bytes) -> bytes:
    """Returns the text of a JSON object, with its digest added."""
    body = text.rstrip().removesuffix(b"}").rstrip()
    return body + _BEFORE + _digest(body) + _AFTER


def unsealed(data: bytes) -> bytes:
    """Returns the text without its digest. Raises ValueError if the digest is missing or does not match the text."""
    body, mark, _ = data.rpartition(_BEFORE)
    if not mark:
        raise ValueError("it does not end with its digest")
    if not is_sealed(data):
        raise ValueError("its digest does not fit: it was changed after it was written")
    return body + b"}"


def is_sealed(data: bytes) -> bool:
    """Returns whether the text ends with its digest, so that it is as it was written."""
    body, mark, rest = data.rpartition(_BEFORE)
    return bool(mark) and rest == _digest(body) + _AFTER


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
