"""Edits of a file as bytes: bits flipped, pieces cut out, inserted or repeated, integers overwritten.

An edit is a list that JSON can hold, its name first: the same edit of the same bytes always gives the same result.
"""

from random import Random
from typing import Any

Edit = list[Any]  # its name, and what it needs

INTEGERS = (
    *(0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 1 << 30, (1 << 31) - 1, 1 << 31, (1 << 32) - 1),
    *(1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)
TEXTS = (
    *(b"\0", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\n", b"\r", b'"', b",", b"{", b"[" * 40, b"\xf0\x9f", b"../"),
    *(b"\x1b]0;x\x07", b"-", b"9" * 40, b"nan", b"=", b" ", b"\xed\xa0\x80", b"%s", b": &a [*a]", b"PK\x05\x06"),
)
MOST_COPIED, MOST_FILLED = 64, 1 << 21


def propose(rng: Random, data: bytes) -> Edit:
    """An edit of these bytes. Headers stand at the start and at the end of files, so half of the places are there."""
    at = _place(rng, len(data))
    name = rng.choice(("flip", "flip", "cut", "end", "insert", "copy", "int", "int", "fill"))
    if name == "flip":
        return ["flip", at, rng.randrange(8)]
    if name == "cut":
        return ["cut", at, rng.choice((1, 2, 4, 8, rng.randrange(1, 1 + max(1, len(data) // 4))))]
    if name == "insert":
        return ["insert", at, rng.choice((*TEXTS, rng.randbytes(rng.randrange(1, 9)))).hex()]
    if name == "copy":
        return ["copy", at, rng.randrange(1, MOST_COPIED), _place(rng, len(data))]
    if name == "int":
        return ["int", at, rng.choice((1, 2, 4, 8)), rng.choice(("little", "big")), rng.choice(INTEGERS)]
    if name == "fill":
        return ["fill", at, rng.choice((10, 1000, 6000, MOST_FILLED)), rng.choice((0, 32, 48, 57, 91, 255))]
    return ["end", at]


def apply(data: bytes, edit: Edit) -> bytes:
    """The bytes after the edit."""
    name, at, *rest = edit
    at = min(int(at), len(data))
    match name:
        case "flip":
            return data[:at] + bytes(one ^ 1 << rest[0] for one in data[at : at + 1]) + data[at + 1 :]
        case "cut":
            return data[:at] + data[at + rest[0] :]
        case "insert":
            return data[:at] + bytes.fromhex(rest[0]) + data[at:]
        case "copy":
            return data[: rest[1]] + data[at : at + rest[0]] + data[rest[1] :]
        case "int":
            size, order, value = int(rest[0]), rest[1], int(rest[2])
            return data[:at] + (value % (1 << 8 * size)).to_bytes(size, order) + data[at + size :]
        case "fill":
            return data[:at] + bytes([rest[1]]) * int(rest[0]) + data[at:]
        case "end":
            return data[:at]
    raise ValueError(f"{name} is no edit of bytes")


def _place(rng: Random, num_bytes: int) -> int:
    near = min(128, num_bytes)
    places = (rng.randrange(near + 1), num_bytes - rng.randrange(near + 1), *(rng.randrange(num_bytes + 1),) * 2)
    return rng.choice(places)
