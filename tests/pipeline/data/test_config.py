"""Sizes and transforms that cannot work are refused when they are given."""

from dataclasses import replace
from typing import Any

import pytest

from pipeline.data.config import AugmentConfig, DataConfig
from pipeline.shared_settings import EvaluationTransform
from shards.errors import UserError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lanes": 0}, "data.lanes is 0; allowed: 1 or more$"),
        ({"window_blocks": 0}, "data.window_blocks is 0; allowed: 1 or more$"),
        ({"steps_ahead": 0}, "data.steps_ahead is 0; allowed: 1 or more$"),
        ({"num_threads": -1}, r"data.num_threads is -1; allowed: 0 \(the rank's share of the cores\) or more$"),
        ({"max_quarantined": 1.5}, "data.max_quarantined is 1.5; allowed: 0 to 1$"),
        ({"mix": (("b", 1.0), ("c", 0.0))}, "data.mix.1.1 is 0.0; allowed: above 0$"),
        ({"mix": (("b",),)}, "data.mix.0 has 1 entries; allowed: 2$"),
        ({"mix": [("b", 1.0)]}, r"data.mix is \[\('b', 1.0\)\]; allowed: a tuple$"),
        ({"mix": (("b", 1.0),)}, "url a and a mix of 1; give one of the two"),
    ],
)
def test_what_can_not_work_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(DataConfig(url="a"), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"resize_pixels": -1},
            r"^data.augment.resize_pixels is -1; allowed: 0 \(448/384 of the model's size\) or more$",
        ),
        ({"filter": "box"}, "^data.augment.filter is 'box'; allowed: "),
        ({"filter": "area", "antialias": True}, "^data.augment.antialias is on with data.augment.filter area"),
        ({"filter": "bicubic", "antialias": True}, "^data.augment.antialias is on with data.augment.filter bicubic"),
    ],
)
def test_an_augmentation_that_can_not_work_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        AugmentConfig(**change)


def test_a_negative_short_side_is_refused() -> None:
    with pytest.raises(UserError, match=r"short_side is -5; allowed: 0 \("):
        EvaluationTransform(mode="central_crop", short_side=-5)


def test_antialiasing_of_the_area_filter_is_refused() -> None:
    """It would do nothing, as in TensorFlow."""
    with pytest.raises(UserError, match=r"transform\.antialias is on with transform\.filter area, .*; switch "):
        EvaluationTransform(mode="central_crop", filter="area", antialias=True)
