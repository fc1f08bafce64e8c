"""Reads one image file outside any dataset: its bytes and its header, within the limits of packing."""

from dataclasses import dataclass, replace
from pathlib import Path

from shards.errors import ImageRefusedError, InvalidDataError
from shards.images.config import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, PACKED_FORMATS, WIDEST_LIMITS
from shards.images.image_header import read_header
from shards.local_file import at_home, open_local_file

# No flag lifts limits here, so only what `pack` refuses with every flag is too costly.
_LIMITS = replace(WIDEST_LIMITS, max_bytes=MAX_IMAGE_BYTES, max_pixels=MAX_IMAGE_PIXELS)


@dataclass(frozen=True, kw_only=True)
class ImageFile:
    """An encoded image. Height and width are in pixels as stored, before `orientation` (EXIF's, 1 to 8) is applied."""

    data: bytes
    height: int
    width: int
    orientation: int


def read_image_file(path: Path) -> ImageFile:
    """The JPEG, PNG or WebP file at `path`. Raises ImageRefusedError with the reason if it is missing, unreadable,
    truncated, of another format or above the limits. Nothing is decoded."""
    try:
        with open_local_file(at_home(str(path))) as file:
            data = file.read(_LIMITS.max_bytes + 1)
    except IsADirectoryError:
        raise ImageRefusedError("it is a folder; give the images in it") from None
    except OSError as error:
        raise ImageRefusedError(f"it cannot be read: {error.strerror}") from error
    except InvalidDataError as error:  # a pipe, a device, or a zero byte in the name
        raise ImageRefusedError(str(error)) from error
    header = read_header(data, _LIMITS)
    if header.ext not in PACKED_FORMATS:
        raise ImageRefusedError(f"it is in the format {header.ext}; allowed: JPEG, PNG and WebP: convert it")
    return ImageFile(data=data, height=header.height, width=header.width, orientation=header.orientation)
