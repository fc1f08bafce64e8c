"""The sizes that a config.json declares beside weights."""

from typing import Any

import pytest

from pipeline.models.conversion.declared import grid_of, pair_of
from shards.errors import UserError


@pytest.mark.parametrize(("value", "expected"), [(48, (48, 48)), ([48, 64], (48, 64)), ((8, 8), (8, 8))])
def test_one_number_or_two(value: Any, expected: tuple[int, int]) -> None:
    assert pair_of(value, key="image_size", where="w") == expected


@pytest.mark.parametrize("value", [True, "48", 0, -3, [48], [48, True], [1, 2, 3], 48.0, {}, [0, 4]])
def test_what_is_no_size_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"config.json beside 'w' says image_size .*; allowed:"):
        pair_of(value, key="image_size", where="w")


@pytest.mark.parametrize(
    ("image", "patch", "expected"),
    [((48, 64), (8, 8), (6, 8)), ((50, 50), (8, 8), (6, 6)), ((16, 16), (16, 8), (1, 2))],
)
def test_the_grid(image: tuple[int, int], patch: tuple[int, int], expected: tuple[int, int]) -> None:
    assert grid_of(image, patch) == expected
