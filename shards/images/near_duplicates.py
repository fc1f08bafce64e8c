"""Makes perceptual hashes of images, and searches for evaluation images whose hashes are close to those of other
images.

A hash has 256 bits. Few of them change if an image is re-encoded, resized or slightly cropped. It is `imagehash.phash`
with `hash_size=16`: the signs of the 16x16 lowest coefficients of the cosine transform of the image in grey at 64x64.
Its bits are ordered by frequency, so that the first 64 describe the coarsest structure, which changes least.
docs/benchmarks.md has the measurements behind the choice.

Two hashes match if at most `max_distance` bits differ and if at most 11 of the first 64 bits differ. The second
condition makes an exact search cheap. The 64 bits are cut into 4 words of 16: if at most 11 bits differ, then at most 2
differ in one of the words (Norouzi, Punjani and Fleet, Fast Exact Search in Hamming Space with Multi-Index Hashing,
2014). So an image is compared only with the evaluation images whose word is one of the 137 words within 2 bits of its
own. No match is missed, and 1 pair in 120 is compared.

Shape letters: m queries, n evaluation hashes, q queries of one word, e evaluation hashes near that word.
"""

import io
import warnings
from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shards.errors import UserError
from shards.images.config import HASH_BITS, WIDEST_LIMITS
from shards.images.image_header import read_header, refusal_of, upright
from shards.images.resize import flattened

COARSE_BITS = 64
COARSE_DISTANCE = 11
_WORD_BITS = 16
_NUM_WORDS = COARSE_BITS // _WORD_BITS
_VALUES = 1 << _WORD_BITS
_PAIRS_AT_ONCE = 1 << 16  # 0.5 MB of differences, which fits in a core's own cache
_ROW_BITS = 48
Rows = NDArray[np.int64]
_HASH_SIZE = 16
_SIDE = 64  # the size that phash uses for this hash_size, so it does not resize
_DECODED_SIDE = 2 * _SIDE  # the least side of a decoded JPEG; with _SIDE, twice as many bits change
_INNER = 0.025  # the share that the inner hashes leave out on each side
_LEAST_CONTRAST = 2.0  # standard deviation in grey levels; the photographs measured have 17 or more
_LEAST_BITS_SET = HASH_BITS // 4  # half of the bits are set unless most coefficients are zero


class EvaluationIndex:
    """A search index of the hashes of evaluation images, uint8[n, 32]. It takes 96 bytes of memory per hash."""

    def __init__(self, hashes: NDArray[np.uint8]) -> None:
        self._hashes = _as_words(hashes)
        coarse = self._hashes[:, 0]
        self._words = [_SortedWord(coarse, number) for number in range(_NUM_WORDS)]

    def closest(self, queries: NDArray[np.uint8], *, max_distance: int) -> tuple[Rows, NDArray[np.int32]]:
        """Finds the closest matching evaluation hash for each query, uint8[m, 32]: its row, int64[m] (-1: none), and
        the number of bits that differ, int32[m]. If several are equally close, the lowest row is returned.

        The cost per query falls with the number of queries: a million or more at once is best.
        """
        asked = _as_words(queries)
        # Distance and row are one number, so that the smallest can be kept.
        best = np.full(len(asked), np.iinfo(np.int64).max, np.int64)
        coarse_distance = min(COARSE_DISTANCE, max_distance)
        for word in self._words:
            for query_rows, rows in word.near(asked[:, 0], coarse_distance):
                distance = np.bitwise_count(asked[query_rows] ^ self._hashes[rows]).sum(axis=1, dtype=np.int64)
                is_match = distance <= max_distance
                found = distance[is_match] << _ROW_BITS | rows[is_match]
                np.minimum.at(best, query_rows[is_match], found)
        is_found = best != np.iinfo(np.int64).max
        row = np.where(is_found, best & ((1 << _ROW_BITS) - 1), -1)
        return row, np.where(is_found, best >> _ROW_BITS, 0).astype(np.int32)


