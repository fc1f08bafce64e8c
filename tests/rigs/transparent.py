"""Images of every kind that can be transparent, and the pixels that each must become by every way: white below."""

import io
import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 16
OPAQUE, HIDDEN = (60, 120, 180), (200, 30, 90)  # colours of the left half and, under the transparency, of the right
GREY, HIDDEN_GREY = 51, 170  # 3 and 10 of 15, so that 4 bits say them exactly
WHITE = (255, 255, 255)

Rgb = NDArray[np.uint8]


def halves(left: tuple[int, ...], right: tuple[int, ...]) -> Rgb:
    """uint8[SIDE, SIDE, channels]: two plain halves."""
    pixels = [np.full((SIDE, SIDE // 2, len(value)), value, dtype=np.uint8) for value in (left, right)]
    return np.concatenate(pixels, axis=1)


def _saved(pixels: NDArray[np.uint8], mode: str, image_format: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, image_format, **options)
    return file.getvalue()


def _png(bits: int, colour_type: int, row: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of SIDE equal rows with these chunks before its pixels, as Pillow itself would not write it."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", SIDE, SIDE, bits, colour_type, 0, 0, 0)
    pixels = zlib.compress((b"\0" + row) * SIDE)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", pixels), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def _shorts(*values: int) -> bytes:
    return struct.pack(f">{len(values)}H", *values)


def _grey(bits: int) -> bytes:
    """A grey PNG with a transparent value, of 1 to 16 bits a pixel."""
    most = (1 << bits) - 1
    left, right = (GREY * most // 255, HIDDEN_GREY * most // 255) if bits > 1 else (1, 0)
    packed = sum(value << bits * (SIDE - 1 - i) for i, value in enumerate([left] * (SIDE // 2) + [right] * (SIDE // 2)))
    return _png(bits, 0, packed.to_bytes(SIDE * bits // 8, "big"), (b"tRNS", _shorts(right)))


def _apng() -> bytes:
    """An animation whose default image is not its first frame."""
    pictures: Sequence[Image.Image] = [Image.new("RGB", (SIDE, SIDE), colour) for colour in (OPAQUE, HIDDEN, GREY_RGB)]
    file = io.BytesIO()
    pictures[0].save(file, "PNG", save_all=True, append_images=pictures[1:], default_image=True)
    return file.getvalue()


GREY_RGB = (GREY, GREY, GREY)
_ALPHA = halves((*OPAQUE, 255), (*HIDDEN, 0))
_HALF = halves((*OPAQUE, 255), (*HIDDEN, 51))  # a fifth of the colour, four fifths of white
_FIFTH = tuple(round(value / 5 + 255 * 4 / 5) for value in HIDDEN)
_DEEP = _shorts(*[257 * value for value in OPAQUE] * (SIDE // 2), *[257 * value for value in HIDDEN] * (SIDE // 2))
_PALETTE = (b"PLTE", bytes([*OPAQUE, *HIDDEN]))
_INDICES = bytes(SIDE // 2) + b"\1" * (SIDE // 2)
_COLOURS, _GREYS = halves(OPAQUE, WHITE), halves(GREY_RGB, WHITE)

# name: (bytes of the file, uint8[SIDE, SIDE, 3] of the image)
TRANSPARENT: dict[str, tuple[bytes, Rgb]] = {
    "RGBA PNG": (_saved(_ALPHA, "RGBA"), _COLOURS),
    "RGBA PNG, a fifth opaque": (_saved(_HALF, "RGBA"), halves(OPAQUE, _FIFTH)),
    "RGBA PNG, all opaque": (_saved(halves((*OPAQUE, 255), (*HIDDEN, 255)), "RGBA"), halves(OPAQUE, HIDDEN)),
    "LA PNG": (_saved(halves((*GREY_RGB, 255), (*HIDDEN, 0)), "LA"), _GREYS),
    "RGB PNG with a transparent colour": (_saved(halves(OPAQUE, HIDDEN), "RGB", transparency=HIDDEN), _COLOURS),
    "RGB PNG of 16 bits with a transparent colour": (
        _png(16, 2, _DEEP, (b"tRNS", _shorts(*[257 * value for value in HIDDEN]))),
        _COLOURS,
    ),
    "palette PNG, one colour transparent": (_png(8, 3, _INDICES, _PALETTE, (b"tRNS", b"\xff\0")), _COLOURS),
    "palette PNG, a fifth opaque": (_png(8, 3, _INDICES, _PALETTE, (b"tRNS", b"\xff\x33")), halves(OPAQUE, _FIFTH)),
    "palette PNG, the first colour transparent": (
        _png(8, 3, _INDICES[::-1], (b"PLTE", bytes([*HIDDEN, *OPAQUE])), (b"tRNS", b"\0")),
        _COLOURS,
    ),
    "grey PNG of 1 bit with a transparent value": (_grey(1), halves(WHITE, WHITE)),
    "grey PNG of 2 bits with a transparent value": (_grey(2), halves((0, 0, 0), WHITE)),
    "grey PNG of 4 bits with a transparent value": (_grey(4), _GREYS),
    "grey PNG of 8 bits with a transparent value": (_grey(8), _GREYS),
    "grey PNG of 16 bits with a transparent value": (_grey(16), _GREYS),
    "APNG with a default image": (_apng(), halves(OPAQUE, OPAQUE)),
    "RGBA WebP": (_saved(_ALPHA, "RGBA", "WEBP", lossless=True, exact=True), _COLOURS),
    "RGBA WebP, a fifth opaque": (_saved(_HALF, "RGBA", "WEBP", lossless=True), halves(OPAQUE, _FIFTH)),
}
