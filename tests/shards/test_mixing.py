"""Mixing is exact and a pure function: every period has its quotas, every dataset is in order, for any rank, from
any point."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shards.errors import UserError
from shards.order import MIXING_VERSION, Mixture, SampleOrder, quotas

SEEDS = st.integers(0, 2**40)
QUOTAS = st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        pytest.param([0.7, 0.3], (7, 3), id="as they are written, not as they are stored"),
        pytest.param([3, 1], (3, 1), id="integers"),
        pytest.param([6, 4, 2], (3, 2, 1), id="no common factor"),
        pytest.param(["0.25", "3/4"], (1, 3), id="text, and a fraction"),
        pytest.param([1e-3, 1.0], (1, 1000), id="far apart"),
        pytest.param([0.1], (1,), id="a single dataset"),
    ],
)
def test_weights_become_the_smallest_integers(weights: list[float | str], expected: tuple[int, ...]) -> None:
    assert quotas(weights) == expected


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        pytest.param([], "no weights", id="none"),
        pytest.param([1, 0], "the weight 0 cannot be mixed by; allowed: numbers above 0", id="zero"),
        pytest.param([1, -0.5], "the weight -0.5", id="negative"),
        pytest.param([float("nan")], "the weight nan", id="not a number"),
        pytest.param([1, float("inf")], "the weight inf", id="infinite"),
        pytest.param(["much"], "the weight 'much'", id="text"),
        pytest.param(["1/0"], "the weight '1/0'", id="no fraction"),
        pytest.param(
            [0.123456, 0.333333],
            r"0\.123456, 0\.333333 repeat only after 152,263 samples; allowed: 65,536; round them, .* 0\.270,",
            id="a period that is too long",
        ),
    ],
)
def test_weights_that_can_not_be_mixed_by_are_refused(weights: Sequence[float | str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        quotas(weights)


def test_the_longest_period_is_allowed_and_one_more_is_not() -> None:
    assert quotas([1, 65_535]) == (1, 65_535)
    with pytest.raises(UserError, match="only after 65,537 samples; allowed: 65,536"):
        quotas([1, 65_536])


def lane_stream(mixture: Mixture, group: int, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(dataset, own count) of a lane group's draws first .. first + count - 1."""
    dataset, own = mixture.split((first + np.arange(count)) * mixture.lanes + group)
    assert (own % mixture.lanes == group).all()
    return dataset, own // mixture.lanes


@settings(max_examples=60)
@given(shares=QUOTAS, seed=SEEDS, lanes=st.integers(1, 5), first=st.integers(0, 10**12))
def test_every_period_is_exact(shares: tuple[int, ...], seed: int, lanes: int, first: int) -> None:
    """Wherever the period starts."""
    mixture = Mixture(shares, seed=seed, lanes=lanes)
    for group in range(lanes):
        dataset, _ = lane_stream(mixture, group, first, 2 * mixture.period)
        for begin in range(mixture.period + 1):
            counts = np.bincount(dataset[begin : begin + mixture.period], minlength=len(shares))
            assert tuple(counts) == shares


@settings(max_examples=60)
@given(shares=QUOTAS, seed=SEEDS, lanes=st.integers(1, 5))
def test_every_dataset_is_read_in_its_own_order(shares: tuple[int, ...], seed: int, lanes: int) -> None:
    """Per lane group 0, 1, 2, ... without gaps or repeats."""
    mixture = Mixture(shares, seed=seed, lanes=lanes)
    for group in range(lanes):
        dataset, own = lane_stream(mixture, group, 0, 3 * mixture.period + 1)
        for number in range(len(shares)):
            assert own[dataset == number].tolist() == list(range(int((dataset == number).sum())))


@settings(max_examples=60)
@given(shares=QUOTAS, seed=SEEDS, lanes=st.integers(1, 5))
def test_draws_are_spread_evenly(shares: tuple[int, ...], seed: int, lanes: int) -> None:
    """After any number of draws, every dataset is less than D draws from its exact share."""
    mixture = Mixture(shares, seed=seed, lanes=lanes)
    dataset, _ = lane_stream(mixture, 0, 0, 2 * mixture.period)
    drawn = np.cumsum(dataset[:, None] == np.arange(len(shares)), axis=0)
    due = np.arange(1, dataset.size + 1)[:, None] * np.array(shares) / mixture.period
    assert np.abs(drawn - due).max() < max(2, len(shares))


