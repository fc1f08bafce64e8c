"""One header block and the records that extend the next one."""

import tarfile
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.sources.tar_header import begins_again, parse_header, parse_long_name, parse_number, parse_pax


def block(
    name: str, *, size: int = 0, kind: bytes = tarfile.REGTYPE, tar_format: Literal[0, 1, 2] = tarfile.USTAR_FORMAT
) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tar_format, "utf-8", "surrogateescape")


@pytest.mark.parametrize(
    ("field", "number"),
    [
        (b"00000000017\0", 15),
        (b"        17 \0", 15),
        (b"17\0\0\0\0\0\0\0\0\0\0", 15),
        (b"17 \0garbage!", 15),
        (b"777777777777", 8**12 - 1),
        (b"\0" * 12, 0),
        (b" " * 12, 0),
        (b"\x80" + (20 << 30).to_bytes(11, "big"), 20 << 30),
    ],
)
def test_numbers(field: bytes, number: int) -> None:
    assert parse_number(field) == number


@pytest.mark.parametrize("field", [b"0o17\0", b"-7\0", b"1_7\0", b"9\0", b"x\0", b"\xff" * 12])
def test_what_is_no_number(field: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_number(field)


def test_a_name_with_a_prefix() -> None:
    name = "a" * 90 + "/" + "b" * 90
    header = parse_header(block(name, size=7))
    assert header is not None
    assert (header.name, header.size, header.kind) == (name, 7, b"0")


def test_a_prefix_in_a_header_without_one_is_refused() -> None:
    """tarfile uses it in headers of any format, other readers in those of ustar alone."""
    changed = bytearray(block("name"))
    changed[257:265] = bytes(8)
    changed[345:350] = b"other"
    changed[148:156] = b"%06o\0 " % (sum(changed[:148]) + 8 * 32 + sum(changed[156:]))
    header = parse_header(bytes(changed))
    assert header is not None
    assert "no format that has a prefix" in header.refusal


@pytest.mark.parametrize("begin", [100, 108, 116, 136, 329, 337])
def test_numbers_at_which_other_readers_stop_are_refused(begin: int) -> None:
    """tarfile takes such a header for the end of the archive."""
    changed = bytearray(block("name"))
    changed[begin : begin + 8] = b"99999999"
    changed[148:156] = b"%06o\0 " % (sum(changed[:148]) + 8 * 32 + sum(changed[156:]))
    with pytest.raises(tarfile.InvalidHeaderError):  # type: ignore[attr-defined]
        tarfile.TarInfo.frombuf(bytes(changed), "utf-8", "surrogateescape")
    header = parse_header(bytes(changed))
    assert header is not None
    assert "not octal" in header.refusal


def test_gnu_headers_have_no_prefix() -> None:
    """GNU tar stores times where ustar has the prefix."""
    changed = bytearray(block("name", tar_format=tarfile.GNU_FORMAT))
    changed[345:357] = b"14371573000\0"
    changed[148:156] = b"%06o\0 " % (sum(changed[:148]) + 8 * 32 + sum(changed[156:]))
    header = parse_header(bytes(changed))
    assert header is not None
    assert header.name == "name"


def test_a_v7_folder_ends_with_a_slash() -> None:
    header = parse_header(block("folder/", kind=tarfile.AREGTYPE))
    assert header is not None
    assert header.kind == b"5"


@given(st.integers(0, 511), st.integers(1, 255))
def test_every_changed_byte_is_found(position: int, change: int) -> None:
    good = block("some/name.jpg", size=12345)
    changed = bytearray(good)
    changed[position] = (changed[position] + change) % 256
    header = parse_header(bytes(changed))
    # A checksum field written differently may have the same value.
    assert header is None or 148 <= position < 156


def test_signed_checksums_of_old_systems() -> None:
    made = bytearray(block("é" * 20))
    signed = sum(byte - 256 if byte > 127 else byte for byte in made[:148] + made[156:]) + 8 * 32
    made[148:156] = b"%06o\0 " % signed
    header = parse_header(bytes(made))
    assert header is not None
    assert header.name == "é" * 20


@pytest.mark.parametrize("data", [b"", bytes(512), b"x" * 512, block("name")[:511]])
def test_what_is_no_header(data: bytes) -> None:
    assert parse_header(data) is None
    assert begins_again(data) is None


def test_reading_goes_on_only_at_a_header_with_its_magic() -> None:
    good = block("name")
    assert begins_again(good) is not None
    old = bytearray(good)
    old[257:265] = bytes(8)
    old[148:156] = b"%06o\0 " % (sum(old[:148]) + 8 * 32 + sum(old[156:]))
    assert parse_header(bytes(old)) is not None
    assert begins_again(bytes(old)) is None


def test_pax_records() -> None:
    assert parse_pax(b"15 path=a = b\n\n10 size=3\n\0\0") == {"path": "a = b\n", "size": "3"}
    assert parse_pax(b"11 path=\xff\xfe\n") == {"path": "\udcff\udcfe"}
    assert parse_pax(b"") == {}
    assert parse_pax(b"14 comment=ab\n") == {}, "what nobody reads is not kept"
    assert parse_pax(b"22 GNU.sparse.major=1\n") == {"GNU.sparse.major": "1"}


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        b"99 path=a\n",
        b"8 path=a\n",
        b"0 a\n",
        b"-5 a=b\n",
        b"7 path\n",
        b"11 size=-3\n",
        b"1" * 6000 + b" a",
        b"5013 size=" + b"9" * 5002 + b"\n",
    ],
)
def test_damaged_pax_records(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_pax(data)


def test_long_names() -> None:
    assert parse_long_name(b"n" * 200 + b"\0\0") == "n" * 200
