"""Format, size and orientation of an image from its header alone; the pixels are never decoded.

JPEG, PNG and WebP have parsers of our own (7 microseconds for a JPEG, a third of Pillow's time). They also check that
the file has its end, since truncated files are the usual damage in collections. Other formats are rare and are packed
only re-encoded; Pillow opens them, and a truncated TIFF or BMP is found when it is decoded.
"""

import io
import re
import warnings
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError

from shards.errors import ImageRefusedError
from shards.images.chunk_headers import check_first_gif_frame, png_facts, webp_facts
from shards.images.config import DEFAULT_LIMITS, ImageLimits
from shards.images.decoding_cost import refuse_costly
from shards.images.jpeg_header import jpeg_facts
from shards.orientation import TAG, TURNS, UPRIGHT

_PARSERS = {"jpg": jpeg_facts, "png": png_facts, "webp": webp_facts}
_MAGIC = {
    "jpg": (b"\xff\xd8\xff",),
    "png": (b"\x89PNG\r\n\x1a\n",),
    "webp": (b"RIFF",),
    "gif": (b"GIF87a", b"GIF89a"),
    "tif": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),  # the last two are BigTIFF
    "bmp": (b"BM",),
}
_PILLOW_FORMATS = {"gif": "GIF", "tif": "TIFF", "bmp": "BMP"}
_BITS, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339  # TIFF's tags
_WHITE_IS_ZERO, _SIGNED = 0, 2
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


_ISO_BRANDS = {
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), "HEIC"),
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
}


@dataclass(frozen=True, kw_only=True)
class ImageHeader:
    """The properties of an image that go into the index; of an animation, those of its first frame or its canvas.

    Height and width are as stored, before it is turned; `orientation` is EXIF's (1: upright). `ext` is jpg, png, webp,
    gif, tif or bmp. `mode` is Pillow's name for the stored pixels: 1, L, LA, I;16, P, RGB, RGBA, CMYK (YCCK, too).
    """

    ext: str
    height: int
    width: int
    mode: str
    orientation: int


def read_header(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> ImageHeader:
    """The header of an image in one of the six formats. Raises ImageRefusedError with the reason for anything else."""
    if not data:
        raise ImageRefusedError("empty file")
    if len(data) > limits.max_bytes:
        raise ImageRefusedError(f"too large: {len(data)} bytes, allowed: {limits.max_bytes}")
    ext = _format(data)
    refuse_costly(data, limits)  # before any parser walks through millions of segments
    parse = _PARSERS.get(ext)
    height, width, mode, orientation = parse(data) if parse else _ask_pillow(data, ext)
    if height < 1 or width < 1:
        raise ImageRefusedError(f"no pixels: {height}x{width}")
    if height * width > limits.max_pixels:
        raise ImageRefusedError(f"too large: {height}x{width} pixels, allowed: {limits.max_pixels} in all")
    return ImageHeader(ext=ext, height=height, width=width, mode=mode, orientation=orientation)


def refusal_of(error: Exception) -> ImageRefusedError:
    """The reason to show for an error from Pillow: one line, the same in every process."""
    if isinstance(error, UnidentifiedImageError):  # its own message holds an address in memory
        return ImageRefusedError("damaged or truncated image header")
    text = _ADDRESS.sub("", " ".join(str(error).split()))[:200]
    return ImageRefusedError(f"damaged image: {type(error).__name__}: {text}")


def _format(data: bytes) -> str:
    for ext, magic in _MAGIC.items():
        if data.startswith(magic):
            return ext
    if data[4:8] == b"ftyp" and (name := _ISO_BRANDS.get(data[8:12])):
        raise ImageRefusedError(f"{name} is not read here; convert it to JPEG or PNG first")
    raise ImageRefusedError("not a JPEG, PNG, WebP, GIF, TIFF or BMP image")


def _ask_pillow(data: bytes, ext: str) -> tuple[int, int, str, int]:
    if ext == "gif":
        check_first_gif_frame(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about damaged tags, and about sizes, which the caller checks
            with Image.open(io.BytesIO(data), formats=(_PILLOW_FORMATS[ext],)) as image:
                height, width, mode = image.height, image.width, image.mode
                found = image.getexif().get(TAG) if ext == "tif" else UPRIGHT
                misread = _misread_tiff(image) if ext == "tif" else ""
    except Image.DecompressionBombError as error:
        raise ImageRefusedError(f"too large: {error}") from error
    except MemoryError:  # this concerns the machine, not the image
        raise
    except Exception as error:  # for damage, Pillow's parsers raise nearly any of Python's exceptions
        raise refusal_of(error) from error
    if misread:
        raise ImageRefusedError(f"a TIFF with {misread}, which is not read correctly here; convert it to PNG first")
    orientation = found if isinstance(found, int) and found in TURNS else UPRIGHT
    if ext == "tif" and TURNS[orientation].is_exchanged:  # of TIFF alone, Pillow gives the size after rotation
        height, width = width, height
    return height, width, mode, orientation


def _misread_tiff(image: Image.Image) -> str:
    """What Pillow decodes to wrong pixels without an error (Pillow 13.0.0); empty if it does not."""
    tags = getattr(image, "tag_v2", {})
    bits, formats = tags.get(_BITS, (1,)), tags.get(_SAMPLE_FORMAT, (1,))
    if image.mode.startswith("I;16") and bits[0] != 16:
        return f"grey pixels of {bits[0]} bits"  # not scaled: white is 4,095 of 65,535
    if image.mode.startswith("I;16") and tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        return "grey pixels of 16 bits in which 0 is white"  # not inverted
    if bits[0] == 8 and formats[0] == _SIGNED:
        return "pixels of 8 bits with a sign"  # taken for 0 to 255
    return ""


def upright(image: Image.Image, header: ImageHeader) -> Image.Image:
    """The loaded image, turned upright. Pillow itself turns a TIFF, and no other format, when it loads it."""
    how = None if header.ext == "tif" else TURNS[header.orientation].transpose
    return image if how is None else image.transpose(how)
