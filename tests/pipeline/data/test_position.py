"""A position survives JSON, refuses what is none, and lists differences; skipped data steps are never taken."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.position import (
    Skipped,
    StepRange,
    data_step_of,
    differences_of,
    is_of_decoder,
    joined,
    position_from_json,
    range_around,
    refuse_disorder,
    step_of,
)
from shards.config_values import Difference
from tests.rigs.positions import position_at

HERE = position_at(5)
MIXED = replace(
    HERE,
    dataset=("ab", "cd"),
    randaugment={"num_ops": 2, "magnitude": 10, "version": 1},
    mixup={"alpha": 0.2, "version": 1},
    mix={"version": 1, "quotas": (3, 1)},
)
SKIPPED = HERE.at(5, skipped=(StepRange(first=1, end=3), StepRange(first=40, end=48)))


@pytest.mark.parametrize(
    "position", [HERE, MIXED, SKIPPED], ids=["one dataset", "a mix with everything on", "with data skipped"]
)
def test_it_survives_json(position: Any) -> None:
    plain = position.to_json()
    assert json.loads(json.dumps(plain)) == plain, "lists, no tuples"
    assert position_from_json(plain) == position


@pytest.mark.parametrize("name", [field.name for field in fields(HERE)])
def test_a_missing_field_is_a_value_error(name: str) -> None:
    plain = HERE.to_json()
    del plain[name]
    with pytest.raises(ValueError, match=f"{name}: Field required"):
        position_from_json(plain)


def test_what_differs_are_values_by_the_names_of_a_jobs_fields() -> None:
    now = replace(HERE.at(9), seed=2, lanes=4, decoder={"version": 3, "simplejpeg": "2"}, mixup={"alpha": 0.2})
    found = HERE.differences(now, allow_other_decoder=False)
    assert found == [
        Difference(field="seed", before=0, now=2),
        Difference(field="data.lanes", before=8, now=4),
        Difference(field="data.decoder.simplejpeg", before="1.9.0", now="2"),
        Difference(field="data.mixup.alpha", before=None, now=0.2),
    ]
    assert [is_of_decoder(change) for change in found] == [False, False, True, False]
    assert HERE.differences(now, allow_other_decoder=True) == [found[0], found[1], found[3]]


def test_where_it_stands_is_no_difference() -> None:
    for position in (HERE, SKIPPED):
        assert position.differences(position_at(0), allow_other_decoder=False) == []


def test_what_was_skipped_moves_the_data_and_not_the_step() -> None:
    assert (HERE.next_step, HERE.data_step) == (5, 5)
    assert (SKIPPED.next_step, SKIPPED.data_step) == (5, 7)
    assert SKIPPED.at(39).data_step == 49
    assert SKIPPED.at(39, skipped=()).data_step == 39


def test_plain_values_that_are_no_position_differ_by_name() -> None:
    stored = HERE.to_json() | {"gone": True}
    del stored["augment"], stored["seed"]
    assert [str(change) for change in differences_of(stored, HERE, allow_other_decoder=False)] == [
        "data.gone: before true, now none",
        "seed: before none, now 0",
        "data.augment.crop: before none, now inception",
        "data.augment.min_area: before none, now 0.05",
        "data.augment.flip: before none, now true",
        "data.augment.version: before none, now 2",
    ]


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
