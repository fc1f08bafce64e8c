"""Labels and weights in the cells of a table: one or many, text or numbers."""

import math
import re
import struct
from collections.abc import Sequence
from typing import Any

from shards.class_names import MOST_LABELS, class_name, labels_fault
from shards.errors import ImageRefusedError
from shards.sources.entry import printable

# How programs write a missing value as text: what pandas.read_csv takes for one, and MySQL's \\N. A lower-case "none"
# is left out, since it is a usual name of a class.
MISSING = frozenset(
    {
        *("#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
        *("<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null", "\\N"),
    }
)
_WHOLE = re.compile(r"(-?[0-9]+)(?:\.0+)?")

# Labels, and their weights: none, or one per label.
Weighted = tuple[tuple[str, ...], tuple[float, ...]]


def label_names(value: Any, *, separator: str = "", names: Sequence[str] = ()) -> tuple[str, ...]:
    """The labels in a cell: text, a whole number, or a list of these. Raises ImageRefusedError for anything else.

    Bytes come from a CSV and are split at `separator` if it is given. Whole numbers are indices into `names`; a number
    without a name is a label itself. None, empty text, NaN, negative numbers (-1 is how Hugging Face and TensorFlow
    Datasets write "unknown") and the usual words for a missing value are no label.
    """
    values = value if isinstance(value, list) else _cut(value, separator) if isinstance(value, bytes) else [value]
    if len(values) > MOST_LABELS:
        raise ImageRefusedError(f"too many labels: {len(values)}, allowed: {MOST_LABELS}")
    labels = tuple(name for item in values if (name := _label_name(item, names)))
    if reason := labels_fault(labels):
        raise ImageRefusedError(reason)
    return labels


def _cut(value: bytes, separator: str) -> list[str]:
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        raise ImageRefusedError(
            f"its label {value.decode(errors='backslashreplace')!r} is not UTF-8; save the list as UTF-8"
        ) from error
    return text.split(separator) if separator else [text]


def _label_name(value: Any, names: Sequence[str]) -> str:
    """One label; empty: none."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # pandas turns integers into floats if one is missing
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        if value >= len(names) and str(value) in names:
            raise ImageRefusedError(f"its label {value} has no name: {len(names)} are known, from class 0 on")
        return "" if value < 0 else names[value] if value < len(names) else str(value)
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    if isinstance(value, str):
        return _text_name(class_name(printable(value)))
    raise ImageRefusedError(f"a label is a {type(value).__name__}; allowed: text, whole numbers and lists of them")


def _text_name(text: str) -> str:
    """A label that is written as text: 3.0 is class 3, -1 is none."""
    if text in MISSING:
        return ""
    if text[-1:].isdecimal() and (number := _WHOLE.fullmatch(text)):
        return "" if number[1].startswith("-") else number[1]
    return text


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
