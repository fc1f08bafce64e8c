"""The order is exact: every epoch a permutation, every number of ranks the same batches, nothing precomputed."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shards.order import SampleOrder


def stream(order: SampleOrder, batch_size: int, num_positions: int) -> NDArray[np.int64]:
    """Sample ids in order of global position, read through batches."""
    ids = np.full(num_positions + batch_size, -1, dtype=np.int64)
    for step in range(num_positions // batch_size + 1):
        ids[order.positions(step, batch_size, 0, 1)] = order.batch(step, batch_size)
    return ids[:num_positions]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**40), lanes=st.integers(1, 6), window=st.integers(1, 4))
def test_every_epoch_is_an_exact_permutation(data: st.DataObject, seed: int, lanes: int, window: int) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=14).filter(lambda s: sum(s) >= lanes))
    batch_size = lanes * data.draw(st.integers(1, 5))
    order = SampleOrder(np.array(sizes), seed=seed, lanes=lanes, window_blocks=window)
    n = order.num_samples
    ids = stream(order, batch_size, 3 * n)
    for epoch in range(3):
        assert sorted(ids[epoch * n : (epoch + 1) * n]) == list(range(n))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**40), step=st.integers(0, 500), lanes=st.sampled_from([1, 2, 4, 6]))
def test_any_number_of_ranks_reads_the_same_global_batch(seed: int, step: int, lanes: int) -> None:
    sizes = np.array([5, 1, 7, 3, 3, 8, 2])
    order = SampleOrder(sizes, seed=seed, lanes=lanes, window_blocks=2)
    whole = order.batch(step, 12)
    for ranks in (1, 2, 3, 4, 6, 12):
        parts = [order.rank_batch(step, 12, rank, ranks) for rank in range(ranks)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    fresh = SampleOrder(sizes, seed=seed, lanes=lanes, window_blocks=2)
    np.testing.assert_array_equal(fresh.batch(step, 12), whole)  # random access equals sequential


def test_epochs_and_seeds_differ() -> None:
    sizes = np.full(20, 8)
    n = int(sizes.sum())
    order = SampleOrder(sizes, seed=0, lanes=4, window_blocks=2)
    ids = stream(order, 16, 2 * n)
    assert (ids[:n] != ids[n:]).mean() > 0.9
    other = stream(SampleOrder(sizes, seed=1, lanes=4, window_blocks=2), 16, n)
    assert (ids[:n] != other).mean() > 0.9


def test_a_rank_owns_whole_lanes_when_ranks_divide_lanes() -> None:
    order = SampleOrder(np.full(33, 5), seed=3, lanes=4, window_blocks=2)
    for rank in range(2):
        lanes = {w.lane for s in range(5) for w, _, _ in order.locate(order.positions(s, 8, rank, 2))}
        assert len(lanes) == 2


def test_next_window_walks_the_windows_that_the_positions_touch() -> None:
    order = SampleOrder(np.array([3, 5, 2, 7, 1, 4, 6]), seed=5, lanes=2, window_blocks=2)
    for group in range(2):
        positions = np.arange(group, 6 * order.num_samples, 2)
        touched = sorted(order.locate(positions), key=lambda found: int(positions[found[1][0]]))
        windows = [w for w, _, _ in touched]
        for earlier, later in itertools.pairwise(windows):
            assert order.next_window(earlier) == later


def test_frozen_table_guards_against_silent_change() -> None:
    """These ids were written down when ORDER_VERSION became 1; a change here breaks every run that resumes."""
    order = SampleOrder(np.array([4, 4, 4, 3]), seed=7, lanes=3, window_blocks=2)
    assert stream(order, 3, 30).tolist() == FROZEN


FROZEN = [4, 1, 13, 11, 0, 2, 10, 7, 12, 9, 6, 3, 8, 5, 14, 9, 7, 1, 10, 13, 14, 11, 6, 0, 8, 12, 2, 4, 5, 3]


@pytest.mark.parametrize(
    ("sizes", "lanes", "window", "message"),
    [
        ([], 1, 1, "non-empty"),
        ([3, 0], 1, 1, "1 or more"),
        ([3], 4, 1, "lanes is 4"),
        ([3], 0, 1, "lanes is 0"),
        ([3], 1, 0, "window_blocks is 0"),
    ],
)
def test_bad_sizes_are_refused(sizes: list[int], lanes: int, window: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SampleOrder(np.array(sizes, dtype=np.int64), seed=0, lanes=lanes, window_blocks=window)


def test_batch_must_be_a_multiple_of_lanes_and_of_ranks() -> None:
    order = SampleOrder(np.full(4, 4), seed=0, lanes=4, window_blocks=1)
    with pytest.raises(ValueError, match="multiples of lanes"):
        order.batch(0, 6)
    with pytest.raises(ValueError, match="does not fit"):
        order.rank_batch(0, 8, 0, 3)
