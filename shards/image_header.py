"""Format and size of an image from its header alone; the pixels are never decoded."""

import io
import warnings
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError

MAX_IMAGE_BYTES = 64 << 20
MAX_IMAGE_PIXELS = 1 << 27  # 134 megapixels, 400 MB once decoded to RGB

_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF")


class ImageRefusedError(Exception):
    """These bytes can not go into a shard. The message is the reason that the quarantine list shows."""


@dataclass(frozen=True, kw_only=True)
class ImageHeader:
    """What the index says about an image. Height and width are as stored, before any EXIF rotation."""

    ext: str
    height: int
    width: int


def read_header(data: bytes) -> ImageHeader:
    """The header of JPEG, PNG or WebP bytes. Raises ImageRefusedError with the reason for anything else."""
    if not data:
        raise ImageRefusedError("empty file")
    if len(data) > MAX_IMAGE_BYTES:
        raise ImageRefusedError(f"too large: {len(data)} bytes, allowed are {MAX_IMAGE_BYTES}")
    if not data.startswith(_MAGIC):
        raise ImageRefusedError("not a JPEG, PNG or WebP image")
    ext, height, width = _open(data)
    if height * width > MAX_IMAGE_PIXELS:
        raise ImageRefusedError(f"too large: {height}x{width} pixels, allowed are {MAX_IMAGE_PIXELS} in all")
    return ImageHeader(ext=ext, height=height, width=width)


def _open(data: bytes) -> tuple[str, int, int]:
    try:
        with warnings.catch_warnings():
            # Pillow warns from half its own limit on; ours is checked by the caller.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP")) as image:
                return _EXTENSIONS[image.format or ""], image.height, image.width
    except Image.DecompressionBombError as error:
        raise ImageRefusedError(f"too large: {error}") from error
    except UnidentifiedImageError as error:
        raise ImageRefusedError("damaged or truncated image header") from error
    except (OSError, SyntaxError, ValueError, KeyError, IndexError) as error:
        # Pillow's parsers meet damaged headers with any of these.
        raise ImageRefusedError(f"damaged image header: {type(error).__name__}: {error}") from error
