"""The times of all ranks from one row of sums, and which ranks are named as slow, once each."""

from dataclasses import replace

import pytest

from pipeline.training.reporting.utilisation import NUM_WINDOWS, SLOW_FACTOR, SLOW_SECONDS, RankTimes, SlowRanks
from pipeline.training.zero.step_times import StepTimes
from tests.rigs.processes import one_world


class Told(StepTimes):
    """Steps with known times."""

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self._told = seconds

    def since_exchange(self) -> tuple[float, float, float]:
        wait, own, stall = self._told
        return wait, own, stall


def test_the_longest_of_each_kind_has_its_rank() -> None:
    told = [(0.1, 1.0, 0.0), (0.3, 1.2, 0.5), (0.2, 4.0, 0.0)]
    ranks = [RankTimes(Told(*own), replace(one_world(rank, 3), num_ranks=3), every=10) for rank, own in enumerate(told)]
    rows = [one.row() for one in ranks]
    assert [sum(value > 0 for value in row) for row in rows] == [2, 3, 2], "each fills its own places"
    sums = dict(zip(ranks[0].names, map(sum, zip(*rows, strict=True)), strict=True))
    assert ranks[2].values(sums) == {
        "ranks/data_wait": 0.3,
        "ranks/data_wait_rank": 1.0,
        "ranks/own_step": 4.0,
        "ranks/own_step_rank": 2.0,
        "ranks/own_step_median": 1.2,
        "ranks/checkpoint": 0.5,
        "ranks/checkpoint_rank": 1.0,
    }
    assert ranks[0].of("own_step", sums) == [1.0, 1.2, 4.0]
    assert [step for step in range(1, 31) if ranks[0].is_due(step)] == [10, 20, 30]
    assert ranks[0].values(dict.fromkeys(sums, 0.0)) == {}, "no step has ended"


def test_a_rank_that_is_alone_has_none() -> None:
    assert not RankTimes(StepTimes(), one_world(), every=1).is_due(1)


SLOW = SLOW_FACTOR * 1.01
EVEN, WINDOW = [1.0, 1.0, 1.0, 1.0], SLOW_SECONDS / NUM_WINDOWS


@pytest.mark.parametrize(
    ("windows", "expected"),  # own seconds of four ranks in windows of two lines
    [
        pytest.param([[1, 1, 1, SLOW]] * 12, {4: [3]}, id="once, after the time"),
        pytest.param([[1, 1, 1, 0.99 * SLOW_FACTOR]] * 12, {}, id="not more than the factor"),
        pytest.param([[1, 1, 1, SLOW]] * 4 + [EVEN] + [[1, 1, 1, SLOW]] * 4, {}, id="not for long"),
        pytest.param([[1, SLOW, 1, 9]] * 6, {4: [1, 3]}, id="two at once"),
        pytest.param([[1, 1, 1, 9]] * 6 + [[9, 1, 1, 1]] * 6, {4: [3], 10: [0]}, id="one after another"),
        pytest.param([[1, 1, 1, 900], *[EVEN] * 9], {}, id="one long step"),
        pytest.param([[0, 0, 0, 9]] * 9, {}, id="others of whom nothing is known"),
    ],
)
def test_slow_ranks_are_named_once(windows: list[list[float]], expected: dict[int, list[int]]) -> None:
    slow, found = SlowRanks(), {}
    for number, own in enumerate(windows):
        begin = 100 + number * 1.5 * WINDOW
        assert slow.newly_slow([0.9 * seconds for seconds in own], at=begin) == [], "a window lasts a while"
        if named := slow.newly_slow([1.1 * seconds for seconds in own], at=begin + WINDOW):
            found[number] = [one.rank for one in named]
            assert all(one.own_seconds == pytest.approx(own[one.rank]) for one in named)
            assert all(one.times == pytest.approx(own[one.rank]) for one in named), "the median is 1"
    assert found == expected
