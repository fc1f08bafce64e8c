"""The features of a `tf.train.Example` are read from its wire format; what is broken is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.tfds.example import Feature, Span, read_features
from tests.rigs.prepared import Value, example, varint

ALL: dict[str, list[Value]] = {
    "image": [b"png"],
    "label": [7],
    "box": [0.5, -2.0],
    "none": [],
    "ids": [0, -1, 2**63 - 1, -(2**63)],
}


def values(data: bytes, feature: Feature) -> list[Value]:
    """The values, spans as their bytes."""
    return [data[value.begin : value.end] if isinstance(value, Span) else value for value in feature]


@pytest.mark.parametrize("is_packed", [True, False])
def test_values_of_every_kind(is_packed: bool) -> None:
    data = example(ALL, is_packed=is_packed)
    found = read_features(data, [*ALL, "missing"])
    assert {name: values(data, feature) for name, feature in found.items()} == ALL
    assert list(read_features(data, ["label"])) == ["label"], "only what is asked for"


FLOATS = st.floats(width=32, allow_nan=False)


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.lists(FLOATS), st.lists(st.binary()), st.booleans())
def test_all_values_come_back(ints: list[int], floats: list[float], texts: list[bytes], is_packed: bool) -> None:
    said: dict[str, list[Value]] = {"i": [*ints], "f": [*floats], "b": [*texts]}
    data = example(said, is_packed=is_packed)
    assert {name: values(data, found) for name, found in read_features(data, ["i", "f", "b"]).items()} == said


def field(number: int, content: bytes, *, wire_type: int = 2) -> bytes:
    length = varint(len(content)) if wire_type == 2 else b""
    return varint(number << 3 | wire_type) + length + content


def feature(content: bytes, *, name: bytes = b"x") -> bytes:
    """An Example with one feature of this content."""
    return field(1, field(1, field(1, name) + field(2, content)))


def test_unknown_fields_are_skipped() -> None:
    known = field(1, b"x") + field(2, field(3, field(1, b"\x05")))
    unknown = field(9, b"y") + field(8, bytes(8), wire_type=1) + field(7, bytes(4), wire_type=5) + b"\x30\xff\x01"
    data = unknown + field(1, unknown + field(1, unknown + known))
    assert read_features(data, ["x"]) == {"x": (5,)}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (example(ALL)[:-1], "goes beyond the end of its message"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "goes beyond the end of its message"),
        (b"\x0a" + b"\x80" * 10 + b"\x01", "the number at byte 1 does not end"),
        (b"\x80", "the number at byte 0 does not end"),
        (b"\x02\x01x", "goes beyond the end of its message"),
        (b"\x0b\x0c", "byte 1 is no field of an Example: wire type 3"),
        (b"\x89PNG\r\n\x1a\n", "goes beyond the end|is no field"),
        (feature(b"") + feature(b""), "it has the feature 'x' twice"),
        (feature(field(1, b"") + field(3, b"")), "its feature 'x' has several lists"),
        (feature(field(2, field(1, b"12345"))), "a packed list of floats has a part of a float"),
        (feature(field(3, field(1, b"\x01\x80"))), "the number at byte"),
        (feature(field(1, b"\x08\x01")), "a list of kind 1 has a value of wire type 0"),
        (feature(field(4, field(1, b""))), "a list of kind 4 has a value of wire type 2"),
        (feature(field(3, field(1, b"\x01" * 65_537))), "more than 65536 values"),
        (field(1, field(1, b"") * 1001), "it has more than 1000 features"),
        (feature(b"\x0a\x02" * 300), "goes beyond the end|several lists"),
    ],
)
def test_one_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_features(data, ["x", "image", "ids"])
