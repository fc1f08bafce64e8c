"""Structs in Thrift's compact protocol: what is wanted is kept, the rest is passed over, damage is an error."""

import pytest

from shards.thrift_compact import Want, read_struct


def test_wanted_fields_are_kept() -> None:
    # 1: 2, 2: "ab", 3: {1: 3}, 4: [1, 2], 5: true
    data = b"\x15\x04\x18\x02ab\x1c\x15\x06\x00\x19\x25\x02\x04\x11\x00rest"
    wanted = {1: Want(), 2: Want(), 3: Want({1: Want()}), 4: Want(), 5: Want()}
    assert read_struct(data, 0, wanted) == ({1: 2, 2: b"ab", 3: {1: 3}, 4: [1, 2], 5: True}, len(data) - 4)
    assert read_struct(data, 0, {2: Want()}) == ({2: b"ab"}, len(data) - 4)
    assert read_struct(data, 0, {3: Want({1: Want()}, made=lambda fields: fields[1] + 1)})[0] == {3: 4}


@pytest.mark.parametrize("data", [b"", b"\x15", b"\x18\x05ab", b"\x19\xf5\xff\xff\x03", b"\x15\x80"])
def test_data_that_ends_too_early(data: bytes) -> None:
    with pytest.raises(IndexError):
        read_struct(data, 0, {})


@pytest.mark.parametrize("data", [b"\x1c" * 100, b"\x19" * 100, b"\x1f", b"\x15" + b"\xff" * 20])
def test_what_is_no_struct(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"nested|kind|no end"):
        read_struct(data, 0, {})
