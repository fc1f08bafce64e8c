"""Tiles of similarities are at their patches' places, and the picture has their colours."""

import numpy as np
import pytest
import torch

from pipeline.models.position_similarity import LEAST_SIDE, MOST_SIDE, levels, picture, similarities


def test_similarities_are_cosines_of_every_pair() -> None:
    table_ND = torch.randn(1 + 6, 5, generator=torch.Generator().manual_seed(0))
    found_TUHW = similarities(table_ND, grid=(2, 3))
    grid = table_ND[1:].double().numpy()
    unit = grid / np.linalg.norm(grid, axis=1, keepdims=True)
    assert found_TUHW.shape == (2, 3, 2, 3)
    assert np.allclose(found_TUHW.numpy(), (unit @ unit.T).reshape(2, 3, 2, 3), atol=1e-6)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_positions_without_a_direction_are_similar_to_nothing(value: float) -> None:
    """Zeros, and those of a run whose weights are lost."""
    table_ND = torch.ones(4, 2)
    table_ND[3] = value
    assert torch.equal(similarities(table_ND, grid=(2, 2))[1, 1], torch.zeros(2, 2))


def test_a_picture_has_a_tile_for_each_patch_with_gaps() -> None:
    level_TUHW = levels(torch.tensor([-1.0, 0.0, 1.0])).repeat(2, 1, 2, 1)  # 2 x 1 tiles of 2 x 3 patches
    found = picture(level_TUHW)
    pixels = LEAST_SIDE // 4  # for each value: two tiles of two patches are the longest side
    assert found.shape == (4 * pixels + 2, 3 * pixels, 3)
    assert found.dtype == torch.uint8
    colours = found[0, ::pixels].tolist()
    assert (colours[0], colours[2]) == ([68, 1, 84], [253, 231, 37])
    assert sum(colours[0]) < sum(colours[1]) < sum(colours[2]), "brighter is more similar"
    assert found[2 * pixels : 2 * pixels + 2].eq(255).all()
    assert torch.equal(found[: 2 * pixels], found[2 * pixels + 2 :])


@pytest.mark.parametrize(
    ("grid", "tiles"), [((1, 1), (1, 1)), ((14, 14), (14, 14)), ((37, 37), (37, 37)), ((64, 40), (22, 14))]
)
def test_pictures_are_bounded(grid: tuple[int, int], tiles: tuple[int, int]) -> None:
    table_ND = torch.randn(1 + grid[0] * grid[1], 3, generator=torch.Generator().manual_seed(0))
    found_TUHW = similarities(table_ND, grid=grid)
    assert found_TUHW.shape == (*tiles, *grid)
    assert LEAST_SIDE // 2 <= max(picture(levels(found_TUHW)).shape) <= MOST_SIDE
