"""`tf.train.Example`, the form of a record: a map from names to lists of bytes, floats or integers.

This reads the wire format of protocol buffers (https://protobuf.dev/programming-guides/encoding) as far as
`example.proto` and `feature.proto` of TensorFlow need it. The messages have a fixed depth, so nothing recurses, and
only the features that are asked for are decoded.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3
_MOST_FEATURES = 1000
_MOST_VALUES = 1 << 16
_MOST_VARINT_BYTES = 10


@dataclass(frozen=True, kw_only=True)
class Span:
    """A value of a list of bytes: where it lies in the record."""

    begin: int
    end: int


Feature = tuple[Span, ...] | tuple[float, ...] | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Field:
    """A field of a message: its number and its value, of which `span` is the contents if it has a length."""

    number: int
    wire_type: int
    value: int
    span: Span


def read_features(data: bytes, names: Sequence[str]) -> dict[str, Feature]:
    """Those of the named features that an Example has. ValueError if it is broken, or names one of these twice."""
    wanted, found, num_features = {name.encode(): name for name in names}, dict[str, Feature](), 0
    for features in _submessages(data, Span(begin=0, end=len(data)), 1):
        for entry in _submessages(data, features, 1):
            num_features += 1
            if num_features > _MOST_FEATURES:
                raise ValueError(f"it has more than {_MOST_FEATURES} features")
            key, value = b"", Span(begin=0, end=0)
            for field in _fields(data, entry):
                if field.wire_type == _LENGTH and field.number == 1:
                    key = data[field.span.begin : field.span.end]
                elif field.wire_type == _LENGTH and field.number == 2:
                    value = field.span
            if name := wanted.get(key):
                if name in found:
                    raise ValueError(f"it has the feature {name!r} twice")
                found[name] = _values(data, value, name)
    return found


def _values(data: bytes, feature: Span, name: str) -> Feature:
    """All values of a feature; none if it has no list."""
    kinds = [field for field in _fields(data, feature) if field.wire_type == _LENGTH]
    if len(kinds) > 1:
        raise ValueError(f"its feature {name!r} has several lists")
    if not kinds:
        return ()
    kind, values = kinds[0].number, list[Span | float | int]()
    for field in _fields(data, kinds[0].span):
        if field.number != 1:
            continue
        values += _of_field(data, field, kind)
        if len(values) > _MOST_VALUES:
            raise ValueError(f"its feature {name!r} has more than {_MOST_VALUES} values")
    return tuple(values)  # type: ignore[return-value]  # a list has values of one kind


def _of_field(data: bytes, field: _Field, kind: int) -> Sequence[Span | float | int]:
    """The values in one field of a list: one, or several that are packed."""
    span = field.span
    if kind == _BYTES_LIST and field.wire_type == _LENGTH:
        return (span,)
    if kind == _FLOAT_LIST and field.wire_type == _FIXED32:
        return struct.unpack_from("<f", data, span.begin)
    if kind == _FLOAT_LIST and field.wire_type == _LENGTH:
        if (span.end - span.begin) % 4:
            raise ValueError("a packed list of floats has a part of a float")
        return struct.unpack_from(f"<{(span.end - span.begin) // 4}f", data, span.begin)
    if kind == _INT64_LIST and field.wire_type == _VARINT:
        return (_signed(field.value),)
    if kind == _INT64_LIST and field.wire_type == _LENGTH:
        return tuple(map(_signed, _varints(data, span)))
    raise ValueError(f"a list of kind {kind} has a value of wire type {field.wire_type}")


def _submessages(data: bytes, span: Span, number: int) -> Iterator[Span]:
    for field in _fields(data, span):
        if field.number == number and field.wire_type == _LENGTH:
            yield field.span


def _fields(data: bytes, span: Span) -> Iterator[_Field]:
    """The fields of the message in a span; ValueError if one goes beyond its end."""
    position = span.begin
    while position < span.end:
        tag, position = _varint(data, position, span.end)
        number, wire_type, value = tag >> 3, tag & 7, 0
        if wire_type == _VARINT:
            value, after = _varint(data, position, span.end)
        elif wire_type == _LENGTH:
            length, position = _varint(data, position, span.end)
            after = position + length
        elif wire_type in _FIXED_BYTES:
            after = position + _FIXED_BYTES[wire_type]
        else:
            raise ValueError(f"byte {position} is no field of an Example: wire type {wire_type}")
        if after > span.end or number == 0:
            raise ValueError(f"the field at byte {position} goes beyond the end of its message")
        yield _Field(number=number, wire_type=wire_type, value=value, span=Span(begin=position, end=after))
        position = after


def _varints(data: bytes, span: Span) -> Iterator[int]:
    position = span.begin
    while position < span.end:
        value, position = _varint(data, position, span.end)
        yield value


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """An unsigned number of 7 bits per byte, and the position after it."""
    value = 0
    for number, byte in enumerate(data[position : min(end, position + _MOST_VARINT_BYTES)]):
        value |= (byte & 0x7F) << 7 * number
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position + number + 1
    raise ValueError(f"the number at byte {position} does not end")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