class _SortedWord:
    """The coarse bits of all evaluation hashes, uint64[n], sorted by one of their words."""

    def __init__(self, coarse: NDArray[np.uint64], number: int) -> None:
        self._shift = np.uint64(_WORD_BITS * number)
        values = self._values(coarse)
        self._order = np.argsort(values, kind="stable")
        self._coarse = coarse[self._order]
        self._starts = np.searchsorted(values[self._order], np.arange(_VALUES + 1))

    def near(self, asked: NDArray[np.uint64], coarse_distance: int) -> Iterator[tuple[Rows, Rows]]:
        """Yields pairs of query and evaluation rows whose coarse bits differ in at most `coarse_distance` places, and
        whose word differs in at most a quarter of that."""
        flips = _flips(coarse_distance // _NUM_WORDS)
        values = self._values(asked)
        order = np.argsort(values, kind="stable")
        firsts = np.flatnonzero(np.diff(values[order], prepend=-1))
        for first, last in pairwise([*firsts.tolist(), len(order)]):
            places_e = self._places(int(values[order[first]]) ^ flips)
            coarse_e = self._coarse[places_e]
            step = max(1, _PAIRS_AT_ONCE // max(1, len(coarse_e)))
            for start in range(first, last, step):
                rows_q = order[start : min(start + step, last)]
                differing_qe = np.bitwise_count(asked[rows_q, None] ^ coarse_e)
                hits = np.flatnonzero(differing_qe <= coarse_distance)
                if len(hits):
                    which_q, which_e = np.divmod(hits, len(coarse_e))
                    yield rows_q[which_q], self._order[places_e[which_e]]

    def _places(self, values: NDArray[np.int64]) -> Rows:
        """Returns the places, in the sorted order, of the hashes whose word is one of `values`."""
        starts = self._starts[values]
        sizes = self._starts[values + 1] - starts
        ends = np.cumsum(sizes)
        num_places = int(ends[-1])
        return np.repeat(starts - (ends - sizes), sizes) + np.arange(num_places)

    def _values(self, coarse: NDArray[np.uint64]) -> NDArray[np.int64]:
        return (coarse >> self._shift & np.uint64(_VALUES - 1)).astype(np.int64)


def _flips(radius: int) -> NDArray[np.int64]:
    """Returns all words with at most `radius` bits set. XOR with them gives every word within that distance."""
    chosen = (bits for count in range(radius + 1) for bits in combinations(range(_WORD_BITS), count))
    return np.array([sum(1 << bit for bit in bits) for bits in chosen], np.int64)


def _as_words(hashes: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Returns uint8[n, 32] as uint64[n, 4], with the coarse bits first."""
    if hashes.dtype != np.uint8 or hashes.shape[1:] != (HASH_BITS // 8,):
        raise ValueError(f"hashes are {hashes.dtype}{list(hashes.shape)}, must be uint8[n, {HASH_BITS // 8}]")
    return np.ascontiguousarray(hashes).view(np.uint64)


def perceptual_hash(data: bytes) -> bytes | None:
    """Returns 32 bytes that are nearly equal for near-duplicates of the (upright) image.

    Returns None for an image that is nearly one colour or only a gradient: its hash would be noise, or the same as that
    of many other images. Raises ImageRefusedError if the image cannot be decoded.
    """
    return _hash(_small(_upright_grey(data)))


def evaluation_hashes(data: bytes) -> tuple[bytes, bytes, bytes, bytes] | None:
    """Returns the hashes that a copy of an evaluation image may have: straight, mirrored, and both without their outer
    2.5 %.

    Thanks to the last two, a crop of up to 5 % on any side differs by at most 2.5 % per side from one of the four
    versions. Like `perceptual_hash`, returns None for an image without structure, and raises ImageRefusedError.
    """
    grey = _upright_grey(data)
    small = _small(grey)
    straight = _hash(small)
    if straight is None:
        return None
    width, height = grey.size
    inner = _small(grey, box=(width * _INNER, height * _INNER, width * (1 - _INNER), height * (1 - _INNER)))
    mirrored = _hash(_mirrored(small)) or straight
    # If everything visible is at the rim, the inner image has no hash.
    return straight, mirrored, _hash(inner) or straight, _hash(_mirrored(inner)) or mirrored


def _upright_grey(data: bytes) -> Image.Image:
    """Returns the upright image (of an animation, its first frame) in grey, decoded at the smallest sufficient
    scale."""
    header = read_header(data, WIDEST_LIMITS)  # the caller checks its own limits
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about sizes, which the caller limits, and about damaged metadata
            with Image.open(io.BytesIO(data)) as image:
                image.draft("L", (_DECODED_SIDE, _DECODED_SIDE))
                grey = _grey(image)
    except MemoryError:  # this concerns the machine, not the image
        raise
    except Exception as error:  # Pillow's decoders raise nearly any exception for damage
        raise refusal_of(error) from error
    return upright(grey, header)


def _grey(image: Image.Image) -> Image.Image:
    """Converts an image to grey of 8 bits. Transparent pixels become white. Pixels with more than 8 bits are scaled
    from the range that the image uses."""
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
    """Returns positions in the 16x16 coefficients (row by row), in the order of growing squares around the lowest
    frequency.

    The lowest frequency is the mean of the image. It is always above the median, so it has no information and comes
    last.
    """
    row, column = np.divmod(np.arange(HASH_BITS), _HASH_SIZE)
    order = np.lexsort((row + column, np.maximum(row, column)))
    return np.roll(order, -1)


_BY_FREQUENCY = _by_frequency()
