"""Filters have NumPy's principal components; tiles of similarities are at their patches' places, in their colours."""

import numpy as np
import pytest
import torch

from pipeline.inspection.weight_pictures import (
    LEAST_SIDE,
    MOST_SIDE,
    levels,
    patch_filters,
    picture,
    principal_components,
    similarities,
)
from tests.pipeline.models.test_vit import random_model


def test_components_are_those_of_numpys_covariance() -> None:
    filters = torch.randn(40, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    found = principal_components(filters, most=5)
    flat = filters.double().flatten(1).numpy()
    values, vectors = np.linalg.eigh(np.cov(flat.T))
    expected = vectors[:, ::-1][:, :5].T
    assert found.shares == pytest.approx((values[::-1] / values.sum())[:5])
    for one, other in zip(found.filters.flatten(1).numpy(), expected, strict=True):
        assert abs(one @ other) == pytest.approx(1.0, abs=1e-5)
        assert one[np.abs(one).argmax()] > 0


def test_known_components_are_found() -> None:
    """Filters made of an edge and a weaker colour, about a grey mean."""
    edge, colour = torch.zeros(4, 4, 3), torch.zeros(4, 4, 3)
    edge[:, :2], edge[:, 2:] = 1, -1
    colour[..., 0], colour[..., 2] = 1, -1
    edge, colour = edge / edge.norm(), colour / colour.norm()
    weights = torch.tensor([[3.0, 1.0], [-3.0, 1.0], [3.0, -1.0], [-3.0, -1.0]])
    found = principal_components(0.5 + torch.einsum("dk,kxyc->dxyc", weights, torch.stack([edge, colour])))
    assert found.shares == pytest.approx((0.9, 0.1, 0.0, 0.0), abs=1e-6)
    for one, expected in zip(found.filters, (edge, colour), strict=False):
        assert abs(float((one * expected).sum())) == pytest.approx(1.0, abs=1e-5)


def test_filters_without_variance_have_no_shares() -> None:
    assert set(principal_components(torch.ones(5, 2, 2, 3)).shares) == {0.0}


def test_a_filter_is_what_a_patch_is_multiplied_with() -> None:
    model = random_model()
    filters = patch_filters(model)
    assert filters is not None
    assert filters.shape == (24, 4, 4, 3)
    patch = torch.randn(4, 4, 3)
    expected = model.embed.patch.weight @ patch.reshape(-1)
    torch.testing.assert_close(torch.einsum("dxyc,xyc->d", filters, patch), expected.detach())


def test_a_hybrid_has_no_filters_of_pixels() -> None:
    model = random_model(patch=1, resnet_units=(1, 1), image_size=16)
    assert patch_filters(model) is None


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
