"""Settings that say which images are packed, and which of them are stored as smaller copies.

This module loads neither NumPy nor Pillow, so that the command line starts quickly.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from shards.config_values import Range, refuse_wrong_values

PACKED_FORMATS = ("jpg", "png", "webp")
MAX_IMAGE_BYTES = 64 << 20
MAX_IMAGE_PIXELS = 1 << 27  # 134 megapixels, 400 MB once decoded to RGB
MOST_JPEG_PIXELS = 65_500  # per side, the limit of libjpeg
CODEC_PACKAGES = ("pillow",)  # its version determines the bytes of copies, so the plan records it

PERCEPTUAL_HASH = "imagehash-phash-256-by-frequency-1"
HASH_PACKAGES = ("imagehash", "pillow", "scipy")
HASH_BITS = 256
DEFAULT_MAX_DISTANCE = 64  # measured in docs/benchmarks.md

_MOST_BYTES = (1 << 31) - 1
_MOST_PIXELS = 178_956_970  # Pillow opens no larger image
_MOST_SCANS, _MOST_SCAN_PIXELS, _MOST_MEMORY_BYTES, _MOST_CHUNKS = 10_000, 1 << 34, 1 << 32, 1 << 20


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """Limits for the size of images and for the cost of decoding them. Both are checked before anything is decoded.

    Limits that differ from the defaults are stored in the dataset's manifest, so that its readers apply the same
    limits.
    """

    max_bytes: Annotated[int, Range(1, _MOST_BYTES)] = MAX_IMAGE_BYTES
    """Largest image in bytes, as stored."""
    max_pixels: Annotated[int, Range(1, _MOST_PIXELS)] = MAX_IMAGE_PIXELS
    """Largest image in pixels (height x width)."""
    max_scans: Annotated[int, Range(1, _MOST_SCANS)] = 100
    """Most scans of a JPEG or passes of a PNG; photographs have 1 to 20, and an interlaced PNG has 7."""
    max_scan_pixels: Annotated[int, Range(1, _MOST_SCAN_PIXELS)] = 1 << 31
    """Most pixels in all scans of a JPEG together, counted per component; a thousand million take about 1 s."""
    max_memory_bytes: Annotated[int, Range(1, _MOST_MEMORY_BYTES)] = 1 << 30
    """Most memory in bytes to decode a JPEG of several scans or a WebP to RGB, estimated from the header."""
    max_chunks: Annotated[int, Range(1, _MOST_CHUNKS)] = 1 << 16
    """Most parts of a file: segments of a JPEG, chunks of a PNG, frames of a WebP, strips of a TIFF."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="limits.")


DEFAULT_LIMITS = ImageLimits()
WIDEST_LIMITS = ImageLimits(
    max_bytes=_MOST_BYTES,
    max_pixels=_MOST_PIXELS,
    max_scans=_MOST_SCANS,
    max_scan_pixels=_MOST_SCAN_PIXELS,
    max_memory_bytes=_MOST_MEMORY_BYTES,
    max_chunks=_MOST_CHUNKS,
)


@dataclass(frozen=True, kw_only=True)
class ImageChecks:
    """Which damaged images are left out, besides those that cannot be opened."""

    truncated: Literal["auto", "quarantine", "keep"] = "auto"
    """JPEGs and PNGs with a missing part: auto leaves them out if --resize is used, which would hide the damage;
    quarantine always does (it decodes each image, which takes longer); keep never does: verify --deep finds them."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="images.")


@dataclass(frozen=True, kw_only=True)
class Resize:
    """Which images are stored as smaller copies."""

    short_side: Annotated[int, Range(0, MOST_JPEG_PIXELS, zero="as they are")] = 0
    """Pixels that a longer short side is scaled down to, as a new JPEG; 0 leaves every image as it is."""
    quality: Annotated[int, Range(1, 100)] = 90
    """JPEG quality of re-encoded images, 1 to 100; 80 to 95 are usual."""
    convert: bool = False
    """Re-encode GIF, TIFF and BMP, which cannot be stored as they are, even without --resize.short-side."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="resize.")
