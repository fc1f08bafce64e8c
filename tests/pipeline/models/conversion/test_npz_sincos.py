"""big_vision's sine-cosine table: known values, and the cases for which it is not defined."""

import math

import pytest
import torch

from pipeline.models.conversion.npz_sincos import TABLE, table_of, with_table
from pipeline.models.conversion.tensor_file import TensorFile
from shards.errors import UserError


def test_values_worked_out_by_hand() -> None:
    """Width 8 has two frequencies, 1 and 1 / 10000; the patch in row 1 and column 2 of 3 x 3 is the sixth."""
    table_1ND = table_of(3, 8)
    x, y = [2.0, 2e-4], [1.0, 1e-4]
    expected = [*map(math.sin, x), *map(math.cos, x), *map(math.sin, y), *map(math.cos, y)]
    assert table_1ND.shape == (1, 9, 8)
    assert torch.allclose(table_1ND[0, 5], torch.tensor(expected), atol=1e-7, rtol=0)


@pytest.mark.parametrize(("patch", "num_patches"), [(16, 14**2), (32, 7**2), (14, 16**2), (500, 1)])
def test_the_grid_is_that_of_224_px(patch: int, num_patches: int) -> None:
    shapes = {"embedding/kernel": (patch, patch, 3, 8)}
    file = with_table(TensorFile(where="w", shapes=shapes, read=lambda _: torch.zeros(0)))
    assert file.shapes[TABLE] == file.read(TABLE).shape == (1, num_patches, 8)
    assert file.read("embedding/kernel").shape == (0,)


@pytest.mark.parametrize("width", [4, 10])
def test_widths_without_a_table_are_named(width: int) -> None:
    file = TensorFile(where="w", shapes={"embedding/kernel": (16, 16, 3, width)}, read=lambda _: torch.zeros(0))
    with pytest.raises(UserError, match=f"its width {width} has no table of sines; allowed: multiples of 4"):
        with_table(file)
