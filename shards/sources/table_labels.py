"""Labels and weights in the cells of a table: one or many, text or numbers."""

import math
import struct
from collections.abc import Sequence
from typing import Any

from shards.errors import ImageRefusedError
from shards.sources.entry import printable

# Labels, and their weights: none, or one per label.
Weighted = tuple[tuple[str, ...], tuple[float, ...]]


def label_names(value: Any, *, separator: str = "", names: Sequence[str] = ()) -> tuple[str, ...]:
    """The labels in a cell: text, a number, or a list of these. Raises ImageRefusedError for anything else.

    Bytes come from a CSV and are split at `separator` if it is given. Whole numbers are indices into `names`; a number
    without a name is a label itself. None, empty text and NaN are no label.
    """
    if isinstance(value, bytes):
        text = value.decode("utf-8", "backslashreplace")
        value = text.split(separator) if separator else text
    if isinstance(value, list):
        return tuple(name for item in value for name in label_names(item, names=names))
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # pandas turns integers into floats if one is missing
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ()
    if isinstance(value, int) and not isinstance(value, bool):
        return (names[value] if 0 <= value < len(names) else str(value),)
    if isinstance(value, str | float | bool):
        text = printable(str(value)).strip()
        return (text,) if text else ()
    raise ImageRefusedError(f"a label is a {type(value).__name__}; allowed: text, numbers and lists of them")


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