@settings(max_examples=60)
@given(shares=QUOTAS, seed=SEEDS, data=st.data())
def test_any_access_and_any_rank_gives_the_same(shares: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    lanes, members = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    batch, step = lanes * members, data.draw(st.integers(0, 10**6))
    mixture = Mixture(shares, seed=seed, lanes=lanes)
    order = SampleOrder(np.full(10, 4), seed=seed, lanes=lanes, window_blocks=2)
    whole = mixture.split(order.positions(step, batch, 0, 1))
    for ranks in (ranks for ranks in range(1, batch + 1) if batch % ranks == 0):
        parts = [mixture.split(order.positions(step, batch, rank, ranks)) for rank in range(ranks)]
        for number in range(2):
            np.testing.assert_array_equal(np.concatenate([part[number] for part in parts]), whole[number])
    resumed = Mixture(shares, seed=seed, lanes=lanes)
    singles = [resumed.split(order.positions(step, batch, 0, 1)[[entry]]) for entry in reversed(range(batch))]
    np.testing.assert_array_equal(np.concatenate([dataset for dataset, _ in reversed(singles)]), whole[0])
    np.testing.assert_array_equal(np.concatenate([own for _, own in reversed(singles)]), whole[1])


@settings(max_examples=30)
@given(seed=SEEDS, shares=st.tuples(st.integers(1, 5), st.integers(1, 5)), lanes=st.integers(1, 3))
def test_every_epoch_of_every_dataset_is_a_permutation(seed: int, shares: tuple[int, int], lanes: int) -> None:
    """Combined with the order: a dataset's own positions are positions in its own SampleOrder."""
    sizes = ([3, 5, 2, 4], [2, 2, 3])
    orders = [SampleOrder(np.array(s), seed=seed, lanes=lanes, window_blocks=2) for s in sizes]
    mixture = Mixture(shares, seed=seed, lanes=lanes)
    epochs = 2
    rounds = max(-(-epochs * order.num_samples // (quota * lanes)) for order, quota in zip(orders, shares, strict=True))
    dataset, own = mixture.split(np.arange((rounds + 1) * mixture.period * lanes))
    for number, order in enumerate(orders):
        positions, n = own[dataset == number], order.num_samples
        ids = order.at(positions)
        for epoch in range(epochs):
            of_epoch = ids[positions // n == epoch]
            assert sorted(of_epoch.tolist()) == list(range(n))


def test_lane_groups_are_not_in_step() -> None:
    """Otherwise a batch would have all its samples of a rare dataset at once."""
    mixture = Mixture((63, 1), seed=0, lanes=64)
    dataset, _ = mixture.split(np.arange(64 * 64))
    a_draw = dataset.reshape(64, 64).sum(axis=1)  # of the rare dataset, over the lanes
    assert a_draw.sum() == 64
    assert a_draw.max() <= 6


def test_seeds_differ() -> None:
    positions = np.arange(1000)
    first, second = (Mixture((5, 3), seed=seed, lanes=8).split(positions)[0] for seed in (0, 1))
    assert (first != second).mean() > 0.2


@pytest.mark.parametrize(
    ("shares", "lanes", "message"),
    [((), 1, "quotas are"), ((1, 0), 1, "quotas are"), ((1,), 0, "lanes is 0")],
)
def test_wrong_quotas_are_refused(shares: tuple[int, ...], lanes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixture(shares, seed=0, lanes=lanes)


def test_frozen_table_guards_against_silent_change() -> None:
    """These values are those of MIXING_VERSION 1; a change here breaks every run that resumes."""
    assert MIXING_VERSION == 1
    dataset, own = Mixture((5, 3, 1), seed=7, lanes=2).split(np.arange(36))
    assert dataset.tolist() == [int(number) for number in DATASETS.split()]
    assert own.tolist() == [int(number) for number in POSITIONS.split()]


DATASETS = "0 0 1 0 0 1 0 2 1 0 2 1 0 0 1 0 0 1 0 0 1 0 0 1 0 2 1 0 2 1 0 0 1 0 0 1"
POSITIONS = "0 1 0 3 2 1 4 1 2 5 0 3 6 7 4 9 8 5 10 11 6 13 12 7 14 3 8 15 2 9 16 17 10 19 18 11"
