"""Decodes image bytes to uint8[height, width, 3] RGB, in threads (the decoders release the interpreter lock).

Pillow decides what is an image, as in `verify --deep` and nearly every other loader. Files that Pillow refuses, mostly
truncated ones, raise DecodeError. The fast JPEG decoder refuses even slightly damaged files; Pillow decodes what is
left of them.

Pillow alone decodes all other formats, here as in packing and in predictions, so that transparency, 16 bits and the
default image of an APNG mean the same everywhere (shards/images/resize.py). OpenCV is a little faster, but it decodes
the first frame of an APNG. Its libpng also writes warnings that quote the file directly to standard error, where
control characters are not escaped (libpng 1.6.58, `png_icc_profile_error`).
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
from shards.images.config import DEFAULT_LIMITS, WIDEST_LIMITS, ImageLimits
from shards.images.decoding_cost import refuse_costly
from shards.images.resize import flattened
from shards.orientation import TURNS, Turn

DECODER_VERSION = 4  # part of the position: a run with other pixels is a different run
_FORMATS = ("JPEG", "PNG", "WEBP")  # the formats that datasets may contain
_BAND_PIXELS = 1 << 22  # the most pixels that are copied out of Pillow at once
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MOST_CHARACTERS = 200  # a library's message is cut to this length

Pixels = NDArray[np.uint8]


class DecodeError(PrintableError):
    """The bytes cannot be decoded, or are a different image than expected."""


@contextmanager
def image_faults() -> Iterator[None]:
    """Turns any exception raised in its `with` block by a decoding or resizing library into DecodeError.

    Every call of simplejpeg, Pillow and OpenCV with an image's bytes or pixels is made in such a block. For damaged
    images, and for sound but unusual ones, these libraries raise nearly any of Python's exceptions. MemoryError becomes
    DecodeError, too: the memory that a view takes is bounded (SECURITY.md), so an image that needs more memory than
    this machine has cannot be used on it.
    """
    try:
        yield
    except DecodeError:
        raise
    except UnidentifiedImageError as error:  # the library's message contains a memory address
        raise DecodeError("the bytes are no image of a known format") from error
    except Exception as error:
        text = " ".join(_ADDRESS.sub("", str(error)).split())[:_MOST_CHARACTERS]
        raise DecodeError(f"{type(error).__name__}: {text}" if text else type(error).__name__) from error


def turn_of(orientation: int) -> Turn:
    """Returns the turn for the index's orientation, 1 to 8. The tag in the bytes is ignored. Raises DecodeError if the
    orientation is another number."""
    if orientation not in TURNS:
        raise DecodeError(f"orientation {orientation}; allowed: 1 to 8")
    return TURNS[orientation]


def turned(stored: Pixels, turn: Turn) -> Pixels:
    """Returns the pixels turned upright, as a view without a copy. Only what is cropped later must be copied."""
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
    """Returns the image as stored, uint8[height, width, 3]. Greyscale and CMYK become RGB, and transparent pixels are
    blended with white.

    `height`, `width`: the size in the index. `denominator`: a JPEG is decoded at 1/1, 1/2, 1/4 or 1/8 of its size, with
    its sides rounded up; other formats allow only 1. Raises DecodeError if the image is damaged, has another size, or
    would cost more to decode than `limits` allow (a dataset's limits are in its manifest).
    """
    try:
        refuse_costly(data, limits)
    except ImageRefusedError as error:
        raise DecodeError(str(error)) from error
    size = (height, width)
    pixels = _decode_jpeg(data, size, denominator) if is_jpeg(data) else _decode_with_pillow(data, size)
    _refuse_other_size((pixels.shape[0], pixels.shape[1]), scaled_size(height, width, denominator))
    return pixels


def decode_upright(
    data: bytes | memoryview, *, height: int, width: int, orientation: int, limits: ImageLimits = DEFAULT_LIMITS
) -> Pixels:
    """Returns the whole image turned by an orientation of 1 to 8: uint8[height, width, 3], contiguous and writeable.
    `height`, `width`: the size as stored. Raises DecodeError, as `decode_stored` does."""
    stored = decode_stored(data, height=height, width=width, limits=limits)
    return np.require(turned(stored, turn_of(orientation)), requirements=["C", "W"])


def scaled_size(height: int, width: int, denominator: int) -> tuple[int, int]:
    """Returns (height, width) of a JPEG that is decoded at 1 / denominator."""
    return -(-height // denominator), -(-width // denominator)


def is_jpeg(data: bytes | memoryview) -> bool:
    """Returns whether the data begins like a JPEG. All decoders here decide this way."""
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
    except Exception:  # damage, not an image, or a rare kind: a KeyError for a sampling such as 4:4:1
        return _decode_with_pillow(data, size, denominator)


def _decode_with_pillow(data: bytes | memoryview, size: tuple[int, int], denominator: int = 1) -> Pixels:
    with image_faults(), Image.open(io.BytesIO(data), formats=_FORMATS) as image:
        _refuse_size((image.height, image.width), size)
        if denominator > 1:
            image.draft("RGB", (image.width // denominator, image.height // denominator))
        flat = flattened(image)
        return _pixels_of(flat if flat.mode == "RGB" else flat.convert("RGB"))


def _pixels_of(image: Image.Image) -> Pixels:
    """Returns a copy of an RGB image's pixels. It is made band by band: NumPy's own copy would need twice the
    memory."""
    pixels = np.empty((image.height, image.width, 3), dtype=np.uint8)
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        bottom = min(top + rows, image.height)
        pixels[top:bottom] = np.asarray(image.crop((0, top, image.width, bottom)), dtype=np.uint8)
    return pixels


def _refuse_size(found: tuple[int, int], expected: tuple[int, int]) -> None:
    """Raises DecodeError for a wrong size before a decoder allocates what a broken or hostile header declares."""
    if found[0] * found[1] > WIDEST_LIMITS.max_pixels:
        raise DecodeError(f"{found[0]} x {found[1]} pixels are above {WIDEST_LIMITS.max_pixels}")
    _refuse_other_size(found, expected)


def _refuse_other_size(found: tuple[int, int], expected: tuple[int, int]) -> None:
    if found != expected:
        sizes = [f"{height} x {width}" for height, width in (found, expected)]
        raise DecodeError(f"the image has {sizes[0]} pixels (height x width), the index says {sizes[1]}")
