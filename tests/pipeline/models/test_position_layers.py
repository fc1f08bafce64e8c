"""Positions inside the layers; test_vit.py compares whole models with NumPy."""

import numpy as np
import pytest
import torch

from pipeline.models import ModelConfig, ViT, build_model
from pipeline.models.position_layers import Positions, RelativePositions, from_axes
from pipeline.models.vit import Block
from tests.pipeline.models.test_vit import TINY, random_images, random_model


def config_of(**fields: object) -> ModelConfig:
    return ModelConfig(**(TINY | fields))


@pytest.mark.parametrize("pooling", ["token", "average"])
def test_2d_positions_are_a_columns_and_a_rows(pooling: str) -> None:
    x_WD, y_HD = torch.randn(3, 4), torch.randn(2, 4)
    prefix = 1 if pooling == "token" else 0
    found = from_axes(x_WD, y_HD, num_prefix_tokens=prefix)
    assert found.shape == (1, prefix + 6, 8)
    assert not found[:, :prefix].any()
    for row, column in np.ndindex(2, 3):
        assert torch.equal(found[0, prefix + 3 * row + column], torch.cat([x_WD[column], y_HD[row]]))


@pytest.mark.parametrize("position", ["learned_1d", "learned_2d"])
def test_a_layers_own_positions_are_as_large_as_those_of_the_input(position: str) -> None:
    model = build_model(config_of(position=position, position_at="layers"), seed=3)
    assert isinstance(model, ViT)
    first, second = (block for block in model.blocks if isinstance(block, Block))
    assert isinstance(second.positions, Positions)
    own, at_input = second.positions(), model.embed.positions(model.config.grid)
    assert first.positions is None, "the first layer has those of the input"
    assert at_input is not None
    assert own.shape == at_input.shape
    assert not torch.equal(own, at_input)
    assert float(own.detach().std()) == pytest.approx(float(at_input.detach().std()), rel=0.3)


def test_relative_logits_depend_on_the_distance_alone() -> None:
    relative = RelativePositions(config_of(position="relative"))
    torch.nn.init.normal_(relative.relative)
    q_BhNd = torch.randn(1, 3, 1, 8).expand(2, 3, 10, 8)  # the same query at every place
    logits = relative(q_BhNd)
    assert logits.shape == (2, 3, 10, 10)
    for distance in range(-9, 10):
        diagonal = logits.diagonal(-distance, dim1=-2, dim2=-1)
        torch.testing.assert_close(diagonal, diagonal[..., :1].expand_as(diagonal))
    expected = q_BhNd[0, 1, 0] @ relative.relative[3 + 9, 8:16] / 8**0.5
    torch.testing.assert_close(logits[0, 1, 5, 2], expected)


def test_relative_positions_are_of_one_size_of_image() -> None:
    model = random_model(position="relative")
    with pytest.raises(ValueError, match=r"5 tokens; relative positions are of 10: give images of one size"):
        model(random_images(size=8))


def test_the_same_positions_at_each_layer_are_resampled_for_another_grid() -> None:
    model = random_model(position_at="layers_shared")
    assert model(random_images(size=20)).shape == (3, 5)
