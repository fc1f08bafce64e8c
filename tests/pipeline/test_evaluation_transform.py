import pytest

from pipeline.evaluation_transform import EvaluationTransform
from shards.errors import UserError


def test_a_negative_short_side_is_refused() -> None:
    with pytest.raises(UserError, match=r"short_side is -5; allowed: 0 \("):
        EvaluationTransform(mode="central_crop", short_side=-5)


def test_antialiasing_of_the_area_filter_is_refused() -> None:
    """It would do nothing, as in TensorFlow."""
    with pytest.raises(UserError, match=r"transform\.antialias is on with transform\.filter area, .*; switch "):
        EvaluationTransform(mode="central_crop", filter="area", antialias=True)
