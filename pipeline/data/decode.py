"""Image bytes -> uint8[height, width, 3] RGB, in threads (the decoders release the interpreter lock)."""

import io

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

DECODER_VERSION = 1  # part of a run's data state: other pixels are another run
_MAX_PIXELS = 178_956_970  # Pillow's own bound against decompression bombs

Pixels = NDArray[np.uint8]


class DecodeError(Exception):
    """The bytes are no image that can be decoded."""


def decode_rgb(data: bytes) -> Pixels:
    """uint8[height, width, 3]. Greyscale and CMYK become RGB. Raises DecodeError."""
    cv2.setNumThreads(1)  # parallelism is over images
    if simplejpeg.is_jpeg(data):
        try:
            return np.asarray(simplejpeg.decode_jpeg(data, colorspace="RGB"), dtype=np.uint8)
        except ValueError:
            return _decode_with_pillow(data)  # CMYK and other rarities
    pixels = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    if pixels is None:
        return _decode_with_pillow(data)
    return np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB), dtype=np.uint8)


def _decode_with_pillow(data: bytes) -> Pixels:
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > _MAX_PIXELS:
                raise DecodeError(f"{image.width} x {image.height} pixels are above {_MAX_PIXELS}")
            return np.asarray(image.convert("RGB"), dtype=np.uint8)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DecodeError(str(error)) from error
