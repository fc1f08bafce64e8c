"""Sizes that cannot work are refused when they are given."""

from dataclasses import replace
from typing import Any

import pytest

from pipeline.data.config import DataConfig
from shards.errors import UserError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lanes": 0}, "must be 1 or more"),
        ({"window_blocks": 0}, "must be 1 or more"),
        ({"steps_ahead": 0}, "must be 1 or more"),
        ({"num_threads": -1}, "must be 1 or more"),
        ({"max_quarantined": 1.5}, "max_quarantined is 1.5; allowed is a share"),
        ({"mix": (("b", 1.0),)}, "url a and a mix of 1; give one of the two"),
    ],
)
def test_what_can_not_work_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(DataConfig(url="a"), **change)
