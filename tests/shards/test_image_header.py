"""Headers of images, and everything that is not one."""

import struct
import zlib

import pytest

from shards.image_header import ImageRefusedError, read_header
from tests.rigs.images import image_bytes


def png_of_size(height: int, width: int) -> bytes:
    """A PNG that claims a size and has no pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + b"\x00\x00\x00\x00IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


@pytest.mark.parametrize(("image_format", "ext"), [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp")])
def test_format_and_size_come_from_the_header(image_format: str, ext: str) -> None:
    header = read_header(image_bytes(1, height=20, width=48, image_format=image_format))
    assert (header.ext, header.height, header.width) == (ext, 20, 48)


def test_pixels_are_never_decoded() -> None:
    header = read_header(png_of_size(8000, 8000))
    assert (header.height, header.width) == (8000, 8000)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"not an image at all", "not a JPEG"),
        (image_bytes(1, image_format="GIF"), "not a JPEG"),
        (image_bytes(1, image_format="BMP"), "not a JPEG"),
        (image_bytes(1)[:10], "header"),
        (image_bytes(1, image_format="PNG")[:12], "header"),
        (b"RIFF\x04\x00\x00\x00WAVE", "header"),
        (png_of_size(20_000, 20_000), "too large"),
        (png_of_size(12_000, 12_000), "12000x12000 pixels"),
        (b"\xff\xd8\xff" + bytes((64 << 20) + 1), "too large: 67108868 bytes"),
    ],
    ids=["empty", "text", "gif", "bmp", "cut jpeg", "cut png", "wave", "bomb", "many pixels", "many bytes"],
)
def test_what_cannot_be_packed_is_refused_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ImageRefusedError, match=reason):
        read_header(data)
