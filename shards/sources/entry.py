"""What every image source provides: entries in a fixed order, and the bytes of images.

A source is read twice. The scan reads all of it once, in its own order, through `images`. Packing reads single images
again, in the order of the plan, through the `reader`, which finds an image by its locator.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from shards.errors import ImageRefusedError

IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".tif", ".tiff", ".bmp", ".heic", ".heif", ".avif")
)

# The most bytes of images that are read ahead. The image that is due is not counted.
MOST_BYTES_AHEAD = 64 << 20

# The bytes of an image, or why there are none: a file system error or a refusal.
ImageBytes = bytes | OSError | ImageRefusedError


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One image of a source, or a container of images (a class's tar, a row group) that the scan opens.

    `locator` tells the source's own reader where the bytes are. `name` is the source's name for the image, in valid
    Unicode. `labels` are class names (empty: unknown), `weights` their weights (empty, or one per label). `num_bytes`
    is the number of bytes that the scan will read, or 0 if the listing does not say. `num_images` is 0 if the number is
    not known before the container is opened.
    """

    locator: str
    name: str
    labels: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    num_bytes: int = 0
    num_images: int = 1


class Reader(Protocol):
    """Reads images of one source again by their locators."""

    def read_many(self, locators: Sequence[str]) -> Iterator[ImageBytes]:
        """Yields the bytes of each image, or its error, in order. One unreadable image must not stop the others."""
        ...


def printable(name: str) -> str:
    """Returns a file name as valid Unicode: bytes that are not UTF-8 become backslash escapes."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def too_large(num_bytes: int | str, *, max_bytes: int) -> ImageRefusedError:
    """Returns the refusal of an image that has more bytes than allowed."""
    return ImageRefusedError(f"too large: {num_bytes} bytes, allowed: {max_bytes}")
