"""PNG, WebP and GIF headers agree with Pillow in every mode, and truncated files are refused."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from shards.errors import ImageRefusedError
from shards.images.image_header import check_first_gif_frame, png_facts, webp_facts
from tests.rigs.images import image_bytes

RGB = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8))
EXIF = Image.Exif()
EXIF[0x0112] = 8
PNG, WEBP = (image_bytes(1, image_format=name) for name in ("PNG", "WEBP"))


def encoded(image: Image.Image, image_format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def pillow_facts(data: bytes) -> tuple[int, int, str, int]:
    with Image.open(io.BytesIO(data)) as image:
        return image.height, image.width, image.mode, image.getexif().get(0x0112, 1)


def chunk(name: bytes, contents: bytes) -> bytes:
    return struct.pack(">I", len(contents)) + name + contents + struct.pack(">I", zlib.crc32(name + contents))


def png_of(bits: int, colour: int, *, chunks: bytes | None = None) -> bytes:
    """A black PNG, with `chunks` in place of palette and pixels."""
    if chunks is None:
        channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
        pixels = bytes(40 * (1 + 56 * bits * channels // 8))
        chunks = chunk(b"PLTE", bytes(3)) + chunk(b"IDAT", zlib.compress(pixels))
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 56, 40, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunks + chunk(b"IEND", b"")


def num_bytes(value: object) -> str | None:
    """The number of bytes as the name of a test case, since bytes are unreadable."""
    return f"{len(value)} bytes" if isinstance(value, bytes) else None


DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}


@pytest.mark.parametrize(
    "data",
    [
        *[png_of(bits, colour) for colour, depths in DEPTHS.items() for bits in depths],
        *[encoded(RGB.convert(mode), "PNG", exif=EXIF) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")],
        encoded(RGB, "PNG", save_all=True, append_images=[RGB.rotate(90)]),
        PNG + b"trailing bytes",
    ],
    ids=num_bytes,
)
def test_png_agrees_with_pillow(data: bytes) -> None:
    assert png_facts(data) == pillow_facts(data)


TRANSPARENT = RGB.convert("RGBA").copy()
TRANSPARENT.putalpha(7)


@pytest.mark.parametrize(
    "data",
    [
        WEBP,
        encoded(RGB, "WEBP", exif=EXIF),
        encoded(RGB, "WEBP", lossless=True),
        encoded(RGB, "WEBP", lossless=True, exif=EXIF),
        encoded(TRANSPARENT, "WEBP"),
        encoded(TRANSPARENT, "WEBP", lossless=True),
        encoded(TRANSPARENT, "WEBP", lossless=True, exif=EXIF, icc_profile=bytes(77)),
        encoded(RGB, "WEBP", save_all=True, append_images=[RGB.rotate(90), RGB.rotate(180)]),
        encoded(TRANSPARENT, "WEBP", save_all=True, append_images=[TRANSPARENT.rotate(90)]),
        WEBP + b"trailing bytes",
    ],
    ids=num_bytes,
)
def test_webp_agrees_with_pillow(data: bytes) -> None:
    assert webp_facts(data) == pillow_facts(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (PNG[:20], "ends within the PNG header"),
        (PNG[:-1], "a PNG without its end"),
        (PNG[:-12], "a PNG without its end"),
        (PNG[: len(PNG) // 2], "a PNG without its end"),
        (PNG[:16] + b"\x01" + PNG[17:], "damaged PNG header"),
        (png_of(3, 3), "damaged PNG header"),
        (png_of(8, 2, chunks=b""), "without pixels"),
        (png_of(8, 2, chunks=chunk(b"\0\0\0\0", b"")), "a chunk without a name"),
    ],
    ids=num_bytes,
)
def test_png_refused_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ImageRefusedError, match=reason):
        png_facts(data)


EXTENDED = encoded(TRANSPARENT, "WEBP", exif=EXIF)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (WEBP[:20], "ends within the WebP header"),
        (WEBP[:-1], f"truncated: {len(WEBP) - 1} bytes of {len(WEBP)}"),
        (b"RIFF\x04\0\0\0WAVE" + bytes(99), "not WebP"),
        (WEBP.replace(b"\x9d\x01\x2a", b"\0\0\0"), "damaged WebP header"),
        (WEBP.replace(b"VP8 ", b"VP9 "), "damaged WebP header"),
        (EXTENDED.replace(b"VP8 ", b"VP9 "), "without pixels"),
        (EXTENDED.replace(b"EXIF", b"EXIF\xff\xff")[: len(EXTENDED)], "a chunk beyond its end"),
        (encoded(RGB, "WEBP", lossless=True)[:20] + bytes(40), "truncated|damaged WebP header"),
    ],
    ids=num_bytes,
)
def test_webp_refused_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ImageRefusedError, match=reason):
        webp_facts(data)


def test_gif_needs_its_first_image_and_no_more() -> None:
    frames = [RGB.convert("P"), RGB.rotate(90).convert("P")]
    animated = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], comment=b"a comment")
    one = encoded(frames[0], "GIF")
    check_first_gif_frame(one)
    check_first_gif_frame(one[:-1])
    check_first_gif_frame(animated)
    check_first_gif_frame(animated[: len(animated) * 3 // 4])
    with pytest.raises(ImageRefusedError, match="truncated: a GIF"):
        check_first_gif_frame(one[: len(one) // 2])
    with pytest.raises(ImageRefusedError, match="no image in it"):
        check_first_gif_frame(b"GIF89a" + bytes(7) + b";")
