"""Smaller copies of images as JPEG. Images that can be stored as they are keep every byte.

Colours are taken as sRGB, as training does: profiles are dropped, not applied, and so is all other metadata. Of an
animation, or a file with several images, the first one is kept.
"""

import io
import warnings

from PIL import Image

from shards.errors import ImageRefusedError
from shards.images.config import MOST_JPEG_PIXELS, Resize
from shards.images.flatten import flattened
from shards.images.image_header import ImageHeader, refusal_of, upright
from shards.orientation import TURNS, UPRIGHT

_STORABLE = frozenset(("jpg", "png", "webp"))
_FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "gif": "GIF", "tif": "TIFF", "bmp": "BMP"}
_UNKNOWN_RANGE = frozenset(("I", "F"))
# Before the exact, antialiased step, an image may be reduced by a whole factor, by averaging or while it is decoded, to
# no less than this many times its final size. On photographs the result agrees with a single step to 41 dB or more.
_REDUCING_GAP = 2.0
_FILTER = Image.Resampling.LANCZOS  # the sharpest filter, since training scales the copy again
_SUBSAMPLING = "4:2:0"  # as in most photographs; 4:4:4 needs a quarter more bytes

_Box = tuple[float, float, float, float]


def refusal(header: ImageHeader, resize: Resize) -> str | None:
    """Why an image with this header cannot be packed with these settings; None if it can."""
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
    """Whether the bytes are stored as they are."""
    is_small = not resize.short_side or min(header.height, header.width) <= resize.short_side
    return header.ext in _STORABLE and is_small


def fitted(data: bytes, header: ImageHeader, resize: Resize) -> tuple[bytes, ImageHeader]:
    """The bytes to store and their header: the given ones, or those of an upright copy as JPEG.

    A copy is RGB, or L if the image is grey; transparent pixels become white, 16 bits are scaled to 8. Raises
    ImageRefusedError if `refusal` has a reason or the image does not decode. Memory for an image of 2**27 pixels:
    50 MB for a baseline JPEG, at most 1.2 GB for any format (1.35 GB if the copy is nearly as large), unless
    --limits.max-memory-bytes was raised.
    """
    if is_untouched(header, resize):
        return data, header
    if reason := refusal(header, resize):
        raise ImageRefusedError(reason)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about damaged tags, and about sizes, which read_header has checked
            image = upright(_scaled(data, header, resize), header)
            file = io.BytesIO()
            image.save(file, "JPEG", quality=resize.quality, subsampling=_SUBSAMPLING)
    except (ImageRefusedError, MemoryError):
        raise
    except Exception as error:  # for damage, Pillow's decoders raise nearly any of Python's exceptions
        raise refusal_of(error) from error
    copied = ImageHeader(ext="jpg", height=image.height, width=image.width, mode=image.mode, orientation=UPRIGHT)
    return file.getvalue(), copied


def _copy_size(header: ImageHeader, resize: Resize) -> tuple[int, int]:
    """Height and width of the copy before it is turned upright."""
    short = min(header.height, header.width)
    if not resize.short_side or short <= resize.short_side:
        return header.height, header.width
    return _rounded(header.height * resize.short_side, short), _rounded(header.width * resize.short_side, short)


def _rounded(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)


def _scaled(data: bytes, header: ImageHeader, resize: Resize) -> Image.Image:
    """The decoded image, L or RGB, in the size of the copy, without any metadata."""
    height, width = _copy_size(header, resize)
    # Pillow turns TIFF, and TIFF alone, when it is loaded.
    if header.ext == "tif" and TURNS[header.orientation].is_exchanged:
        height, width = width, height
    gap = (int(width * _REDUCING_GAP), int(height * _REDUCING_GAP))
    image, box = _decoded(data, _FORMATS[header.ext], gap)
    if image.size != (width, height):
        image = image.resize((width, height), _FILTER, box=box, reducing_gap=_REDUCING_GAP)
    image.info = {}  # Pillow would write a comment from the original
    return image


def _decoded(data: bytes, image_format: str, gap: tuple[int, int]) -> tuple[Image.Image, _Box | None]:
    """L or RGB pixels, not much larger than `gap` if the format allows it, and the box of the image in them."""
    with Image.open(io.BytesIO(data), formats=(image_format,)) as image:
        drafted = image.draft(None, gap)  # a JPEG can be decoded at 1/2, 1/4 or 1/8
        return flattened(image), drafted[1] if drafted else None
