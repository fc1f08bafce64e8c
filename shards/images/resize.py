"""Makes smaller copies of images as JPEGs: the copies that shards store, and thumbnails for people.

Images that can be stored as they are keep every byte. As in training, colours are taken as sRGB. Copies have no
metadata: colour profiles are dropped, not applied. A file with several images, or an animation, is copied as its first
image; an APNG, as its default image.

All pixels go through `flattened`, in packing, `verify`, training, evaluation and predictions, so that the same image
gives the same pixels everywhere: 8 bits per channel, with white behind transparent pixels.
"""

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps

from shards.errors import ImageRefusedError
from shards.images.config import DEFAULT_LIMITS, MOST_JPEG_PIXELS, Resize
from shards.images.decoding_cost import refuse_costly
from shards.images.image_header import ImageHeader, refusal_of, upright
from shards.orientation import TURNS, UPRIGHT

_GREY = frozenset(("1", "L", "LA", "La", "I;16", "I;16L", "I;16B", "I;16N"))
_BACKGROUND = "white"
_BAND_PIXELS = 1 << 22
_MOST_16_BIT = 65_535
_STEPS = {"L;2": 85, "L;4": 17}  # Pillow scales grey pixels of 2 and 4 bits to 8 bits, but not the transparent value
_STORABLE = frozenset(("jpg", "png", "webp"))
_FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "gif": "GIF", "tif": "TIFF", "bmp": "BMP"}
_UNKNOWN_RANGE = frozenset(("I", "F"))
# Before the exact, antialiased step, an image may be reduced by a whole factor, by averaging or while it is decoded,
# but not to less than this many times its final size. On photographs, the result agrees with a single exact step to 41
# dB or more.
_REDUCING_GAP = 2.0
_FILTER = Image.Resampling.LANCZOS  # the sharpest filter, since training scales the copy again
_SUBSAMPLING = "4:2:0"  # as in most photographs; 4:4:4 needs a quarter more bytes
_Box = tuple[float, float, float, float]
THUMBNAIL_SIDE = 176
PICTURE_SIDE = 512
MOST_PIXELS = 1 << 26  # when decoded; JPEGs are decoded small, so only huge images of other formats are skipped
JPEG_QUALITIES = (82, 70, 55, 35, 15, 5)
MOST_BYTES = 11_000  # the largest thumbnail
MOST_PICTURE_BYTES = 32_000  # the largest picture: 72 of them stay below 3.2 MB, even in base64
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP")
_EXTREME = 2.5  # longer images are cropped to this ratio of their sides


def flattened(image: Image.Image) -> Image.Image:
    """Returns the image as L if it is grey, otherwise as RGB. An opaque image in L or RGB is returned unchanged.

    Grey of 16 bits is scaled; colours of 16 bits keep their higher byte, as Pillow decodes them. Works band by band, so
    that large images are not in memory four times. For damaged images, raises the exceptions of Pillow's decoders,
    which may be of nearly any type.
    """
    if isinstance(image.info.get("transparency"), str):  # a text chunk of this name in a PNG
        del image.info["transparency"]
    _scale_transparent_value(image)
    image.load()
    mode = "L" if image.mode in _GREY else "RGB"
    if image.mode == mode and not image.has_transparency_data:
        return image
    flat = Image.new(mode, image.size)
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        flat.paste(_opaque(band).convert(mode), (0, top))
    flat.info = {name: value for name, value in image.info.items() if name != "transparency"}  # EXIF is kept
    return flat


def _scale_transparent_value(image: Image.Image) -> None:
    """Scales a PNG's transparent value to the 8 bits of the pixels. Pillow does not."""
    tiles = getattr(image, "tile", None)
    if not tiles:  # decoded pixels do not say how many bits they had
        return
    value, bits = image.info.get("transparency"), tiles[0].args
    if isinstance(value, int) and bits in _STEPS:
        image.info["transparency"] = value * _STEPS[bits]
    elif isinstance(value, tuple) and bits == "RGB;16B":
        image.info["transparency"] = tuple(part >> 8 for part in value)


