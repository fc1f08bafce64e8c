"""Orientation: the tag in every byte order, and the upright image, which NumPy's steps and Pillow's give alike."""

import io
import struct

import numpy as np
import pytest
from PIL import Image, ImageOps

from shards.orientation import TURNS, orientation_of


def exif_block(*entries: tuple[int, int, int, int], order: str = "<", magic: bytes = b"II*\0") -> bytes:
    """A directory of entries (tag, type, count, value); values are written as SHORT or as LONG."""
    block = magic + struct.pack(f"{order}IH", 8, len(entries))
    for tag, kind, count, value in entries:
        block += struct.pack(f"{order}HHI", tag, kind, count)
        block += struct.pack(f"{order}I" if kind == 4 else f"{order}Hxx", value)
    return block + bytes(4)


def num_bytes(value: object) -> str | None:
    """The number of bytes as the name of a test case, since bytes are unreadable."""
    return f"{len(value)} bytes" if isinstance(value, bytes) else None


@pytest.mark.parametrize(
    ("block", "orientation"),
    [
        *[(exif_block((0x0112, 3, 1, value)), value) for value in range(1, 9)],
        (exif_block((0x0112, 3, 1, 6), order=">", magic=b"MM\0*"), 6),
        (exif_block((0x0112, 3, 1, 6), order=">", magic=b"MM*\0"), 6),
        (exif_block((0x0112, 4, 1, 8)), 8),
        (exif_block((0x0100, 3, 1, 640), (0x0112, 3, 1, 3), (0x011A, 4, 1, 72)), 3),
        (exif_block((0x0112, 3, 1, 0)), 1),
        (exif_block((0x0112, 3, 1, 9)), 1),
        (exif_block((0x0112, 3, 2, 6)), 1),
        (exif_block((0x0112, 2, 1, 6)), 1),
        (exif_block((0x0100, 3, 1, 6)), 1),
        (exif_block((0x0112, 3, 1, 6))[:12], 1),
        (b"II*\0\xff\xff\xff\xff", 1),
        (b"no block at all", 1),
        (b"", 1),
    ],
    ids=num_bytes,
)
def test_orientation(block: bytes, orientation: int) -> None:
    assert orientation_of(block) == orientation


@pytest.mark.parametrize("orientation", TURNS)
def test_every_turn_is_what_the_tag_means(orientation: int) -> None:
    stored = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(stored).save(file, "PNG", exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(file)))
    turn = TURNS[orientation]
    image = Image.fromarray(stored)
    assert np.array_equal(np.asarray(image if turn.transpose is None else image.transpose(turn.transpose)), expected)
    upright = stored.transpose(1, 0, 2) if turn.is_exchanged else stored
    upright = upright[::-1] if turn.is_upside_down else upright
    assert np.array_equal(upright[:, ::-1] if turn.is_leftright else upright, expected)


def test_there_are_eight_turns() -> None:
    assert list(TURNS) == list(range(1, 9))
