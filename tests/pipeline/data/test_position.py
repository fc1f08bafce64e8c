"""A position is one value: it survives JSON, refuses what is none, and says what differs as values."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from pipeline.data.position import differences_of, is_of_decoder, position_from_json
from pipeline.data.skipped import StepRange
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"seed": "0"}, "seed: .*valid integer", id="a text for a number"),
        pytest.param({"seed": True}, "seed: .*valid integer", id="a truth value for a number"),
        pytest.param({"lanes": 8.0}, "lanes: .*valid integer", id="a float for a whole number"),
        pytest.param({"next_step": -1}, "next_step: .*greater than or equal to 0", id="before the beginning"),
        pytest.param({"augment": {"crop": None}}, "augment.crop", id="a setting of no value"),
        pytest.param({"dataset": ["ab", 3]}, "dataset", id="a fingerprint that is a number"),
        pytest.param({"later": 1}, "later: Unexpected", id="a field of another version"),
        pytest.param({"data_step": 4}, "data_step is 4; allowed: 5", id="a data step that does not follow"),
        pytest.param({"skipped": [{"first": 1, "end": 4}, {"first": 3, "end": 5}]}, "from 3 on", id="skipped twice"),
        pytest.param({"mixup": {1}}, "not JSON serializable", id="what JSON cannot hold"),
    ],
)
def test_what_is_none_is_a_value_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        position_from_json(HERE.to_json() | change)


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
