"""Finds near-duplicates of evaluation images: the closest of many hashes, exactly and fast.

Two hashes of 256 bits (perceptual.py) match if at most `max_distance` bits differ and if, of the first 64 bits, which
describe the image's coarsest structure, at most 11 differ. The second condition makes the search cheap. Cut the 64 bits
into 4 words of 16: if at most 11 bits differ, at most 2 differ in one of the words (Norouzi, Punjani and Fleet, Fast
Exact Search in Hamming Space with Multi-Index Hashing, 2014). So the images with one word need to be compared only with
those of the 137 words within 2 bits of it: no match is missed, and 1 pair in 120 is compared.

Shape letters: m queries, n evaluation hashes, q queries of one word, e evaluation hashes near that word.
"""

from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from shards.images.config import HASH_BITS

COARSE_BITS = 64
COARSE_DISTANCE = 11

_WORD_BITS = 16
_NUM_WORDS = COARSE_BITS // _WORD_BITS
_VALUES = 1 << _WORD_BITS
_PAIRS_AT_ONCE = 1 << 16  # 0.5 MB of differences, which stays in a core's own cache
_ROW_BITS = 48

Rows = NDArray[np.int64]


class EvaluationIndex:
    """The hashes of evaluation images, uint8[n, 32], to be searched; 96 bytes of memory each."""

    def __init__(self, hashes: NDArray[np.uint8]) -> None:
        self._hashes = _as_words(hashes)
        coarse = self._hashes[:, 0]
        self._words = [_SortedWord(coarse, number) for number in range(_NUM_WORDS)]

    def closest(self, queries: NDArray[np.uint8], *, max_distance: int) -> tuple[Rows, NDArray[np.int32]]:
        """Finds for each of uint8[m, 32] the closest evaluation hash that matches: its row, int64[m] (-1: none), and
        the number of bits that differ, int32[m]. If several are equally close, the lowest row.

        The cost per query falls with their number: a million or more at once is best.
        """
        asked = _as_words(queries)
        # Distance and row in one number, of which the smallest is kept.
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
        """Pairs of query and evaluation rows whose coarse bits differ in at most `coarse_distance`, and whose word in
        at most a fourth of that."""
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
        """The positions of the hashes whose word is one of `values`."""
        starts = self._starts[values]
        sizes = self._starts[values + 1] - starts
        ends = np.cumsum(sizes)
        num_places = int(ends[-1])
        return np.repeat(starts - (ends - sizes), sizes) + np.arange(num_places)

    def _values(self, coarse: NDArray[np.uint64]) -> NDArray[np.int64]:
        return (coarse >> self._shift & np.uint64(_VALUES - 1)).astype(np.int64)


def _flips(radius: int) -> NDArray[np.int64]:
    """All words with at most `radius` bits set: XOR with them gives every word within that distance."""
    chosen = (bits for count in range(radius + 1) for bits in combinations(range(_WORD_BITS), count))
    return np.array([sum(1 << bit for bit in bits) for bits in chosen], np.int64)


def _as_words(hashes: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """uint8[n, 32] as uint64[n, 4], the coarse bits first."""
    if hashes.dtype != np.uint8 or hashes.shape[1:] != (HASH_BITS // 8,):
        raise ValueError(f"hashes are {hashes.dtype}{list(hashes.shape)}, must be uint8[n, {HASH_BITS // 8}]")
    return np.ascontiguousarray(hashes).view(np.uint64)
