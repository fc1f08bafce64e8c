"""The order is exact: every epoch is a permutation, any number of ranks gets the same batches, nothing is
precomputed."""

import itertools
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shards.errors import UserError
from shards.hashing import hash_order
from shards.order import (
    MIXING_VERSION,
    ORDER_VERSION,
    Mixture,
    SampleOrder,
    WindowId,
    quotas,
    repeated,
    seed_of_repeat,
)

CHECKOUT = Path(__file__).resolve().parents[2]
SMALL = "4 1 13 11 0 2 10 7 12 9 6 3 8 5 14 9 7 1 10 13 14 11 6 0 8 12 2 4 5 3"
UNEVEN = """
30 36 23 43 8 17 1 2 29 33 25 24 11 7 3 0 37 32 40 45 9 16 4 27 34 38 42 46 18 12 28 49 35 31 47 41 10 15 39 50 21
20 26 48 5 13 51 53 22 19 44 6 14 23 52 33 10 12 48 47 39 21 34 5 7 11 43 36 19 20 31 32 9 8 38 45 26 22 0 3 28 27
41 46 25 24 16 1 53 49 40 44 15 29 17 2 52 51 35 42 13 14 4 18 50 16 37 38 30 33 6 15 10 9 35 36 29 34 13 46 8 12
53 37 30 31 47 14 17 11 22 19 39 32 48 1 6 7 20 23 41 45 28 27 18 51 5 24 42 43 3 4 50 49 26 25 40 44 2 0 52 9 21
26 48 42 3 16 11 24 5 29 46 28 17 18 25 10 30 52 45 40 4 37 20 7 34 51 44 47 36 38 12 21 53 33 41 27 35 39 22 23 50
49 43 0 15 13 8 19 31 32 2 1 6 14 1 37 51 49 48 47 23 26 0 4 12 50 15 13 21 27 2 35 53 52 14 32 22 24 38 3 11 45 31
33 25 28 36 9 40 42 30 20 16 18 8 10 41 44 29 19 17 5 7 6 43 46 34 12 39 14 35 25 46 48 3 7 15 34 36 26 52 50 11 2
29 33 37 38 45 51 0 10 32 31 41 43 47 49 8 9 30 21
"""
HUGE = """
import json, time
import numpy as np
from shards.order import SampleOrder
sizes = np.full(303_000_000 // 64, 64, dtype=np.int64)
began = time.process_time()
order = SampleOrder(sizes, seed=0, lanes=64, window_blocks=4)
num_ids = np.unique(order.batch(500_000, 4096)).size
cpu_seconds = time.process_time() - began
began = time.process_time()
for step in range(500_001, 500_011):
    order.batch(step, 4096)
later_seconds = (time.process_time() - began) / 10
status = open("/proc/self/status").read()  # ru_maxrss would be at least that of the process which started this one
peak_bytes = int(status.split("VmHWM:")[1].split()[0]) * 1024
print(json.dumps([num_ids, cpu_seconds, later_seconds, peak_bytes]))
"""
SEEDS = st.integers(0, 2**40)
QUOTAS = st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple)
DATASETS = "0 0 1 0 0 1 0 2 1 0 2 1 0 0 1 0 0 1 0 0 1 0 0 1 0 2 1 0 2 1 0 0 1 0 0 1"
POSITIONS = "0 1 0 3 2 1 4 1 2 5 0 3 6 7 4 9 8 5 10 11 6 13 12 7 14 3 8 15 2 9 16 17 10 19 18 11"


def stream(order: SampleOrder, batch_size: int, num_positions: int) -> NDArray[np.int64]:
    """Sample ids in order of global position, read through batches."""
    ids = np.full(num_positions + batch_size, -1, dtype=np.int64)
    for step in range(num_positions // batch_size + 1):
        ids[order.positions(step, batch_size, 0, 1)] = order.batch(step, batch_size)
    return ids[:num_positions]


@settings(max_examples=60)
@given(data=st.data(), seed=st.integers(0, 2**40), lanes=st.integers(1, 6), window=st.integers(1, 4))
def test_every_epoch_is_an_exact_permutation(data: st.DataObject, seed: int, lanes: int, window: int) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=14).filter(lambda s: sum(s) >= lanes))
    batch_size = lanes * data.draw(st.integers(1, 5))
    order = SampleOrder(np.array(sizes), seed=seed, lanes=lanes, window_blocks=window)
    n = order.num_samples
    ids = stream(order, batch_size, 3 * n)
    for epoch in range(3):
        assert sorted(ids[epoch * n : (epoch + 1) * n]) == list(range(n))


@settings(max_examples=40)
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


