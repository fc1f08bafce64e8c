"""Axial attention (appendix D.6) where another model gives the answer; test_vit.py compares whole models with NumPy."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.models import ViT
from pipeline.models.masked import mean_colours
from pipeline.models.vit import AxialAttention, Block
from tests.pipeline.models.test_vit import AXIAL, random_images, random_model


def blocks(model: ViT) -> list[Block]:
    return [block for block in model.blocks if isinstance(block, Block)]


def test_each_layer_is_a_block_along_rows_and_one_along_columns() -> None:
    attentions = [block.attention for block in blocks(random_model(**AXIAL, depth=2))]
    assert [isinstance(one, AxialAttention) and one.by_column for one in attentions] == [False, True, False, True]


@pytest.mark.parametrize(
    ("number", "grid"), [pytest.param(0, (1, 5), id="a row"), pytest.param(1, (5, 1), id="a column")]
)
def test_on_a_single_line_it_is_global_attention(number: int, grid: tuple[int, int]) -> None:
    axial = random_model(**AXIAL, depth=1).double()
    block = blocks(axial)[number]
    everywhere = Block(replace(axial.config, attention="global")).double()
    everywhere.load_state_dict(block.state_dict())
    z_BND = torch.randn(2, 5, 24, dtype=torch.float64)
    torch.testing.assert_close(
        block(z_BND.reshape(2, *grid, 24)).flatten(1, 2), everywhere(z_BND), rtol=1e-12, atol=1e-12
    )


def test_columns_are_the_rows_of_the_transposed_grid() -> None:
    row, column = blocks(random_model(**AXIAL, depth=1))
    column.load_state_dict(row.state_dict())
    z_BHWD = torch.randn(2, 3, 5, 24)
    torch.testing.assert_close(column(z_BHWD), row(z_BHWD.transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize("number", [0, 1])
def test_a_block_mixes_no_tokens_of_different_lines(number: int) -> None:
    block = blocks(random_model(**AXIAL, depth=1))[number]
    z_BHWD = torch.randn(1, 3, 4, 24)
    other = z_BHWD.clone()
    other[0, 1, 2] += 1
    changed_HW = (block(z_BHWD) != block(other)).any(-1)[0]
    assert changed_HW[1].all() == (number == 0)
    assert changed_HW[:, 2].all() == (number == 1)
    assert changed_HW.sum() == (4 if number == 0 else 3)


@pytest.mark.parametrize(
    ("fields", "grid"),
    [
        pytest.param({}, (2, 4), id="ViT"),
        pytest.param({"image_size": 32, "patch": 2, "resnet_units": (1, 1)}, (1, 3), id="hybrid"),
    ],
)
def test_images_that_are_not_square(fields: dict[str, Any], grid: tuple[int, int]) -> None:
    """Rows come before columns, whatever the image."""
    model = random_model(**AXIAL, **fields)
    stride = model.config.stride
    images = random_images(size=64)[:, : grid[0] * stride, : grid[1] * stride]
    z_BHWD = model.embed(images)[0].reshape(3, *grid, 24)
    for block in blocks(model):
        z_BHWD = block(z_BHWD)
    assert torch.equal(model.tokens(images), z_BHWD.flatten(1, 2))


def test_masked_patches_and_stochastic_depth() -> None:
    masked = random_model(**AXIAL, masked_patches=True, num_classes=512)
    sources = torch.arange(9).expand(3, -1)
    logits = masked(random_images(), sources_BN=sources)
    assert logits.shape == (3, 9, 512) == (*mean_colours(random_images(), side=4).shape, 512)
    model = random_model(**AXIAL, stochastic_depth=0.5)
    everything = torch.ones(model.config.num_blocks, 3, 2)
    torch.testing.assert_close(model(random_images(), everything), model(random_images()))
    one_image = everything.clone()
    one_image[:, 1] = 0  # none of its blocks
    tokens, (embedded, _) = model.tokens(random_images(), one_image), model.embed(random_images())
    assert torch.equal(tokens[1], embedded[1])
    torch.testing.assert_close(tokens[::2], model.tokens(random_images())[::2])
