"""Principal components of filters against NumPy, and of filters whose components are known."""

import numpy as np
import pytest
import torch

from pipeline.inspection.filters import patch_filters, principal_components
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