@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 2**40), lanes=st.integers(1, 6), window=st.integers(1, 4))
def test_any_number_of_ranks_from_any_step(data: st.DataObject, seed: int, lanes: int, window: int) -> None:
    """Uneven blocks, N divisible by nothing, all numbers of ranks, positions one by one and in any order."""
    sizes = np.array(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=14).filter(lambda s: sum(s) >= lanes)))
    batch_size, step = lanes * data.draw(st.integers(1, 6)), data.draw(st.integers(0, 10**9))
    order = SampleOrder(sizes, seed=seed, lanes=lanes, window_blocks=window)
    whole, positions = order.batch(step, batch_size), order.positions(step, batch_size, 0, 1)
    assert sorted(positions.tolist()) == list(range(step * batch_size, (step + 1) * batch_size))
    for ranks in (ranks for ranks in range(1, batch_size + 1) if batch_size % ranks == 0):
        parts = [order.rank_batch(step, batch_size, rank, ranks) for rank in range(ranks)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    shuffled = data.draw(st.permutations(range(batch_size)))
    fresh = SampleOrder(sizes, seed=seed, lanes=lanes, window_blocks=window)
    assert [int(fresh.at(positions[[entry]])[0]) for entry in shuffled] == whole[shuffled].tolist()


@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 2**40), lanes=st.integers(1, 4))
def test_batches_run_on_across_the_end_of_an_epoch(data: st.DataObject, seed: int, lanes: int) -> None:
    """No sample is dropped, repeated or padded there, for any batch size, even one larger than the dataset."""
    sizes = np.array(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6).filter(lambda s: sum(s) >= lanes)))
    batch_size = lanes * data.draw(st.integers(1, 20))
    order = SampleOrder(sizes, seed=seed, lanes=lanes, window_blocks=2)
    n, epoch = order.num_samples, data.draw(st.integers(0, 10**6))
    first, last = epoch * n // batch_size, ((epoch + 1) * n - 1) // batch_size
    positions = np.concatenate([order.positions(step, batch_size, 0, 1) for step in range(first, last + 1)])
    ids = np.concatenate([order.batch(step, batch_size) for step in range(first, last + 1)])
    assert sorted(ids[positions // n == epoch].tolist()) == list(range(n))


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


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_no_rank_reads_ahead_what_another_reads_nor_beyond_the_end_of_an_epoch(num_ranks: int) -> None:
    """With lanes that the ranks divide, each window is one rank's, though the lanes rotate from epoch to epoch."""
    order = SampleOrder(np.array([3, 5, 2, 7, 1, 4, 6] * 5), seed=5, lanes=6, window_blocks=2)
    assert order.num_samples % order.lanes  # so that lanes rotate
    steps = range(3 * order.num_samples // 12)
    of_ranks = []
    for rank in range(num_ranks):
        read = {w for step in steps for w, _, _ in order.locate(order.positions(step, 12, rank, num_ranks))}
        of_ranks.append(read | {order.next_window(window) for window in read})
    assert sum(map(len, of_ranks)) == len(set().union(*of_ranks))


def test_frozen_tables_guard_against_silent_change() -> None:
    """These ids are those of ORDER_VERSION 1; a change here breaks every run that resumes."""
    assert ORDER_VERSION == 1
    order = SampleOrder(np.array([4, 4, 4, 3]), seed=7, lanes=3, window_blocks=2)
    assert stream(order, 3, 30).tolist() == [int(number) for number in SMALL.split()]
    order = SampleOrder(np.array([5, 1, 7, 3, 3, 8, 2, 6, 4, 1, 9, 5]), seed=2026, lanes=4, window_blocks=2)
    ids = np.concatenate([order.batch(step, 8) for step in range(38)])
    assert ids.tolist() == [int(number) for number in UNEVEN.split()]


def test_batch_must_be_a_multiple_of_lanes_and_of_ranks() -> None:
    order = SampleOrder(np.full(4, 4), seed=0, lanes=4, window_blocks=1)
    with pytest.raises(ValueError, match="multiples of lanes"):
        order.batch(0, 6)
    with pytest.raises(ValueError, match="does not fit"):
        order.rank_batch(0, 8, 0, 3)


def test_303_million_samples_need_two_seconds_and_500_mb() -> None:
    """Measured by the process itself, in CPU time, because the machine may be busy."""
    done = subprocess.run([sys.executable, "-c", HUGE], capture_output=True, text=True, check=True, cwd=CHECKOUT)
    num_ids, cpu_seconds, later_seconds, peak_bytes = json.loads(done.stdout)
    assert num_ids == 4096
    assert cpu_seconds < 2
    assert later_seconds < 0.02
    assert peak_bytes < 500e6


@pytest.mark.parametrize("step", [-1, 2**63 // 12 - 1, 2**63, 10**30])
def test_a_step_without_positions_is_refused(step: int) -> None:
    order = SampleOrder(np.full(5, 3), seed=0, lanes=2, window_blocks=1)
    last = (2**63 - 1) // 12 - 1
    assert order.positions(last, 12, 0, 1).min() == 12 * last
    if step != last:
        with pytest.raises(ValueError, match=rf"step is {step}; allowed: 0 to {last} with a batch of 12"):
            order.positions(step, 12, 0, 1)


def test_nobody_waits_for_an_epoch_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing one epoch blocks neither another epoch nor a second computation of the same one."""
    order = SampleOrder(np.full(5, 3), seed=0, lanes=2, window_blocks=1)
    first, begun, gate = order.batch(0, 12).tolist(), threading.Event(), threading.Event()
    made: list[int] = []

    def slow(num_values: int, *, key: int) -> NDArray[np.int64]:
        made.append(1)
        begun.set()
        assert gate.wait(60)
        return hash_order(num_values, key=key)

    monkeypatch.setattr("shards.order.hash_order", slow)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(order.window_slices, WindowId(epoch=1, lane=0, window=0)) for _ in range(2)]
        assert begun.wait(60)
        assert order.locate(order.positions(0, 12, 0, 1))
        assert not any(future.done() for future in waiting)
        gate.set()
        assert waiting[0].result(60) == waiting[1].result(60)
    assert made == [1]
    assert order.batch(0, 12).tolist() == first


def test_any_thread_may_ask_for_any_batch() -> None:
    """Without the interpreter lock, one thread dropped the window that another was about to return."""
    order, steps = SampleOrder(np.full(64, 4), seed=1, lanes=1, window_blocks=1), range(64)
    expected, start = [order.batch(step, 4).tolist() for step in steps], threading.Barrier(4)

    def ask(thread: int) -> None:
        start.wait(60)
        for number in range(16 * len(steps)):
            step = (7 * number + 13 * thread) % len(steps)
            assert order.batch(step, 4).tolist() == expected[step]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))


def test_an_epoch_that_can_not_be_made_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    order = SampleOrder(np.full(5, 3), seed=0, lanes=2, window_blocks=1)
    with monkeypatch.context() as patch:
        patch.setattr("shards.order.np.argsort", lambda *_, **__: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            order.batch(0, 12)
    assert order.batch(0, 12).size == 12


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


def test_frozen_table_guards_against_silent_change() -> None:
    """These values are those of MIXING_VERSION 1; a change here breaks every run that resumes."""
    assert MIXING_VERSION == 1
    dataset, own = Mixture((5, 3, 1), seed=7, lanes=2).split(np.arange(36))
    assert dataset.tolist() == [int(number) for number in DATASETS.split()]
    assert own.tolist() == [int(number) for number in POSITIONS.split()]


@settings(max_examples=40)
@given(
    seed=SEEDS, repeats=st.integers(1, 5), lanes=st.integers(1, 4), per_lane=st.integers(1, 12), ranks=st.integers(1, 3)
)
def test_repeats_are_in_one_batch_or_in_two_that_follow_each_other(
    seed: int, repeats: int, lanes: int, per_lane: int, ranks: int
) -> None:
    """Each position of the order comes exactly `repeats` times, each time as another repeat, in its own lane group and
    on any number of ranks. `return_later` tells which positions the next batch has again. Neighbours differ."""
    batch_size, steps = lanes * per_lane * ranks, 6
    order = SampleOrder(np.full(7, 5), seed=seed, lanes=lanes, window_blocks=2)
    drawn: dict[int, list[tuple[int, int]]] = {}
    for step in range(steps):
        parts = [
            repeated(
                order.positions(step, batch_size, rank, ranks),
                step=step,
                batch_size=batch_size,
                lanes=lanes,
                repeats=repeats,
            )
            for rank in range(ranks)
        ]
        positions, numbers = (np.concatenate([getattr(p, name) for p in parts]) for name in ("positions", "numbers"))
        later = np.concatenate([part.return_later for part in parts])
        plain = order.positions(step, batch_size, 0, 1)
        np.testing.assert_array_equal(positions % lanes, plain % lanes)
        if repeats == 1:
            np.testing.assert_array_equal(positions, plain)
        for position, number, returns in zip(positions.tolist(), numbers.tolist(), later.tolist(), strict=True):
            drawn.setdefault(position, []).append((step, number))
            missing = repeats - len(drawn[position])
            assert returns or missing < np.sum(positions == position), "what does not return is complete in this batch"
        if per_lane * ranks >= 2 * repeats:
            of_lanes = positions.reshape(lanes, -1)
            assert (of_lanes[:, 1:] != of_lanes[:, :-1]).all() or of_lanes.shape[1] == 1
    complete = {position: draws for position, draws in drawn.items() if len(draws) == repeats}
    assert sorted(drawn) == list(range(len(drawn))), "none is left out"
    assert len(drawn) - len(complete) <= lanes, "at most the last of each lane"
    for draws in complete.values():
        assert {number for _, number in draws} == set(range(repeats))
        assert max(draws)[0] - min(draws)[0] <= -(-repeats // (per_lane * ranks))


def test_the_first_repeat_is_augmented_as_without_repeats() -> None:
    assert seed_of_repeat(7, 0) == 7
    assert [seed_of_repeat(7, 1), seed_of_repeat(7, 2), seed_of_repeat(8, 1)] == [
        16504691568274487667,
        6180717963273275134,
        898207702655565450,
    ], "they decide the pixels of runs"
