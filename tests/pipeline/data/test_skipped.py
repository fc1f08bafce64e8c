"""Steps and data steps: what is skipped is never taken, everything else once and in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.skipped import Skipped, StepRange, data_step_of, joined, range_around, refuse_disorder, step_of


def ranges(*pairs: tuple[int, int]) -> Skipped:
    return tuple(StepRange(first=first, end=end) for first, end in pairs)


@st.composite
def some_skipped(draw: st.DrawFn) -> Skipped:
    """Ranges in order; neighbours may touch."""
    at, found = 0, []
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), max_size=5)):
        found.append((at + gap, at + gap + length))
        at += gap + length
    return ranges(*found)


@given(some_skipped())
def test_steps_take_what_is_left_in_order(skipped: Skipped) -> None:
    out = {step for one in skipped for step in range(one.first, one.end)}
    left = [step for step in range(100) if step not in out]
    assert [data_step_of(step, skipped) for step in range(len(left))] == left
    assert [step_of(data_step, skipped) for data_step in left] == list(range(len(left)))


@given(some_skipped(), st.integers(0, 80), st.integers(1, 9))
def test_a_range_holds_its_step_and_overlaps_no_other(skipped: Skipped, step: int, length: int) -> None:
    data_step = data_step_of(step, skipped)
    found = range_around(data_step, length=length, skipped=skipped)
    assert found.first <= data_step < found.end <= found.first + length
    together = joined(skipped, (found,), since=0)
    assert found in together
    refuse_disorder(together)


@pytest.mark.parametrize(
    ("data_step", "length", "skipped", "expected"),
    [
        pytest.param(10, 1, (), (10, 11), id="its own step alone"),
        pytest.param(10, 8, (), (6, 14), id="half before it"),
        pytest.param(10, 5, (), (8, 13), id="an odd number has it in the middle"),
        pytest.param(1, 8, (), (0, 5), id="nothing before the beginning"),
        pytest.param(10, 8, ((2, 9),), (9, 14), id="what is skipped before it stays as it is"),
        pytest.param(10, 8, ((12, 20),), (6, 12), id="what is skipped after it stays as it is"),
    ],
)
def test_where_a_range_is(
    data_step: int, length: int, skipped: tuple[tuple[int, int], ...], expected: tuple[int, int]
) -> None:
    found = range_around(data_step, length=length, skipped=ranges(*skipped))
    assert (found.first, found.end) == expected


def test_what_others_recorded_counts_from_a_step_on() -> None:
    assert joined(ranges((2, 4)), ranges((2, 4), (6, 7), (20, 30)), since=10) == ranges((2, 4), (20, 30))
    assert joined(ranges((2, 4)), ranges((3, 9), (4, 5)), since=0) == ranges((2, 4), (4, 5)), "what overlaps is left"


def test_what_overlaps_is_refused() -> None:
    refuse_disorder(ranges((2, 4), (4, 9)))
    with pytest.raises(ValueError, match="from 3 on follow those to 3"):
        refuse_disorder(ranges((2, 4), (3, 9)))


@pytest.mark.parametrize(("first", "end"), [(3, 3), (4, 2), (-1, 2)])
def test_an_empty_range_is_none(first: int, end: int) -> None:
    with pytest.raises(ValueError, match="allowed: one or more, from 0 on"):
        StepRange(first=first, end=end)
