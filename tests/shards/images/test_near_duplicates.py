from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shards.images.config import DEFAULT_MAX_DISTANCE
from shards.images.near_duplicates import COARSE_BITS, COARSE_DISTANCE, EvaluationIndex

Hashes = NDArray[np.uint8]


def random_hashes(count: int, rng: np.random.Generator) -> Hashes:
    return rng.integers(0, 256, (count, 32), dtype=np.uint8)


def flipped(hashes: Hashes, *, coarse: int, fine: int, rng: np.random.Generator) -> Hashes:
    """Copies that differ in given numbers of coarse and other bits."""
    bits = np.unpackbits(hashes, axis=1)
    for row in bits:
        row[rng.choice(COARSE_BITS, coarse, replace=False)] ^= 1
        row[COARSE_BITS + rng.choice(256 - COARSE_BITS, fine, replace=False)] ^= 1
    return np.packbits(bits, axis=1)


def by_brute_force(hashes: Hashes, queries: Hashes, max_distance: int) -> list[tuple[int, int]]:
    """The definition, computed pair by pair."""
    result = []
    for query in queries:
        bits = np.unpackbits(hashes ^ query, axis=1)
        distance = bits.sum(axis=1)
        is_match = (distance <= max_distance) & (bits[:, :COARSE_BITS].sum(axis=1) <= COARSE_DISTANCE)
        ordered = sorted((int(distance[row]), row) for row in np.flatnonzero(is_match).tolist())
        result.append((ordered[0][1], ordered[0][0]) if ordered else (-1, 0))
    return result


def found(index: EvaluationIndex, queries: Hashes, max_distance: int) -> list[tuple[int, int]]:
    rows, distances = index.closest(queries, max_distance=max_distance)
    assert rows.dtype == np.dtype(np.int64)
    assert distances.dtype == np.dtype(np.int32)
    return list(zip(rows.tolist(), distances.tolist(), strict=True))


@pytest.mark.parametrize("max_distance", [0, 1, 3, 4, 7, 8, 11, 12, 40, DEFAULT_MAX_DISTANCE, 127])
def test_the_closest_is_that_of_brute_force(max_distance: int) -> None:
    rng = np.random.default_rng(max_distance)
    hashes = random_hashes(3000, rng)
    planted = [
        flipped(hashes[rng.integers(0, 3000, 8)], coarse=coarse, fine=fine, rng=rng)
        for coarse in (0, 1, 3, 4, 7, 8, 11, 12, 16)
        for fine in (0, 1, 4, 28, 29, 53, 60)
    ]
    queries = np.concatenate([*planted, random_hashes(100, rng)])
    expected = by_brute_force(hashes, queries, max_distance)
    assert found(EvaluationIndex(hashes), queries, max_distance) == expected
    assert sum(row >= 0 for row, _ in expected) >= 8


@given(seed=st.integers(0, 2**32 - 1), max_distance=st.integers(0, 127), data=st.data())
def test_the_closest_of_crowded_hashes_is_that_of_brute_force(
    seed: int, max_distance: int, data: st.DataObject
) -> None:
    """All hashes are close to each other: many matches per query, ties, and words shared by many hashes."""
    rng = np.random.default_rng(seed)
    centre = random_hashes(1, rng)
    sizes = data.draw(st.tuples(st.integers(1, 40), st.integers(0, 40)))
    coarse, fine = data.draw(st.tuples(st.integers(0, 8), st.integers(0, 40)))
    hashes, queries = (flipped(np.repeat(centre, size, axis=0), coarse=coarse, fine=fine, rng=rng) for size in sizes)
    assert found(EvaluationIndex(hashes), queries, max_distance) == by_brute_force(hashes, queries, max_distance)


def test_of_equal_hashes_the_first_is_found() -> None:
    rng = np.random.default_rng(0)
    one, other = random_hashes(2, rng)
    assert found(EvaluationIndex(np.stack([one, other, other])), other[None], 64) == [(1, 0)]


def test_many_equal_queries_and_hashes_are_compared_in_small_pieces() -> None:
    """A placeholder image that occurs thousands of times in a collection must not need memory for all pairs at once."""
    rng = np.random.default_rng(0)
    hashes = np.repeat(random_hashes(1, rng), 70_000, axis=0)
    queries = np.repeat(flipped(hashes[:1], coarse=0, fine=5, rng=rng), 20, axis=0)
    assert found(EvaluationIndex(hashes), queries, 64) == [(0, 5)] * 20


@pytest.mark.parametrize(("num_hashes", "num_queries"), [(0, 0), (0, 3), (3, 0)])
def test_empty(num_hashes: int, num_queries: int) -> None:
    rng = np.random.default_rng(0)
    index = EvaluationIndex(random_hashes(num_hashes, rng))
    assert found(index, random_hashes(num_queries, rng), 64) == [(-1, 0)] * num_queries


@pytest.mark.parametrize(
    "wrong",
    [lambda: np.zeros((3, 31), np.uint8), lambda: np.zeros((3, 32), np.int8), lambda: np.zeros(32, np.uint8)],
)
def test_other_shapes_are_refused(wrong: Callable[[], Hashes]) -> None:
    with pytest.raises(ValueError, match=r"must be uint8\[n, 32\]"):
        EvaluationIndex(wrong())
    with pytest.raises(ValueError, match=r"must be uint8\[n, 32\]"):
        EvaluationIndex(np.zeros((1, 32), np.uint8)).closest(wrong(), max_distance=1)
