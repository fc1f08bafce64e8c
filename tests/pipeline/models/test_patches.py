"""Patch embeddings that are resized: big_vision's and timm's results, gradients, and a model's passes with patches of
another size."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from pipeline.models import ModelConfig, ViT, build_model
from pipeline.models.patches import PatchEmbedding, resized_patches
from pipeline.models.positions import resample_axis_embeddings, resample_position_embeddings

SIDES = [(8, 16), (16, 8), (4, 7), (16, 14), (3, 1)]
VIT = ModelConfig(name="vit", image_size=24, patch=8, depth=2, width=16, mlp_width=24, num_heads=2, num_classes=5)
IMAGES = torch.randint(0, 256, (4, 24, 24, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def random_weight(side: int, *, width: int = 5) -> torch.Tensor:
    return torch.randn(width, side * side * 3, generator=torch.Generator().manual_seed(side))


def as_convolution(weight: torch.Tensor, side: int) -> torch.Tensor:
    """(D, P * P * C) -> (D, C, P, P)."""
    return weight.reshape(len(weight), side, side, 3).permute(0, 3, 1, 2)


def bilinear(image: np.ndarray, to_side: int) -> np.ndarray:
    """Half-pixel centres without antialiasing, one pixel at a time: what tf.image.resize computes."""
    side, out = len(image), np.zeros((to_side, to_side))
    for row, column in np.ndindex(out.shape):
        y, x = (min(max((at + 0.5) * side / to_side - 0.5, 0), side - 1) for at in (row, column))
        top, left = int(y), int(x)
        down, right = min(top + 1, side - 1), min(left + 1, side - 1)
        y, x = y - top, x - left
        above = (1 - x) * image[top, left] + x * image[top, right]
        out[row, column] = (1 - y) * above + y * ((1 - x) * image[down, left] + x * image[down, right])
    return out


def inverse_of_whole_patches(from_side: int, to_side: int) -> np.ndarray:
    """What big_vision multiplies a kernel by, [Q * Q, P * P]: it resizes each unit vector of a patch."""
    unit = np.eye(from_side**2).reshape(-1, from_side, from_side)
    resizing = np.stack([bilinear(one, to_side).reshape(-1) for one in unit]).T
    return np.linalg.pinv(resizing.T)


@pytest.mark.parametrize(("from_side", "to_side"), SIDES)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_it_is_big_visions_in_numpy(from_side: int, to_side: int, dtype: torch.dtype, error: float) -> None:
    weight = random_weight(from_side).to(dtype)
    kernels = weight.double().numpy().reshape(5, from_side**2, 3)
    expected = np.einsum("qp,dpc->dqc", inverse_of_whole_patches(from_side, to_side), kernels).reshape(5, -1)
    found = resized_patches(weight, from_side=from_side, to_side=to_side)
    assert (found.shape, found.dtype) == ((5, to_side**2 * 3), dtype)
    np.testing.assert_allclose(found.numpy(), expected, rtol=error, atol=error / 10)


@pytest.mark.parametrize(("from_side", "to_side"), SIDES)
def test_gradients_are_multiplied_by_the_transpose(from_side: int, to_side: int) -> None:
    weight, of_result = random_weight(from_side).double().requires_grad_(), random_weight(to_side).double()
    (found,) = torch.autograd.grad(resized_patches(weight, from_side=from_side, to_side=to_side), [weight], [of_result])
    inverse = inverse_of_whole_patches(from_side, to_side)
    expected = np.einsum("qp,dqc->dpc", inverse, of_result.numpy().reshape(5, to_side**2, 3)).reshape(5, -1)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("from_side", "to_side"), SIDES)
def test_it_is_timms_as_timm_reads_big_visions_files(timm: ModuleType, from_side: int, to_side: int) -> None:
    weight = random_weight(from_side)
    found = as_convolution(resized_patches(weight, from_side=from_side, to_side=to_side), to_side)
    size = [to_side, to_side]
    theirs = timm.layers.resample_patch_embed(
        as_convolution(weight, from_side), size, interpolation="bilinear", antialias=False
    )
    torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-5)  # timm's inverse is of fp32


@pytest.mark.parametrize(("from_side", "to_side"), [(8, 16), (4, 7), (14, 16)])
def test_larger_patches_embed_an_enlarged_image_as_before(from_side: int, to_side: int) -> None:
    weight, x_BCPP = random_weight(from_side), torch.rand(6, 3, from_side, from_side, dtype=torch.float64)
    larger = F.interpolate(x_BCPP, size=(to_side, to_side), mode="bilinear", align_corners=False)
    before = torch.einsum("dcpq,bcpq->bd", as_convolution(weight, from_side).double(), x_BCPP)
    new = as_convolution(resized_patches(weight, from_side=from_side, to_side=to_side), to_side).double()
    torch.testing.assert_close(torch.einsum("dcpq,bcpq->bd", new, larger), before, rtol=1e-4, atol=1e-4)


def test_the_same_size_changes_no_bit() -> None:
    weight = random_weight(4)
    assert torch.equal(resized_patches(weight, from_side=4, to_side=4), weight)
    model = vit()
    assert torch.equal(model(IMAGES, patch=8), model(IMAGES))


def test_a_layer_in_bf16_resizes_in_fp32() -> None:
    layer = PatchEmbedding(side=4, channels=3, width=5).to(torch.bfloat16)
    x_BNP = torch.rand(2, 3, 8 * 8 * 3).to(torch.bfloat16)
    resized = resized_patches(layer.weight.float(), from_side=4, to_side=8).to(torch.bfloat16)
    assert torch.equal(layer(x_BNP, 8), F.linear(x_BNP, resized, layer.bias))


def vit(config: ModelConfig = VIT) -> ViT:
    """With a head that is not zero."""
    model = build_model(config, seed=1)
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(2))
    assert isinstance(model, ViT)
    return model


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"pooling": "average", "position": "learned_2d", "registers": 2}, id="2-D positions, registers"),
        pytest.param({"position": "sincos2d", "pooling": "attention"}, id="sines, attention pooling"),
        pytest.param({"position": "rope2d"}, id="rotary positions"),
        pytest.param({"attention": "axial", "pooling": "average"}, id="axial attention"),
        pytest.param({"position_at": "layers_shared"}, id="positions again before each layer"),
    ],
)
@pytest.mark.parametrize("patch", [4, 12, 24])
def test_a_pass_is_that_of_a_model_with_the_resized_kernel(options: dict[str, Any], patch: int) -> None:
    """Its kernel and its positions are the model's, resized and loaded. The model's own tables get the gradients."""
    model = vit(replace(VIT, **options))
    other = build_model(replace(model.config, patch=patch), seed=1)
    own, from_grid, to_grid = model.state_dict(), model.config.grid, other.config.grid
    resized = {"embed.patch.weight": resized_patches(own["embed.patch.weight"], from_side=8, to_side=patch)}
    for name, table in own.items():
        if name == "embed.position":
            prefix = model.config.num_class_tokens
            resized[name] = resample_position_embeddings(
                table[0], from_grid=from_grid, to_grid=to_grid, num_prefix_tokens=prefix
            ).unsqueeze(0)
        elif name in ("embed.position_x", "embed.position_y"):
            resized[name] = resample_axis_embeddings(table, length=to_grid[0])
    other.load_state_dict({**own, **resized})
    found = model(IMAGES, patch=patch)
    assert torch.equal(found, other(IMAGES))
    learned = [each for name, each in model.named_parameters() if name.startswith("embed.p")]
    for gradient in torch.autograd.grad(found.square().sum(), learned):
        assert gradient.any()
