import pytest

from pipeline.evaluation_transform import EvaluationTransform
from shards.errors import UserError


def test_a_negative_short_side_is_refused() -> None:
    with pytest.raises(UserError, match=r"short_side is -5; allowed: 0 \("):
        EvaluationTransform(mode="central_crop", short_side=-5)
