"""Decodes image bytes to uint8[height, width, 3] RGB, in threads (the decoders release the interpreter lock).

Pillow decides what is an image, as in `verify --deep` and nearly every other loader; what it refuses, mostly truncated
files, is a DecodeError. The fast decoder of JPEGs refuses the slightest damage: such images go to Pillow, which uses
what is left of them.

All other formats are decoded by Pillow alone, as at packing and in predictions, so that transparency, 16 bits and the
default image of an APNG mean the same everywhere (shards/images/resize.py). OpenCV is a little faster, but it shows an
APNG's first frame, and its libpng writes warnings with words from the file to the file descriptor of standard error,
past everything that escapes control characters (libpng 1.6.58, `png_icc_profile_error`).
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from shards.errors import ImageRefusedError, PrintableError
from shards.images.config import DEFAULT_LIMITS, ImageLimits
from shards.images.decoding_cost import refuse_costly
from shards.images.resize import flattened
from shards.orientation import TURNS, Turn

DECODER_VERSION = 4  # part of the position: other pixels are another run
_MAX_PIXELS = 178_956_970  # Pillow's own bound against decompression bombs
_FORMATS = ("JPEG", "PNG", "WEBP")  # that datasets hold
_BAND_PIXELS = 1 << 22  # the most that are copied out of Pillow at once
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MOST_CHARACTERS = 200  # of a library's message

Pixels = NDArray[np.uint8]


class DecodeError(PrintableError):
    """The bytes cannot be decoded, or are another image than expected."""


@contextmanager
def image_faults() -> Iterator[None]:
    """Turns whatever a decoding or resizing library raises inside into DecodeError, which concerns one image alone.

    Every call of simplejpeg, Pillow and OpenCV with an image's bytes or pixels is made inside of this. For damage, and
    for sound but unusual images, they raise nearly any of Python's exceptions. A MemoryError is one of them: the memory
    that a view takes is bounded (SECURITY.md), so the image is too large for this machine.
    """
    try:
        yield
    except DecodeError:
        raise
    except UnidentifiedImageError as error:  # its own message holds an address in memory
        raise DecodeError("the bytes are no image of a known format") from error
    except Exception as error:
        text = " ".join(_ADDRESS.sub("", str(error)).split())[:_MOST_CHARACTERS]
        raise DecodeError(f"{type(error).__name__}: {text}" if text else type(error).__name__) from error


def turn_of(orientation: int) -> Turn:
    """The turn for the index's orientation, 1 to 8; the tag in the bytes is ignored. Raises DecodeError."""
    if orientation not in TURNS:
        raise DecodeError(f"orientation {orientation}; allowed: 1 to 8")
    return TURNS[orientation]


def turned(stored: Pixels, turn: Turn) -> Pixels:
    """A view of the pixels as they are seen, so that only what is cropped from it is ever copied."""
    upright = stored.transpose(1, 0, 2) if turn.is_exchanged else stored
    return upright[:: -1 if turn.is_upside_down else 1, :: -1 if turn.is_leftright else 1]


def decode_stored(
    data: bytes | memoryview,
    *,
    height: int,
    width: int,
    denominator: int = 1,
    limits: ImageLimits = DEFAULT_LIMITS,
) -> Pixels:
    """uint8[height, width, 3] as stored; the size is the index's. Greyscale and CMYK become RGB.

    Raises DecodeError, also for an image that would cost more to decode than `limits` allow (a dataset's are in its
    manifest).

    A JPEG is decoded at 1 / denominator (1, 2, 4, 8), to sides rounded up; other formats know only 1. What is
    transparent lies on white.
    """
    try:
        refuse_costly(data, limits)
    except ImageRefusedError as error:
        raise DecodeError(str(error)) from error
    size = (height, width)
    pixels = _decode_jpeg(data, size, denominator) if is_jpeg(data) else _decode_with_pillow(data, size)
    _refuse_other_size((pixels.shape[0], pixels.shape[1]), scaled_size(height, width, denominator))
    return pixels


def scaled_size(height: int, width: int, denominator: int) -> tuple[int, int]:
    """(height, width) of a JPEG that is decoded at 1 / denominator."""
    return -(-height // denominator), -(-width // denominator)


def is_jpeg(data: bytes | memoryview) -> bool:
    """Whether the data begins like a JPEG, which is how all decoders here decide."""
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
    except DecodeError:
        raise
    except Exception:  # damage, no image, or rare: a KeyError for a sampling that it does not name, such as 4:4:1
        return _decode_with_pillow(data, size, denominator)


def _decode_with_pillow(data: bytes | memoryview, size: tuple[int, int], denominator: int = 1) -> Pixels:
    with image_faults(), Image.open(io.BytesIO(data), formats=_FORMATS) as image:
        _refuse_size((image.height, image.width), size)
        if denominator > 1:
            image.draft("RGB", (image.width // denominator, image.height // denominator))
        flat = flattened(image)
        return _pixels_of(flat if flat.mode == "RGB" else flat.convert("RGB"))


def _pixels_of(image: Image.Image) -> Pixels:
    """A copy of an RGB image's pixels. Band by band: NumPy's own copy would take twice the memory meanwhile."""
    pixels = np.empty((image.height, image.width, 3), dtype=np.uint8)
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        bottom = min(top + rows, image.height)
        pixels[top:bottom] = np.asarray(image.crop((0, top, image.width, bottom)), dtype=np.uint8)
    return pixels


def _refuse_size(found: tuple[int, int], expected: tuple[int, int]) -> None:
    """Refuses a size before a decoder allocates what a broken or hostile header promises."""
    if found[0] * found[1] > _MAX_PIXELS:
        raise DecodeError(f"{found[0]} x {found[1]} pixels are above {_MAX_PIXELS}")
    _refuse_other_size(found, expected)


def _refuse_other_size(found: tuple[int, int], expected: tuple[int, int]) -> None:
    if found != expected:
        sizes = [f"{height} x {width}" for height, width in (found, expected)]
        raise DecodeError(f"the image has {sizes[0]} pixels (height x width), the index says {sizes[1]}")
