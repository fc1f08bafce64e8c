"""Perceptual hashes: 256 bits that hardly change if an image is re-encoded, resized or slightly cropped.

The hash is `imagehash.phash` with `hash_size=16`: the signs of the 16x16 lowest coefficients of the cosine transform
of the image in grey at 64x64. Its bits are put in the order of their frequency, so that the first 64 describe the
coarsest structure, which changes least; near_duplicates.py builds on that. docs/benchmarks.md has the
measurements behind the choice.
"""

import io
import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shards.errors import UserError
from shards.images.config import HASH_BITS, WIDEST_LIMITS
from shards.images.flatten import flattened
from shards.images.image_header import read_header, refusal_of, upright

_HASH_SIZE = 16
_SIDE = 64  # phash's own size for this hash_size, so that it need not resize
_DECODED_SIDE = 2 * _SIDE  # least side of a decoded JPEG: with _SIDE, twice as many bits change
_INNER = 0.025  # share that the inner hashes leave out on each side
_LEAST_CONTRAST = 2.0  # standard deviation in grey levels; the sample's photographs have 17 and more
_LEAST_BITS_SET = HASH_BITS // 4  # half of the bits are set, unless most coefficients are zero


def perceptual_hash(data: bytes) -> bytes | None:
    """32 bytes that are nearly equal for near-duplicates of the (upright) image.

    None for an image of nearly one colour or with nothing but a gradient: its hash would be noise, or that of many
    other images too. Raises ImageRefusedError if the image cannot be decoded, and so cannot be compared.
    """
    return _hash(_small(_upright_grey(data)))


def evaluation_hashes(data: bytes) -> tuple[bytes, bytes, bytes, bytes] | None:
    """The hashes that a copy of an evaluation image may have: straight, mirrored, and both without their outer 2.5 %.

    With the last two, crops of up to 5 % on any sides are within 2.5 % of one of the four. Returns None and raises
    errors as `perceptual_hash` does.
    """
    grey = _upright_grey(data)
    small = _small(grey)
    straight = _hash(small)
    if straight is None:
        return None
    width, height = grey.size
    inner = _small(grey, box=(width * _INNER, height * _INNER, width * (1 - _INNER), height * (1 - _INNER)))
    mirrored = _hash(_mirrored(small)) or straight
    # Everything visible may be at the rim: then the inner image has no hash.
    return straight, mirrored, _hash(inner) or straight, _hash(_mirrored(inner)) or mirrored


def _upright_grey(data: bytes) -> Image.Image:
    """The image in grey, decoded at the smallest sufficient scale; of an animation, its first frame."""
    header = read_header(data, WIDEST_LIMITS)  # the caller has its own
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes, which the caller limits, and about damaged metadata
            with Image.open(io.BytesIO(data)) as image:
                image.draft("L", (_DECODED_SIDE, _DECODED_SIDE))
                grey = _grey(image)
    except MemoryError:  # this concerns the machine, not the image
        raise
    except Exception as error:  # for damage, Pillow's decoders raise nearly any of Python's exceptions
        raise refusal_of(error) from error
    return upright(grey, header)


def _grey(image: Image.Image) -> Image.Image:
    """8 bits; transparent pixels become white; deeper pixels are scaled from their own range."""
    if image.has_transparency_data:
        return flattened(image).convert("L")
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        levels = np.asarray(image, np.float64)
        span = max(float(np.ptp(levels)), 1e-9)
        return Image.fromarray(((levels - levels.min()) * (255 / span)).astype(np.uint8))
    return image.convert("L")


def _small(grey: Image.Image, *, box: tuple[float, float, float, float] | None = None) -> Image.Image:
    return grey.resize((_SIDE, _SIDE), Image.Resampling.LANCZOS, box=box, reducing_gap=3)


def _mirrored(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def _hash(small: Image.Image) -> bytes | None:
    if np.asarray(small).std() < _LEAST_CONTRAST:
        return None
    try:
        from imagehash import phash  # noqa: PLC0415, loads scipy, which only the search for near-duplicates needs
    except ImportError as error:
        message = "looking for near-duplicates needs the package imagehash, which is not installed"
        raise UserError(f"{message}; run: pip install imagehash") from error
    bits = phash(small, hash_size=_HASH_SIZE).hash.reshape(-1)[_BY_FREQUENCY]
    return np.packbits(bits).tobytes() if np.count_nonzero(bits) >= _LEAST_BITS_SET else None


def _by_frequency() -> NDArray[np.int64]:
    """Positions in the 16x16 coefficients, row by row: squares around the lowest frequency, from small to large.

    The lowest itself is the mean. It is always above the median, so it carries no information and comes last.
    """
    row, column = np.divmod(np.arange(HASH_BITS), _HASH_SIZE)
    order = np.lexsort((row + column, np.maximum(row, column)))
    return np.roll(order, -1)


_BY_FREQUENCY = _by_frequency()
