"""Resampled position embeddings are scipy.ndimage.zoom(order=1), as in the paper's code."""

import numpy as np
import pytest
import torch
from scipy.ndimage import zoom

from pipeline.models.pos_embed import resample_position_embeddings

WIDTH = 6


def table(grid: tuple[int, int], *, seed: int = 0) -> torch.Tensor:
    """float32[1 + height * width, D]."""
    return torch.randn(1 + grid[0] * grid[1], WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("from_grid", "to_grid"),
    [
        pytest.param((14, 14), (24, 24), id="B/16: 224 -> 384"),
        pytest.param((16, 16), (37, 37), id="H/14: 224 -> 518"),
        pytest.param((14, 14), (32, 32), id="L/16: 224 -> 512"),
        pytest.param((4, 4), (6, 6), id="the digits: 32 -> 48"),
        pytest.param((24, 24), (14, 14), id="back to a smaller grid"),
        pytest.param((7, 12), (10, 9), id="not square, and not the same way in both directions"),
        pytest.param((2, 2), (3, 3), id="a middle between four corners"),
    ],
)
def test_equal_to_scipys_zoom(from_grid: tuple[int, int], to_grid: tuple[int, int]) -> None:
    before = table(from_grid)
    grid = before[1:].reshape(*from_grid, WIDTH).double().numpy()
    factors = (to_grid[0] / from_grid[0], to_grid[1] / from_grid[1], 1)
    expected = zoom(grid, factors, order=1).reshape(-1, WIDTH)
    after = resample_position_embeddings(before, from_grid=from_grid, to_grid=to_grid)
    assert after.dtype == torch.float32
    assert after.shape == (1 + to_grid[0] * to_grid[1], WIDTH)
    np.testing.assert_allclose(after[1:].numpy(), expected, rtol=0, atol=1e-6)
    assert torch.equal(after[0], before[0]), "the class token has no place in the grid"


def test_corners_stay_where_they_are() -> None:
    before = table((5, 7))
    after = resample_position_embeddings(before, from_grid=(5, 7), to_grid=(9, 8))[1:].reshape(9, 8, WIDTH)
    grid = before[1:].reshape(5, 7, WIDTH)
    for corner in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
        torch.testing.assert_close(after[corner], grid[corner])


def test_the_same_grid_changes_no_bit() -> None:
    before = table((6, 6))
    assert torch.equal(resample_position_embeddings(before, from_grid=(6, 6), to_grid=(6, 6)), before)


def test_bf16_tables_come_back_as_fp32() -> None:
    before = table((3, 3)).bfloat16()
    assert resample_position_embeddings(before, from_grid=(3, 3), to_grid=(3, 3)).dtype == torch.float32
    assert resample_position_embeddings(before, from_grid=(3, 3), to_grid=(4, 4)).dtype == torch.float32


@pytest.mark.parametrize("num", [16, 18, 197])
def test_a_table_of_another_size_is_refused(num: int) -> None:
    with pytest.raises(ValueError, match=f"{num} position embeddings do not fit 1 \\+ 4 x 4"):
        resample_position_embeddings(torch.zeros(num, WIDTH), from_grid=(4, 4), to_grid=(6, 6))
