"""Runs of sample ids against Python's own sets, and choices that are nested, exact and never change."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shards.part import Runs, between, chosen, cut, joined, per_class, single, without

MOST = 60


def array(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def runs_of(ids: set[int]) -> Runs:
    return joined(single(array(sorted(ids))))


sets = st.sets(st.integers(0, MOST - 1), min_size=1)


@given(ids=sets)
def test_runs_are_their_ids(ids: set[int]) -> None:
    runs, rising = runs_of(ids), sorted(ids)
    assert runs.ids().tolist() == rising
    assert runs.num_samples == len(ids)
    assert runs.at(np.arange(len(ids))).tolist() == rising
    assert runs.num_below(np.arange(MOST + 1)).tolist() == [sum(one < end for one in ids) for end in range(MOST + 1)]
    ends = runs.first + runs.count
    assert (runs.first[1:] > ends[:-1]).all()  # as few as possible


@given(ids=sets, size=st.integers(1, 9))
def test_runs_are_cut_at_blocks(ids: set[int], size: int) -> None:
    found = cut(runs_of(ids), np.arange(0, MOST, size))
    assert found.ids().tolist() == sorted(ids)
    assert (found.first // size == (found.first + found.count - 1) // size).all()


@given(ids=sets, others=sets)
def test_ids_are_taken_out(ids: set[int], others: set[int]) -> None:
    found = without(runs_of(ids), runs_of(ids & others))
    assert found.ids().tolist() == sorted(ids - others)


def blocks_of(ids: set[int], size: int) -> tuple[Runs, np.ndarray]:
    units = cut(runs_of(ids), np.arange(0, MOST, size))
    return units, units.first // size


@given(ids=sets, size=st.integers(1, 9), key=st.integers(0, 2**64 - 1), data=st.data())
def test_fewer_are_among_more(ids: set[int], size: int, key: int, data: st.DataObject) -> None:
    units, names = blocks_of(ids, size)
    more = data.draw(st.integers(1, len(ids)))
    fewer = data.draw(st.integers(1, more))
    found = [set(chosen(units, num, names=names, key=key).ids().tolist()) for num in (fewer, more)]
    assert [len(one) for one in found] == [fewer, more]
    assert found[0] <= found[1] <= ids


def test_only_one_block_is_cut() -> None:
    units, names = blocks_of(set(range(MOST)), 8)
    found = chosen(units, 21, names=names, key=5).ids()
    nums = np.bincount(found // 8)
    assert sorted(nums[nums > 0].tolist()) == [5, 8, 8]


def test_every_sample_is_chosen_equally_often() -> None:
    units, names = blocks_of(set(range(MOST)), 4)
    found = [chosen(units, 20, names=names, key=key).ids() for key in range(3000)]
    nums = np.bincount(np.concatenate(found), minlength=MOST)  # 1,000 each, deviation 26
    assert 870 < nums.min() < nums.max() < 1130


def test_the_choice_never_changes() -> None:
    units = single(np.arange(20))
    assert chosen(units, 5, names=units.first, key=1).ids().tolist() == CHOSEN
    labels = np.arange(20) % 2
    assert per_class(np.arange(20), labels, 2, key=1).tolist() == OF_CLASSES


CHOSEN = [0, 9, 11, 15, 16]
OF_CLASSES = [0, 9, 11, 16]


@given(seed=st.integers(0, 2**32), num_classes=st.integers(1, 5), most=st.integers(1, 6))
def test_each_class_has_as_many(seed: int, num_classes: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(num_classes), most + 2))
    ids = np.sort(rng.choice(1000, labels.size, replace=False))
    by_id = dict(zip(ids.tolist(), labels.tolist(), strict=True))
    more, fewer = (set(per_class(ids, labels, num, key=seed).tolist()) for num in (most, max(1, most - 1)))
    assert fewer <= more <= set(ids.tolist())
    assert np.bincount([by_id[one] for one in more]).tolist() == [most] * num_classes


def test_a_range() -> None:
    assert between(3, 6).ids().tolist() == [3, 4, 5]
