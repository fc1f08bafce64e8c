"""Small JPEG copies of images for people to look at: upright, RGB, with a limited number of bytes."""

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageOps

from shards.images.config import DEFAULT_LIMITS
from shards.images.decoding_cost import refuse_costly
from shards.images.flatten import flattened

THUMBNAIL_SIDE = 176
PICTURE_SIDE = 512
MOST_PIXELS = 1 << 26  # decoded at once; a JPEG is decoded small, so only huge images of other formats are skipped
JPEG_QUALITIES = (82, 70, 55, 35, 15, 5)
MOST_BYTES = 11_000  # of a thumbnail
MOST_PICTURE_BYTES = 32_000  # of a picture: a page of 72 stays below 3.2 MB, base64 included
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP")
_EXTREME = 2.5  # longer images are cut to this ratio of their sides


@dataclass(frozen=True, kw_only=True)
class Thumbnail:
    """A small JPEG. `height` and `width` are those of the whole, upright image."""

    data: bytes
    height: int
    width: int


def thumbnail(data: bytes) -> Thumbnail | None:
    """A JPEG of THUMBNAIL_SIDE pixels on the shorter side, long images cut; None if the bytes do not decode."""
    return _made(data, _fitted, least=THUMBNAIL_SIDE, most_bytes=MOST_BYTES)


def picture(data: bytes) -> Thumbnail | None:
    """A JPEG of the whole image, at most PICTURE_SIDE pixels on the longer side; None if the bytes do not decode."""
    return _made(data, _shrunk, least=PICTURE_SIDE, most_bytes=MOST_PICTURE_BYTES)


def _made(data: bytes, small: Callable[[Image.Image], Image.Image], *, least: int, most_bytes: int) -> Thumbnail | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about odd metadata, which is dropped
            upright = _decoded(data, least)
            if upright is None:
                return None
            image, height, width = upright
            image.info = {}  # Pillow would copy a comment into the JPEG, or refuse a long one
            return Thumbnail(data=_jpeg(small(image), most_bytes=most_bytes), height=height, width=width)
    except Exception:  # costly, or damaged: Pillow's decoders raise nearly any of Python's exceptions
        return None


def _fitted(image: Image.Image) -> Image.Image:
    return ImageOps.fit(image, _fitting(*image.size), Image.Resampling.LANCZOS)


def _shrunk(image: Image.Image) -> Image.Image:
    image.thumbnail((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.LANCZOS)
    return image


def _decoded(data: bytes, least: int) -> tuple[Image.Image, int, int] | None:
    """An upright RGB image, `least` pixels or more per side if it has them, and the height and width of the whole."""
    refuse_costly(data, DEFAULT_LIMITS)
    with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
        width, height = opened.size
        opened.draft("RGB", (least, least))  # JPEG only: decode at a fraction of the size
        if opened.width * opened.height > MOST_PIXELS:
            return None
        image = ImageOps.exif_transpose(flattened(opened)).convert("RGB")
    if (image.width > image.height) != (width > height):
        width, height = height, width
    return image, height, width


def _jpeg(image: Image.Image, *, most_bytes: int) -> bytes:
    """A JPEG of the best quality that fits into `most_bytes`."""
    data = b""
    for quality in JPEG_QUALITIES:
        file = io.BytesIO()
        image.save(file, format="JPEG", quality=quality, optimize=True)
        data = file.getvalue()
        if len(data) <= most_bytes:
            break
    return data


def _fitting(width: int, height: int) -> tuple[int, int]:
    """The size of the thumbnail: never enlarged, its longer side no more than `_EXTREME` times the shorter."""
    short = min(THUMBNAIL_SIDE, width, height)
    scale = short / min(width, height)
    longest = max(1, round(_EXTREME * short))
    return min(max(1, round(width * scale)), longest), min(max(1, round(height * scale)), longest)
