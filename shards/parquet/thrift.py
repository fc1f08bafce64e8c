"""Thrift's compact protocol, as Parquet's footers and page headers are written in it."""

from collections.abc import Callable, Mapping
from typing import Any

_MOST_DEPTH = 12
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _STRUCT = 1, 2, 3, 7, 8, 9, 12
Fields = dict[int, Any]
Data = bytes | memoryview
# The fields of a struct that are wanted: of a struct, its own; of a list, those of its items. `made` takes each struct.
Wanted = Mapping[int, "Want"]


class Want:
    """A field that is kept; others are passed over without taking memory."""

    def __init__(self, fields: Wanted | None = None, made: Callable[[Fields], Any] | None = None) -> None:
        self.fields, self.made = fields or {}, made


def read_struct(data: Data, at: int, wanted: Wanted, *, depth: int = 0) -> tuple[Fields, int]:
    """The wanted fields of a struct by their numbers, and where it ends. IndexError if the data ends first; ValueError
    for anything else that cannot be right."""
    if depth > _MOST_DEPTH:
        raise ValueError("it is nested too deep")
    fields: Fields = {}
    number = 0
    while byte := data[at]:
        at += 1
        if byte >> 4:
            number += byte >> 4
        else:
            number, at = _integer(data, at)
        kind = byte & 15
        want = wanted.get(number)
        if _BYTE < kind < _DOUBLE and data[at] < 0x80:  # most values are such: a whole number in one byte
            value: Any = (data[at] >> 1) ^ -(data[at] & 1)
            at += 1
        elif kind in (_TRUE, _FALSE):
            value = kind == _TRUE
        else:
            value, at = _value(data, at, kind, want, depth=depth)
        if want is not None:
            fields[number] = value
    return fields, at + 1


def _value(data: Data, at: int, kind: int, want: Want | None, *, depth: int) -> tuple[Any, int]:
    if _BYTE < kind < _DOUBLE:  # whole numbers of 16, 32 and 64 bits
        return _integer(data, at)
    if kind == _BINARY:
        length, at = _varint(data, at)
        if length > len(data) - at:
            raise IndexError("it is cut off")
        return (data[at : at + length] if want else b""), at + length
    if kind == _STRUCT:
        fields, at = read_struct(data, at, want.fields if want else {}, depth=depth + 1)
        return (want.made(fields) if want and want.made else fields), at
    if kind == _LIST:
        return _list(data, at, want, depth=depth + 1)
    if kind in (_TRUE, _FALSE, _BYTE, _DOUBLE):
        return None, at + (8 if kind == _DOUBLE else 1)
    raise ValueError(f"it has a value of kind {kind}")


def _list(data: Data, at: int, want: Want | None, *, depth: int) -> tuple[list[Any], int]:
    length, kind = data[at] >> 4, data[at] & 15
    at += 1
    if length == 15:
        length, at = _varint(data, at)
    if length > len(data) - at:
        raise IndexError("a list is cut off")
    if depth > _MOST_DEPTH:
        raise ValueError("it is nested too deep")
    found = []
    for _ in range(length):
        item, at = _value(data, at, kind, want, depth=depth)
        if want:
            found.append(item)
    return found, at


def _integer(data: Data, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: Data, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if shift > 63:
            raise ValueError("a number has no end")
    return value | byte << shift, at + 1