def _opaque(band: Image.Image) -> Image.Image:
    if band.mode.startswith("I;16"):
        pixels = np.asarray(band).astype(np.uint32)
        if band.has_transparency_data:
            pixels[pixels == band.info["transparency"]] = _MOST_16_BIT
        return Image.fromarray(((pixels * 255 + _MOST_16_BIT // 2) // _MOST_16_BIT).astype(np.uint8))
    if not band.has_transparency_data:
        return band
    colours = band.convert("LA").convert("RGBA") if band.mode == "La" else band.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", colours.size, _BACKGROUND), colours)


def refusal(header: ImageHeader, resize: Resize) -> str | None:
    """Returns why an image with this header cannot be packed with these settings; None if it can."""
    if is_untouched(header, resize):
        return None
    if header.ext not in _STORABLE and not resize.short_side and not resize.convert:
        return f"{header.ext} cannot be stored as it is; --resize.convert allows to store it as JPEG"
    if header.mode in _UNKNOWN_RANGE:
        return f"{header.ext} with pixels of 32 bits (mode {header.mode}), whose range is unknown"
    if max(_copy_size(header, resize)) > MOST_JPEG_PIXELS:
        height, width = _copy_size(header, resize)
        return f"{height}x{width} pixels do not fit into a JPEG, at most {MOST_JPEG_PIXELS} a side"
    return None


def is_untouched(header: ImageHeader, resize: Resize) -> bool:
    """Returns whether the image's bytes are stored as they are."""
    is_small = not resize.short_side or min(header.height, header.width) <= resize.short_side
    return header.ext in _STORABLE and is_small


def fitted(data: bytes, header: ImageHeader, resize: Resize) -> tuple[bytes, ImageHeader]:
    """Returns the bytes to store and their header: the original's, or those of an upright JPEG copy.

    A copy is RGB, or L if the image is grey. Transparent pixels become white, and 16 bits are scaled to 8. Raises
    ImageRefusedError if `refusal` has a reason or the image cannot be decoded. An image of 2**27 pixels takes 50 MB of
    memory as a baseline JPEG, and at most 1.2 GB in any format (1.35 GB if the copy is nearly as large), unless
    --limits.max-memory-bytes was raised.
    """
    if is_untouched(header, resize):
        return data, header
    if reason := refusal(header, resize):
        raise ImageRefusedError(reason)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # damaged tags, and sizes, which read_header has checked
            image = upright(_scaled(data, header, resize), header)
            file = io.BytesIO()
            image.save(file, "JPEG", quality=resize.quality, subsampling=_SUBSAMPLING)
    except (ImageRefusedError, MemoryError):
        raise
    except Exception as error:  # Pillow's decoders raise nearly any exception for damage
        raise refusal_of(error) from error
    copied = ImageHeader(ext="jpg", height=image.height, width=image.width, mode=image.mode, orientation=UPRIGHT)
    return file.getvalue(), copied


def _copy_size(header: ImageHeader, resize: Resize) -> tuple[int, int]:
    """Returns the height and the width of the copy before it is turned upright."""
    short = min(header.height, header.width)
    if not resize.short_side or short <= resize.short_side:
        return header.height, header.width
    return _rounded(header.height * resize.short_side, short), _rounded(header.width * resize.short_side, short)


def _rounded(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)


def _scaled(data: bytes, header: ImageHeader, resize: Resize) -> Image.Image:
    """Returns the decoded image, L or RGB, in the size of the copy, without metadata."""
    height, width = _copy_size(header, resize)
    # Pillow turns a TIFF, but no other format, upright when it loads one.
    if header.ext == "tif" and TURNS[header.orientation].is_exchanged:
        height, width = width, height
    gap = (int(width * _REDUCING_GAP), int(height * _REDUCING_GAP))
    image, box = _decoded(data, _FORMATS[header.ext], gap)
    if image.size != (width, height):
        image = image.resize((width, height), _FILTER, box=box, reducing_gap=_REDUCING_GAP)
    image.info = {}  # otherwise Pillow would copy a comment of the original
    return image


def _decoded(data: bytes, image_format: str, gap: tuple[int, int]) -> tuple[Image.Image, _Box | None]:
    """Returns the image as L or RGB, not much larger than `gap` if the format allows it, and the box that the image
    fills within it."""
    with Image.open(io.BytesIO(data), formats=(image_format,)) as image:
        drafted = image.draft(None, gap)  # a JPEG can be decoded at 1/2, 1/4 or 1/8
        return flattened(image), drafted[1] if drafted else None


@dataclass(frozen=True, kw_only=True)
class Thumbnail:
    """A small JPEG. `height` and `width` are those of the original image, upright and not cropped."""

    data: bytes
    height: int
    width: int


def thumbnail(data: bytes) -> Thumbnail | None:
    """Returns a JPEG of at most THUMBNAIL_SIDE pixels on the shorter side, in which long images are cropped; None if
    the bytes cannot be decoded, or only at too high a cost."""
    return _made(data, _fitted, least=THUMBNAIL_SIDE, most_bytes=MOST_BYTES)


def picture(data: bytes) -> Thumbnail | None:
    """Returns a JPEG of the whole image, of at most PICTURE_SIDE pixels on the longer side; None if the bytes cannot be
    decoded, or only at too high a cost."""
    return _made(data, _shrunk, least=PICTURE_SIDE, most_bytes=MOST_PICTURE_BYTES)


def _made(data: bytes, small: Callable[[Image.Image], Image.Image], *, least: int, most_bytes: int) -> Thumbnail | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about odd metadata, which is dropped
            upright = _decoded_upright(data, least)
            if upright is None:
                return None
            image, height, width = upright
            image.info = {}  # Pillow would copy a comment into the JPEG, or refuse a long one
            return Thumbnail(data=_jpeg(small(image), most_bytes=most_bytes), height=height, width=width)
    except Exception:  # too costly, or damaged: Pillow's decoders raise nearly any exception
        return None


def _fitted(image: Image.Image) -> Image.Image:
    return ImageOps.fit(image, _fitting(*image.size), Image.Resampling.LANCZOS)


def _shrunk(image: Image.Image) -> Image.Image:
    image.thumbnail((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.LANCZOS)
    return image


def _decoded_upright(data: bytes, least: int) -> tuple[Image.Image, int, int] | None:
    """Returns an upright RGB image of at least `least` pixels per side (less if the original is smaller), and the
    original's upright height and width. Returns None if too many pixels would be decoded."""
    refuse_costly(data, DEFAULT_LIMITS)
    with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
        width, height = opened.size
        opened.draft("RGB", (least, least))  # only a JPEG can be decoded at a fraction of its size
        if opened.width * opened.height > MOST_PIXELS:
            return None
        image = ImageOps.exif_transpose(flattened(opened)).convert("RGB")
    if (image.width > image.height) != (width > height):
        width, height = height, width
    return image, height, width


def _jpeg(image: Image.Image, *, most_bytes: int) -> bytes:
    """Returns a JPEG of the best of JPEG_QUALITIES that fits into `most_bytes`, or of the lowest if none fits."""
    data = b""
    for quality in JPEG_QUALITIES:
        file = io.BytesIO()
        image.save(file, format="JPEG", quality=quality, optimize=True)
        data = file.getvalue()
        if len(data) <= most_bytes:
            break
    return data


def _fitting(width: int, height: int) -> tuple[int, int]:
    """Returns the size of the thumbnail. It is never larger than the image, and its longer side is at most `_EXTREME`
    times the shorter one."""
    short = min(THUMBNAIL_SIDE, width, height)
    scale = short / min(width, height)
    longest = max(1, round(_EXTREME * short))
    return min(max(1, round(width * scale)), longest), min(max(1, round(height * scale)), longest)
