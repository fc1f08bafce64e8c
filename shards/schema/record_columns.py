"""Many JSON objects of one kind as dataclasses, and many paths and sha256: checked by column, since a manifest may have
tens of thousands. `shards/files/typed_json.py` checks one object field by field."""

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from shards.schema.config_values import allowed_instead, shown_value, without_range

Record = TypeVar("Record")
SHA256_DIGITS = 64
_MOST_PATH_CHARACTERS = 1024  # S3's bound for a key is as many bytes
_PLAIN_PATH = re.compile(r"(?:(?:\A|(?<=[^/])/)(?!\.{1,2}(?:/|\Z))[^/\0\ud800-\udfff]+)+")
_NOT_PLAIN = tuple(
    f"{before}{part}{after}" for part in ("", ".", "..") for before in ("/", "\n") for after in ("/", "\n")
)


def records_from(kind: type[Record], values: Any, *, name: str) -> tuple[Record, ...]:
    """A list of JSON objects as dataclasses whose fields are all plain texts or numbers. ValueError names the first
    value that is missing, unknown, of the wrong type or out of its range."""
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
    """The first path that is not plain and relative (no empty part, no . or .., no NUL, valid Unicode), if any is."""
    joined = "\n".join(("", *paths, ""))
    is_safe = joined.count("\n") == len(paths) + 1 and max(map(len, paths), default=0) <= _MOST_PATH_CHARACTERS
    if not paths or (is_safe and is_unicode(joined) and not any(part in joined for part in (*_NOT_PLAIN, "\0"))):
        return None
    return next((path for path in paths if not _is_plain(path)), None)


def not_sha256(texts: Sequence[str]) -> str | None:
    """The first text that is no sha256 of 64 lower hex digits, if any is."""
    joined = "".join(texts)
    if set(map(len, texts)) <= {SHA256_DIGITS} and _is_hex(joined):
        return None
    return next(text for text in texts if len(text) != SHA256_DIGITS or not _is_hex(text))


def is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8: JSON may name half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_column(column: list[Any], type_: Any, *, name: str, field: str) -> None:
    """Equal types and the least and the most tell of a column what a look at each value would."""
    is_right = set(map(type, column)) <= {without_range(type_)}
    ends = () if type_ is str or not (is_right and column) else (min(column), max(column))
    if is_right and not any(allowed_instead(value, type_) for value in ends):
        return
    for number, value in enumerate(column):
        if allowed := allowed_instead(value, type_):
            raise ValueError(f"{name}.{number}.{field} is {shown_value(value)}; {allowed}")


def _is_plain(path: str) -> bool:
    return len(path) <= _MOST_PATH_CHARACTERS and _PLAIN_PATH.fullmatch(path) is not None


def _is_hex(text: str) -> bool:
    try:
        return len(bytes.fromhex(text)) * 2 == len(text) and text == text.lower()
    except ValueError:
        return False
