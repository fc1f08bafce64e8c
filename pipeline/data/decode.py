"""Decodes image bytes to uint8[height, width, 3] RGB, in threads (the decoders release the interpreter lock).

Pillow decides what is an image, as in `verify --deep` and nearly every other loader; what it refuses, mostly truncated
files, is a DecodeError. The fast decoders refuse the slightest damage: such images go to Pillow, which uses what is
left of them.

Colour profiles are removed from PNGs first. No decoder here applies them, but libpng checks them and repeats the
profile's name, which is the image's to choose, in warnings that it writes to the file descriptor of standard error
itself, past everything that escapes control characters (libpng 1.6.58, `png_icc_profile_error`).
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from shards.orientation import TURNS, Turn

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PROFILE, _PIXELS = b"iCCP", b"IDAT"
_LENGTH_BYTES, _KIND_BYTES, _CRC_BYTES = 4, 4, 4


def without_profile(data: bytes | memoryview) -> bytes | memoryview:
    """The same image without profiles; data that is no PNG, or has none, as it is. libpng ignores those after the first
    pixels."""
    if data[: len(_SIGNATURE)] != _SIGNATURE:
        return data
    kept, begin, at = [], 0, len(_SIGNATURE)
    while at + _LENGTH_BYTES + _KIND_BYTES <= len(data):
        content = at + _LENGTH_BYTES + _KIND_BYTES
        kind = bytes(data[content - _KIND_BYTES : content])
        end = content + int.from_bytes(data[at : at + _LENGTH_BYTES], "big") + _CRC_BYTES
        if kind == _PIXELS:
            break
        if kind == _PROFILE:
            kept.append(data[begin:at])
            begin = end
        at = end
    return b"".join([*kept, data[begin:]]) if kept else data


DECODER_VERSION = 3  # part of the position: other pixels are another run
_MAX_PIXELS = 178_956_970  # Pillow's own bound against decompression bombs
_DEEP_STEP = 257  # 65535 = 255 x 257

Pixels = NDArray[np.uint8]


class DecodeError(Exception):
    """The bytes cannot be decoded, or are another image than expected."""


def turn_of(orientation: int) -> Turn:
    """The turn for the index's orientation, 1 to 8; the tag in the bytes is ignored. Raises DecodeError."""
    if orientation not in TURNS:
        raise DecodeError(f"orientation {orientation}; allowed: 1 to 8")
    return TURNS[orientation]


def turned(stored: Pixels, turn: Turn) -> Pixels:
    """A view of the pixels as they are seen, so that only what is cropped from it is ever copied."""
    upright = stored.transpose(1, 0, 2) if turn.is_exchanged else stored
    return upright[:: -1 if turn.is_upside_down else 1, :: -1 if turn.is_leftright else 1]


def decode_stored(data: bytes | memoryview, *, height: int, width: int, denominator: int = 1) -> Pixels:
    """uint8[height, width, 3] as stored; the size is the index's. Greyscale and CMYK become RGB. Raises DecodeError.

    A JPEG is decoded at 1 / denominator (1, 2, 4, 8), to sides rounded up; other formats know only 1. Alpha is dropped
    and the colours under it stay.
    """
    size = (height, width)
    pixels = _decode_jpeg(data, size, denominator) if is_jpeg(data) else _decode_other(data, size)
    _refuse_other_size((pixels.shape[0], pixels.shape[1]), scaled_size(height, width, denominator))
    return pixels


def scaled_size(height: int, width: int, denominator: int) -> tuple[int, int]:
    """(height, width) of what a JPEG becomes when it is decoded at 1 / denominator."""
    return -(-height // denominator), -(-width // denominator)


def is_jpeg(data: bytes | memoryview) -> bool:
    """Whether the first bytes say so, which is how all decoders here decide."""
    return bool(data[:3] == b"\xff\xd8\xff")


def _decode_jpeg(data: bytes | memoryview, size: tuple[int, int], denominator: int) -> Pixels:
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        _refuse_size((height, width), size)
        low, narrow = scaled_size(height, width, denominator) if denominator > 1 else (0, 0)
        pixels = simplejpeg.decode_jpeg(
            data, colorspace="RGB", min_height=low, min_width=narrow, min_factor=denominator
        )
        return np.asarray(pixels, dtype=np.uint8)
    except ValueError:  # rare, damaged, or not an image
        return _decode_with_pillow(data, size, denominator)


def _decode_other(data: bytes | memoryview, size: tuple[int, int]) -> Pixels:
    cv2.setNumThreads(1)  # parallelism is over images
    with _opened(data, size):
        pass
    mode = cv2.IMREAD_COLOR | cv2.IMREAD_ANYDEPTH | cv2.IMREAD_IGNORE_ORIENTATION
    try:
        pixels = cv2.imdecode(np.frombuffer(without_profile(data), dtype=np.uint8), mode)
    except cv2.error:
        return _decode_with_pillow(data, size)
    if pixels is None or pixels.dtype not in (np.uint8, np.uint16):
        return _decode_with_pillow(data, size)
    if pixels.dtype == np.uint16:  # Pillow would clip greyscale at 255, OpenCV by itself cut off the lower byte
        pixels = ((pixels.astype(np.uint32) + _DEEP_STEP // 2) // _DEEP_STEP).astype(np.uint8)
    return np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB), dtype=np.uint8)


def _decode_with_pillow(data: bytes | memoryview, size: tuple[int, int], denominator: int = 1) -> Pixels:
    with _opened(data, size) as image:
        if denominator > 1:
            image.draft("RGB", (image.width // denominator, image.height // denominator))
        return np.asarray(image.convert("RGB"), dtype=np.uint8)


@contextmanager
def _opened(data: bytes | memoryview, size: tuple[int, int]) -> Iterator[Image.Image]:
    """The image with only its header read, of the size that it should have; Pillow's errors become DecodeError."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            _refuse_size((image.height, image.width), size)
            yield image
    except UnidentifiedImageError as error:  # its own message holds an address in memory
        raise DecodeError(f"{len(data)} bytes are no image of a known format") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DecodeError(str(error)) from error


def _refuse_size(found: tuple[int, int], expected: tuple[int, int]) -> None:
    """Refuses a size before a decoder allocates what a broken or hostile header promises; OpenCV itself would allow 2
    ** 30 pixels."""
    if found[0] * found[1] > _MAX_PIXELS:
        raise DecodeError(f"{found[0]} x {found[1]} pixels are above {_MAX_PIXELS}")
    _refuse_other_size(found, expected)


def _refuse_other_size(found: tuple[int, int], expected: tuple[int, int]) -> None:
    if found != expected:
        sizes = [f"{height} x {width}" for height, width in (found, expected)]
        raise DecodeError(f"the image has {sizes[0]} pixels (height x width), the index says {sizes[1]}")
