"""Image bytes -> upright uint8[height, width, 3] RGB, in threads (the decoders release the interpreter lock)."""

import io
from collections.abc import Iterator
from contextlib import contextmanager

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

DECODER_VERSION = 2  # part of a run's data state: other pixels are another run
_MAX_PIXELS = 178_956_970  # Pillow's own bound against decompression bombs
# By EXIF orientation: whether rows and columns are exchanged, then the steps through rows and through columns.
_TURNS = {
    1: (False, 1, 1),
    2: (False, 1, -1),
    3: (False, -1, -1),
    4: (False, -1, 1),
    5: (True, 1, 1),
    6: (True, 1, -1),
    7: (True, -1, -1),
    8: (True, -1, 1),
}

Pixels = NDArray[np.uint8]


class DecodeError(Exception):
    """The bytes are no image that can be decoded."""


def decode_rgb(data: bytes, *, orientation: int) -> Pixels:
    """uint8[height, width, 3] as the image is seen. Greyscale and CMYK become RGB. Raises DecodeError.

    `orientation` is the index's, 1 to 8; the tag in the bytes is not asked. A turned image is a view of its pixels as
    stored, so that only what is cropped from it is ever copied.
    """
    if orientation not in _TURNS:
        raise DecodeError(f"orientation {orientation}; allowed are 1 to 8")
    exchange, rows, columns = _TURNS[orientation]
    stored = _decode_as_stored(data)
    return (stored.transpose(1, 0, 2) if exchange else stored)[::rows, ::columns]


def _decode_as_stored(data: bytes) -> Pixels:
    cv2.setNumThreads(1)  # parallelism is over images
    try:
        if simplejpeg.is_jpeg(data):
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            _refuse_bombs(height, width)
            return np.asarray(simplejpeg.decode_jpeg(data, colorspace="RGB"), dtype=np.uint8)
        with _opened(data):  # OpenCV itself would allow 2 ** 30 pixels
            pass
        encoded = np.frombuffer(data, dtype=np.uint8)
        pixels = cv2.imdecode(encoded, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    except (ValueError, cv2.error):
        return _decode_with_pillow(data)  # CMYK and other rarities, or no image at all
    if pixels is None:
        return _decode_with_pillow(data)
    return np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB), dtype=np.uint8)


def _decode_with_pillow(data: bytes) -> Pixels:
    with _opened(data) as image:
        return np.asarray(image.convert("RGB"), dtype=np.uint8)


@contextmanager
def _opened(data: bytes) -> Iterator[Image.Image]:
    """The image with only its header read, of a size that may be decoded; Pillow's errors become DecodeError."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            _refuse_bombs(image.height, image.width)
            yield image
    except UnidentifiedImageError as error:  # its own message holds an address in memory
        raise DecodeError(f"{len(data)} bytes are no image of a known format") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DecodeError(str(error)) from error


def _refuse_bombs(height: int, width: int) -> None:
    """Before a decoder allocates what a broken or hostile header promises."""
    if height * width > _MAX_PIXELS:
        raise DecodeError(f"{height} x {width} pixels are above {_MAX_PIXELS}")
