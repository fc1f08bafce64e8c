"""Parses PNG and WebP headers by the names and lengths of their chunks, and checks where a GIF's image ends."""

import struct
import zlib
from collections.abc import Iterator

from shards.errors import ImageRefusedError
from shards.orientation import EXIF_PREFIX, orientation_of

# (bits, colour type) -> Pillow's mode. Pillow reads 16-bit colours as 8-bit.
_PNG_MODES = {
    (1, 0): "1",
    **dict.fromkeys([(2, 0), (4, 0), (8, 0)], "L"),
    (16, 0): "I;16",
    **dict.fromkeys([(8, 2), (16, 2)], "RGB"),
    **dict.fromkeys([(1, 3), (2, 3), (4, 3), (8, 3)], "P"),
    (8, 4): "LA",
    **dict.fromkeys([(16, 4), (8, 6), (16, 6)], "RGBA"),
}
_PNG_CHUNK = struct.Struct(">I4s")
_PNG_HEADER = struct.Struct(">I4sIIBBBBBI")
_WEBP_CHUNK = struct.Struct("<4sI")
_WEBP_HAS_ALPHA = 0x10


def png_facts(data: bytes) -> tuple[int, int, str, int]:
    """Height and width as stored, mode, EXIF orientation. Raises ImageRefusedError with the reason."""
    try:
        length, name, width, height, bits, colour, *_, checksum = _PNG_HEADER.unpack_from(data, 8)
    except struct.error:
        raise ImageRefusedError("truncated: ends within the PNG header") from None
    mode = _PNG_MODES.get((bits, colour))
    if length != 13 or name != b"IHDR" or zlib.crc32(data[12:29]) != checksum or mode is None:
        raise ImageRefusedError("damaged PNG header")
    position, has_pixels, exif = 33, False, b""
    while name != b"IEND":
        try:
            length, name = _PNG_CHUNK.unpack_from(data, position)
        except struct.error:
            raise ImageRefusedError(f"truncated: a PNG without its end, {len(data)} bytes") from None
        contents = position + 8
        position = contents + length + 4
        if not name.isalpha():
            raise ImageRefusedError("damaged PNG: a chunk without a name")
        if name == b"IDAT":
            has_pixels = True
        elif name == b"eXIf":
            exif = data[contents : contents + length]
    if position > len(data):
        raise ImageRefusedError(f"truncated: a PNG without its end, {len(data)} bytes")
    if not has_pixels:
        raise ImageRefusedError("PNG without pixels")
    return height, width, mode, orientation_of(exif)


def webp_size(data: bytes | memoryview) -> tuple[int, int]:
    """Height and width of the canvas, as the header says. struct.error if it is cut off."""
    name = bytes(data[12:16])
    if name == b"VP8X":
        (wide,) = struct.unpack_from("<I", data, 24)
        (high,) = struct.unpack_from("<I", data, 26)
        return 1 + (high >> 8), 1 + (wide & 0xFFFFFF)
    if name == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return ((bits >> 14) & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    width, height = struct.unpack_from("<HH", data, 26)
    return height & 0x3FFF, width & 0x3FFF  # the upper bits are a hint for scaling


def webp_facts(data: bytes) -> tuple[int, int, str, int]:
    """Height and width as stored, mode, EXIF orientation. Raises ImageRefusedError with the reason."""
    if len(data) < 30:
        raise ImageRefusedError("truncated: ends within the WebP header")
    if data[8:12] != b"WEBP":
        raise ImageRefusedError("RIFF file that is not WebP")
    end = 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        raise ImageRefusedError(f"truncated: {len(data)} bytes of {end}")
    name = data[12:16]
    if name == b"VP8X":
        return _extended_webp(data, end)
    if name == b"VP8L":
        return (*webp_size(data), _lossless_mode(data, 20), 1)
    # A key frame, then its start code (RFC 6386, section 9.1).
    if name != b"VP8 " or data[20] & 1 or data[23:26] != b"\x9d\x01\x2a":
        raise ImageRefusedError("damaged WebP header")
    return (*webp_size(data), "RGB", 1)


def _lossless_mode(data: bytes, position: int) -> str:
    """The mode, from the contents of a VP8L chunk."""
    if data[position : position + 1] != b"\x2f" or position + 5 > len(data):
        raise ImageRefusedError("damaged WebP header")
    (bits,) = struct.unpack_from("<I", data, position + 1)
    return "RGBA" if bits >> 28 & 1 else "RGB"


def _extended_webp(data: bytes, end: int) -> tuple[int, int, str, int]:
    """The extended format, for animations, alpha and metadata. Of an animation the first frame counts."""
    mode = "RGBA" if data[20] & _WEBP_HAS_ALPHA else "RGB"
    height, width = webp_size(data)
    position, has_pixels, exif = 30, False, b""
    while position + 8 <= end:
        name, length = _WEBP_CHUNK.unpack_from(data, position)
        contents = position + 8
        position = contents + length + length % 2
        if contents + length > end:
            raise ImageRefusedError("damaged WebP: a chunk beyond its end")
        if name == b"VP8L":
            mode = _lossless_mode(data, contents)
        has_pixels = has_pixels or name in {b"VP8 ", b"VP8L", b"ANMF"}
        if name == b"EXIF":
            exif = data[contents : contents + length].removeprefix(EXIF_PREFIX)
    if not has_pixels:
        raise ImageRefusedError("WebP without pixels")
    return height, width, mode, orientation_of(exif)


def check_first_gif_frame(data: bytes) -> None:
    """Raises ImageRefusedError unless the first image is whole. Many GIFs lack the trailer after the last image."""
    try:
        *_, position = gif_blocks(data)
        if data[position] != 0x2C:
            raise ImageRefusedError("damaged GIF: no image in it")
        _after_gif_blocks(data, position + 11 + _gif_palette(data[position + 9]))
    except IndexError:
        raise ImageRefusedError(f"truncated: a GIF that ends within its first image, {len(data)} bytes") from None


def gif_blocks(data: bytes | memoryview) -> Iterator[int]:
    """Where a GIF's palette ends, then each block of the extensions before its first image. IndexError if the GIF ends
    there."""
    position = 13 + _gif_palette(data[10])
    yield position
    while data[position] == 0x21:
        position += 2
        while length := data[position]:
            position += 1 + length
            yield position
        position += 1
        yield position


def _gif_palette(flags: int) -> int:
    """Bytes of the palette, from its flags."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _after_gif_blocks(data: bytes, position: int) -> int:
    """The end of a chain of blocks: each begins with its length, and the last is empty."""
    while length := data[position]:
        position += 1 + length
    return position + 1
