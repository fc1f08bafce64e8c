"""Position embeddings: resampled as SciPy, timm and Hugging Face do, and added in the layers."""

from types import ModuleType

import numpy as np
import pytest
import torch
from scipy.ndimage import zoom

from pipeline.models import ModelConfig, ViT, build_model
from pipeline.models.config import Mode
from pipeline.models.positions import (
    Positions,
    RelativePositions,
    from_axes,
    resample_axis_embeddings,
    resample_position_embeddings,
)
from pipeline.models.vit import Block
from tests.pipeline.models.test_vit import TINY, random_images, random_model

WIDTH = 6
GRIDS = [
    pytest.param((14, 14), (24, 24), id="B/16: 224 -> 384"),
    pytest.param((16, 16), (37, 37), id="H/14: 224 -> 518"),
    pytest.param((24, 24), (14, 14), id="384 -> 224"),
    pytest.param((37, 37), (16, 16), id="518 -> 224"),
    pytest.param((14, 14), (10, 20), id="not square"),
]
MODES: tuple[Mode, ...] = ("paper", "bicubic", "timm")


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


@pytest.mark.parametrize(("from_grid", "to_grid"), GRIDS)
@pytest.mark.parametrize("num_prefix", [0, 1, 2])
def test_equal_to_timms_own_function(
    timm: ModuleType, from_grid: tuple[int, int], to_grid: tuple[int, int], num_prefix: int
) -> None:
    before = torch.cat([torch.randn(num_prefix, WIDTH), table(from_grid)[1:]])
    expected = timm.layers.resample_abs_pos_embed(before[None], list(to_grid), num_prefix_tokens=num_prefix)[0]
    after = resample_position_embeddings(
        before, from_grid=from_grid, to_grid=to_grid, mode="timm", num_prefix_tokens=num_prefix
    )
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-6)
    assert torch.equal(after[:num_prefix], before[:num_prefix])


@pytest.mark.parametrize(("from_grid", "to_grid"), GRIDS)
def test_equal_to_hugging_faces_own_function(
    transformers: ModuleType, from_grid: tuple[int, int], to_grid: tuple[int, int]
) -> None:
    config = transformers.ViTConfig(hidden_size=WIDTH, image_size=from_grid[0] * 4, patch_size=4, num_attention_heads=1)
    theirs = transformers.models.vit.modeling_vit.ViTEmbeddings(config)
    before = table(from_grid)
    theirs.position_embeddings.data.copy_(before[None])
    tokens = torch.zeros(1, 1 + to_grid[0] * to_grid[1], WIDTH)
    expected = theirs.interpolate_pos_encoding(tokens, to_grid[0] * 4, to_grid[1] * 4)[0]
    after = resample_position_embeddings(before, from_grid=from_grid, to_grid=to_grid, mode="bicubic")
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-6)


def test_the_three_ways_are_not_the_same() -> None:
    before = table((16, 16))
    paper, bicubic, timm_way = (
        resample_position_embeddings(before, from_grid=(16, 16), to_grid=(9, 9), mode=m) for m in MODES
    )
    for one, other in ((paper, bicubic), (paper, timm_way), (bicubic, timm_way)):
        assert float((one - other)[1:].abs().mean()) > 0.1
        assert torch.equal(one[0], other[0])


@pytest.mark.parametrize("mode", MODES)
def test_one_axis_of_2d_embeddings_is_resampled_like_a_grid_that_varies_along_it_alone(mode: Mode) -> None:
    before = torch.randn(7, WIDTH)
    grid_ND = before[:, None].expand(-1, 5, -1).reshape(35, WIDTH)
    expected = resample_position_embeddings(grid_ND, from_grid=(7, 5), to_grid=(11, 5), mode=mode, num_prefix_tokens=0)
    found = resample_axis_embeddings(before, length=11, mode=mode)
    torch.testing.assert_close(found, expected.reshape(11, 5, WIDTH)[:, 0], rtol=0, atol=1e-6)


def test_gradients_reach_the_table() -> None:
    before = table((4, 4)).requires_grad_()
    torch.autograd.backward(resample_position_embeddings(before, from_grid=(4, 4), to_grid=(6, 5)).sum())
    assert before.grad is not None
    assert before.grad.ne(0).all()


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


def test_the_same_positions_at_each_layer_are_resampled_for_another_grid() -> None:
    model = random_model(position_at="layers_shared")
    assert model(random_images(size=20)).shape == (3, 5)
