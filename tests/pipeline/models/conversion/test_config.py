"""Changes that no weights can have are refused before any weights are opened."""

import pytest

from pipeline.models.conversion.config import Change
from shards.errors import UserError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param(
            {"new_head": True, "num_classes": 0}, "^num_classes is 0; allowed: 1 to 10,000,000", id="no class"
        ),
        pytest.param({"num_classes": -1}, "^num_classes is -1; allowed: 1 to", id="less than none"),
        pytest.param({"image_size": 0}, "^image_size is 0; allowed: 1 to 16,384, or none", id="no image"),
        pytest.param({"new_head": True, "num_classes": 10**12}, "^num_classes is 1000000000000; allowed", id="absurd"),
        pytest.param({"image_size": 10**9}, "^image_size is 1000000000; allowed", id="absurd pixels"),
    ],
)
def test_changes_that_cannot_be(fields: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Change(**fields)  # type: ignore[arg-type]
