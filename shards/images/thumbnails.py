"""Small JPEG copies of images for people to look at: upright, in RGB, of a bounded number of bytes."""

import io
import warnings
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps

THUMBNAIL_SIDE = 176
MOST_PIXELS = 1 << 26  # decoded at once; a JPEG is decoded small, so only other huge images are passed over
JPEG_QUALITIES = (82, 70, 55, 35, 15, 5)
MOST_BYTES = 11_000  # of one picture, so that a page of all of them stays below 3 MB
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP")
_EXTREME = 2.5  # longer images are cut to this ratio of their sides
_BACKGROUND = (255, 255, 255)

# What Pillow raises on damaged bytes.
_BROKEN = (OSError, ValueError, SyntaxError, IndexError, KeyError, EOFError, Image.DecompressionBombError)


@dataclass(frozen=True, kw_only=True)
class Thumbnail:
    """A small JPEG. `height` and `width` are those of the whole image as it is looked at."""

    data: bytes
    height: int
    width: int


def thumbnail(data: bytes) -> Thumbnail | None:
    """A small JPEG of an image, upright and in RGB; None where the bytes do not decode."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of odd metadata, which is not kept
            return _thumbnail(data)
    except _BROKEN:
        return None


def _thumbnail(data: bytes) -> Thumbnail | None:
    with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
        width, height = opened.size
        opened.draft("RGB", (THUMBNAIL_SIDE, THUMBNAIL_SIDE))  # JPEG only: decode at a fraction of the size
        if opened.width * opened.height > MOST_PIXELS:
            return None
        image = _rgb(ImageOps.exif_transpose(opened))
    if (image.width > image.height) != (width > height):
        width, height = height, width
    image = ImageOps.fit(image, _fitting(*image.size), Image.Resampling.LANCZOS)
    return Thumbnail(data=_jpeg(image), height=height, width=width)


def _jpeg(image: Image.Image) -> bytes:
    """At the best quality that fits into MOST_BYTES."""
    data = b""
    for quality in JPEG_QUALITIES:
        file = io.BytesIO()
        image.save(file, format="JPEG", quality=quality, optimize=True)
        data = file.getvalue()
        if len(data) <= MOST_BYTES:
            break
    return data


def _fitting(width: int, height: int) -> tuple[int, int]:
    """The size of the thumbnail: never enlarged, its longer side no more than `_EXTREME` times the shorter."""
    short = min(THUMBNAIL_SIDE, width, height)
    scale = short / min(width, height)
    longest = max(1, round(_EXTREME * short))
    return min(max(1, round(width * scale)), longest), min(max(1, round(height * scale)), longest)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits a pixel: Pillow's own conversion would cut off at 255
        return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        transparent = image.convert("RGBA")
        whole = Image.new("RGB", image.size, _BACKGROUND)
        whole.paste(transparent, mask=transparent.getchannel("A"))
        return whole
    return image.convert("RGB")
