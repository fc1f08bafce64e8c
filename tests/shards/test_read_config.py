"""What reading is configured by."""

import pytest

from shards.errors import UserError
from shards.read_config import ReadConfig


@pytest.mark.parametrize("values", [{"connections": 0}, {"hedge_share": -0.1}, {"hedge_share": 1.1}])
def test_impossible_values_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"is .*; allowed: (1 or more|0 \(none\) to 1)$"):
        ReadConfig(**values)  # type: ignore[arg-type]
