"""Labels and weights in the cells of a table: one or many, text or numbers."""

import math
import struct
from typing import Any

from shards.class_labels import MISSING, is_list, is_vector, split_text
from shards.class_names import MOST_LABEL_CHARACTERS, MOST_LABELS, class_name, labels_fault
from shards.config_values import shown_value
from shards.errors import ImageRefusedError
from shards.sources.entry import printable

# Labels, and their weights: none, or one per label.
Weighted = tuple[tuple[str, ...], tuple[float, ...]]


def written_labels(value: Any, *, separator: str = "") -> tuple[str, ...]:
    """The labels in a cell as they are written: text, a number, or a list of these. Raises ImageRefusedError for
    anything else.

    Bytes come from a CSV and are split at `separator` if it is given. A whole number is its digits, also if pandas has
    made it a float. None, empty text and NaN are no label, but keep their place in a vector of 0 and 1. What the labels
    mean is up to `shards.class_labels`.
    """
    values = value if isinstance(value, list) else _cut(value, separator) if isinstance(value, bytes) else [value]
    if len(values) > MOST_LABELS:
        raise ImageRefusedError(f"too many labels: {len(values)}, allowed: {MOST_LABELS}")
    labels = tuple(_written(item, in_list=len(values) > 1) for item in values)
    if len(labels) == 1 and len(labels[0]) > MOST_LABEL_CHARACTERS and "\\" not in labels[0] and is_list(labels[0]):
        labels = split_text(labels[0])  # it is too long for a name; with backslashes, quotes would take quadratic time
        if len(labels) > MOST_LABELS:
            raise ImageRefusedError(f"too many labels: {len(labels)}, allowed: {MOST_LABELS}")
    if "" in labels and not is_vector(labels):
        labels = tuple(filter(None, labels))
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


def _written(value: Any, *, in_list: bool) -> str:
    """One label; empty: none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool) and in_list:
        return str(int(value))
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    if isinstance(value, str):
        return class_name(printable(value))
    from decimal import Decimal  # a column of Parquet may have this type, which no other answer needs

    if isinstance(value, Decimal):
        return str(value)
    raise ImageRefusedError(
        f"its label {shown_value(value)} is a {type(value).__name__}; allowed: text, whole numbers and lists of them"
    )


def weighted(labels: tuple[str, ...], value: Any, *, separator: str) -> Weighted:
    """Labels with the weights of another cell. Raises ImageRefusedError if their numbers differ."""
    numbers = _numbers(value, separator)
    if not numbers:
        return labels, ()
    if len(numbers) != len(labels):
        labels = tuple(label for label in labels if label not in MISSING)
    if len(numbers) != len(labels):
        raise ImageRefusedError(f"{len(numbers)} weights for {len(labels)} labels; allowed: one each, or none")
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
