"""Changes that no weights can have are refused before any weights are opened."""

import pytest

from pipeline.models.conversion.config import Change
from shards.errors import UserError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"new_head": True, "num_classes": 0}, "^num_classes is 0; allowed: 1 or more", id="no class"),
        pytest.param({"num_classes": -1}, "^num_classes is -1; allowed: 1 or more", id="less than none"),
        pytest.param({"image_size": 0}, "^image_size is 0; allowed: 1 or more, or none", id="no image"),
    ],
)
def test_changes_that_cannot_be(fields: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Change(**fields)  # type: ignore[arg-type]
