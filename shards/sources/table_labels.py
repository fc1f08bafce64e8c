"""Labels and weights in the cells of a table: one or many, text or numbers."""

import math
import struct
from collections.abc import Sequence
from typing import Any

from shards.errors import ImageRefusedError
from shards.sources.entry import printable

MOST_LABELS = 10_000  # of one image
MOST_LABEL_CHARACTERS = 1024

# Labels, and their weights: none, or one per label.
Weighted = tuple[tuple[str, ...], tuple[float, ...]]


def label_names(value: Any, *, separator: str = "", names: Sequence[str] = ()) -> tuple[str, ...]:
    """The labels in a cell: text, a whole number, or a list of these. Raises ImageRefusedError for anything else.

    Bytes come from a CSV and are split at `separator` if it is given. Whole numbers are indices into `names`; a number
    without a name is a label itself. None, empty text and NaN are no label.
    """
    values = value if isinstance(value, list) else _cut(value, separator) if isinstance(value, bytes) else [value]
    if len(values) > MOST_LABELS:
        raise ImageRefusedError(f"too many labels: {len(values)}, allowed: {MOST_LABELS}")
    labels = tuple(name for item in values if (name := _label_name(item, names)))
    if reason := excess_of(labels):
        raise ImageRefusedError(reason)
    return labels


def excess_of(labels: Sequence[str]) -> str:
    """Why labels are too many or too long; empty if they are not."""
    if len(labels) > MOST_LABELS:
        return f"too many labels: {len(labels)}, allowed: {MOST_LABELS}"
    longest = max((len(label) for label in labels), default=0)
    is_too_long = longest > MOST_LABEL_CHARACTERS
    return f"its label is too long: {longest} characters, allowed: {MOST_LABEL_CHARACTERS}" if is_too_long else ""


def _cut(value: bytes, separator: str) -> list[str]:
    text = value.decode("utf-8", "backslashreplace")
    return text.split(separator) if separator else [text]


def _label_name(value: Any, names: Sequence[str]) -> str:
    """One label; empty: none."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # pandas turns integers into floats if one is missing
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return names[value] if 0 <= value < len(names) else str(value)
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    if isinstance(value, str):
        return printable(value).strip()
    raise ImageRefusedError(f"a label is a {type(value).__name__}; allowed: text, whole numbers and lists of them")


def weighted(labels: tuple[str, ...], value: Any, *, separator: str) -> Weighted:
    """Labels with the weights of another cell. Raises ImageRefusedError if their numbers differ."""
    numbers = _numbers(value, separator)
    if not numbers:
        return labels, ()
    if len(numbers) != len(labels):
        raise ImageRefusedError(f"{len(numbers)} weights for {len(labels)} labels; allowed: one each, or none")
    if len(set(labels)) < len(labels):
        raise ImageRefusedError("a label with a weight appears twice")
    return labels, numbers


def _numbers(value: Any, separator: str) -> tuple[float, ...]:
    if isinstance(value, bytes):
        text = value.decode("utf-8", "backslashreplace")
        value = [item for item in (text.split(separator) if separator else [text]) if item.strip()]
    items = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(_number(item) for item in items)


def _number(item: Any) -> float:
    try:
        # As it is stored, with 32 bits; OverflowError if that is not finite.
        (number,) = struct.unpack("f", struct.pack("f", float(item)))
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ImageRefusedError(f"the weight {printable(str(item))!r}: allowed: numbers of 0 or more")
    return float(number)
