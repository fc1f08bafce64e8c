"""Attention that is known: uniform, of each patch to itself, and that of the model's own equations."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipeline.inspection.attention import (
    Rollout,
    attention_weights,
    distances,
    each_layer,
    looked_at,
    pool_weights,
    uniform_distance,
)
from pipeline.models.build import Model
from pipeline.models.conversion.config import Format, Hints
from pipeline.models.conversion.convert import save_as
from pipeline.models.conversion.open_any import open_any
from pipeline.models.layers import AttentionPool
from pipeline.models.vit import Attention, ViT
from pipeline.models.weights.folder import filled_model
from tests.pipeline.models.parity import imported
from tests.pipeline.models.test_vit import random_images, random_model

KINDS: list[dict[str, Any]] = [
    {},
    {"position": "relative"},
    {"pooling": "average"},
    {"position_at": "layers"},
    {"registers": 2, "qk_norm": True},
    {"distillation_token": True, "registers": 1},
    {"pooling": "attention"},
    {"position": "rope2d"},
    {"attention": "axial", "pooling": "average", "depth": 1},
    {"patch": 1, "resnet_units": (1, 1), "image_size": 16},
]


def mean_of_uniform(height: int, width: int) -> float:
    """The mean distance of two random cells of a grid, itself included: a sum over all offsets, each as often as it
    occurs: (H - |y|)(W - |x|) times."""
    offsets = [(y, x) for y in range(-height + 1, height) for x in range(-width + 1, width)]
    total: float = sum((height - abs(y)) * (width - abs(x)) * (y * y + x * x) ** 0.5 for y, x in offsets)
    return total / (height * width) ** 2


@pytest.mark.parametrize(("grid", "prefix"), [((1, 1), 1), ((1, 5), 0), ((4, 4), 1), ((3, 7), 1), ((14, 14), 0)])
def test_uniform_attention_reaches_the_mean_distance(grid: tuple[int, int], prefix: int) -> None:
    num_tokens = prefix + grid[0] * grid[1]
    shares = torch.full((2, 3, num_tokens, num_tokens), 1 / num_tokens)
    found = distances(shares, grid=grid, stride=16, num_prefix_tokens=prefix)
    assert found.shape == (2, 3)
    assert found.numpy() == pytest.approx(16 * mean_of_uniform(*grid), rel=1e-5)
    assert uniform_distance(grid, stride=16) == pytest.approx(16 * mean_of_uniform(*grid), rel=1e-5)


def test_attention_of_a_row_of_patches_is_a_third_of_its_length() -> None:
    """The closed form for a line of n: (n * n - 1) / (3 n)."""
    shares = torch.full((1, 1, 50, 50), 1 / 50)
    found = distances(shares, grid=(1, 50), stride=1, num_prefix_tokens=0)
    assert float(found) == pytest.approx((50 * 50 - 1) / (3 * 50), rel=1e-5)


def test_a_patch_that_looks_at_itself_reaches_nowhere() -> None:
    shares = torch.eye(10)[None, None]
    assert float(distances(shares, grid=(3, 3), stride=16, num_prefix_tokens=1)) == 0.0


def test_what_the_class_token_takes_does_not_count() -> None:
    """Each patch gives most of its attention to the class token, and the rest to its right neighbour."""
    shares = torch.zeros(1, 1, 4, 4)
    shares[..., 0] = 0.9
    for patch, neighbour in ((1, 2), (2, 3), (3, 2)):
        shares[0, 0, patch, neighbour] = 0.1
    assert float(distances(shares, grid=(1, 3), stride=14, num_prefix_tokens=1)) == pytest.approx(14)


@pytest.mark.parametrize("fields", KINDS)
def test_the_weights_are_those_that_the_model_uses(fields: dict[str, Any]) -> None:
    """They give the output of each attention, and watching changes no logit."""
    model = random_model(**fields)
    images, seen = random_images(size=model.config.image_size), []
    outputs: dict[int, tuple[tuple[torch.Tensor, ...], torch.Tensor]] = {}
    for number, block in enumerate(model.blocks):
        module: Any = block

        def keep(_: Any, inputs: tuple[torch.Tensor], output: torch.Tensor, number: int = number) -> None:
            outputs[number] = inputs, output

        module.attention.register_forward_hook(keep)
    with torch.no_grad():
        before = model(images)
        each_layer(model, images, lambda number, shares: seen.append((number, shares)))
        assert torch.equal(model(images), before)
        assert [number for number, _ in seen] == [0, 1]
        for number, shares in seen:
            inputs, expected = outputs[number]
            torch.testing.assert_close(shares.sum(-1), torch.ones(shares.shape[:-1]))
            attention: Any = model.blocks[number].attention
            assert isinstance(attention, Attention)
            assert torch.equal(attention_weights(attention, *inputs), shares)
            z, expected = inputs[0].flatten(1, -2), expected.flatten(1, -2)  # of axial attention [B, H, W, D]
            v = attention.qkv(z).chunk(3, dim=-1)[2].reshape(*z.shape[:2], 3, -1).transpose(1, 2)
            found = attention.out((shares @ v).transpose(1, 2).reshape(z.shape))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_axial_attention_reaches_along_a_line_alone() -> None:
    """Between tokens of other rows, or columns, the weights are 0; the product of the two layers reaches everywhere."""
    model = random_model(attention="axial", pooling="average", depth=1)
    rows, columns = seen_by(model)
    same_row_NN = torch.arange(9)[:, None] // 3 == torch.arange(9)[None] // 3
    same_column_NN = torch.arange(9)[:, None] % 3 == torch.arange(9)[None] % 3
    assert torch.equal(rows != 0, same_row_NN.expand_as(rows))
    assert torch.equal(columns != 0, same_column_NN.expand_as(columns))
    assert ((columns @ rows) > 0).all()


def test_nothing_watches_the_model_after_an_error() -> None:
    model = random_model()

    def fails(number: int, _: torch.Tensor) -> None:
        raise RuntimeError(f"layer {number}")

    with pytest.raises(RuntimeError, match="layer 0"):
        each_layer(model, random_images(), fails)
    assert not any(module._forward_pre_hooks for module in model.modules())


def seen_by(model: Model) -> torch.Tensor:
    """float32[L, B, h, N, N] of the random images."""
    assert isinstance(model, ViT)
    seen: list[torch.Tensor] = []
    each_layer(model, random_images(), lambda _, shares: seen.append(shares))
    return torch.stack(seen)


@pytest.mark.parametrize("written", ["timm", "hugging_face", "vision_transformer"])
def test_weights_in_other_formats_have_the_same_attention(tmp_path: Path, written: Format) -> None:
    model = random_model()
    path, state = tmp_path / ("w.npz" if written == "vision_transformer" else "w"), model.state_dict()
    save_as(written, path, config=model.config, labels=(), tensor=lambda name: state[name])
    found = seen_by(filled_model(open_any(str(path), Hints(num_heads=3))))
    torch.testing.assert_close(found, seen_by(model), atol=1e-5, rtol=1e-5)


def test_timm_computes_the_same_weights(tmp_path: Path) -> None:
    """What arrives at timm's own dropout of attention."""
    model = random_model(patch=4, mlp_width=48)
    state = model.state_dict()
    sizes = {"img_size": 12, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "mlp_ratio": 2}
    other = imported("timm").create_model("vit_base_patch16_224", num_classes=5, **sizes).eval()
    save_as("timm", tmp_path / "w", config=model.config, labels=(), tensor=lambda name: state[name])
    other.load_state_dict(load_file(tmp_path / "w" / "model.safetensors"))
    seen: list[torch.Tensor] = []
    for block in other.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].detach()))
        for gelu in (one for one in block.modules() if isinstance(one, torch.nn.GELU)):
            gelu.approximate = "tanh"
    with torch.no_grad():
        other(random_images().permute(0, 3, 1, 2).float() / 127.5 - 1)
    torch.testing.assert_close(torch.stack(seen), seen_by(model), atol=2e-5, rtol=1e-4)


def test_rollout_through_attention_pooling_is_what_the_probe_looks_at() -> None:
    rollout, pooled = Rollout(), torch.tensor([[0.1, 0.2, 0.7, 0.0]])
    rollout.add(torch.eye(6).expand(1, 2, 6, 6))
    found = rollout.maps(grid=(2, 2), num_prefix_tokens=2, num_registers=2, pooled_BM=pooled)
    torch.testing.assert_close(found[0], pooled.reshape(2, 2) / 0.7)
    model = random_model(pooling="attention", registers=2)
    assert isinstance(model.pool, AttentionPool)
    x_BMD = torch.randn(3, 9, 24)
    weights = pool_weights(model.pool, x_BMD)
    assert weights.sum(dim=1).tolist() == pytest.approx([1.0] * 3)
    _, maps = looked_at(model, random_images())
    assert maps.shape == (3, 3, 3)


def test_rollout_of_two_tokens_with_heads_is_their_mean() -> None:
    rollout, shares = Rollout(), torch.zeros(1, 1, 7, 7)
    shares[0, 0, 0, 3], shares[0, 0, 1, 4], shares[0, 0, 2, 5] = 1.0, 0.5, 1.0  # class, distillation, register
    rollout.add(shares)
    found = rollout.maps(grid=(2, 2), num_prefix_tokens=3, num_registers=1)
    assert found[0].tolist() == [[1.0, 0.5], [0.0, 0.0]]


def test_rollout_of_attention_to_oneself_looks_nowhere() -> None:
    rollout = Rollout()
    for _ in range(3):
        rollout.add(torch.eye(5).expand(2, 4, 5, 5))
    assert not rollout.maps(grid=(2, 2), num_prefix_tokens=1).any()


def test_rollout_of_uniform_attention_is_uniform() -> None:
    """Then the class token keeps 2^-L of itself, and each token gets the same of the rest."""
    rollout, layers, num_tokens = Rollout(), 3, 5
    for _ in range(layers):
        rollout.add(torch.full((1, 2, num_tokens, num_tokens), 1 / num_tokens))
    kept = 0.5**layers
    expected = np.full(num_tokens, (1 - kept) / num_tokens)
    expected[0] += kept
    assert rollout.product_BNN is not None
    np.testing.assert_allclose(rollout.product_BNN[0, 0].numpy(), expected, rtol=1e-6)


def test_rollout_is_the_product_of_the_layers() -> None:
    """Two layers in NumPy, the later one on the left; the brightest patch is 1, the darkest 0."""
    generator = torch.Generator().manual_seed(0)
    layers = [torch.rand(1, 3, 7, 7, generator=generator).softmax(-1) for _ in range(2)]
    rollout = Rollout()
    for layer in layers:
        rollout.add(layer)
    first, second = (0.5 * layer[0].mean(0).double().numpy() + 0.5 * np.eye(7) for layer in layers)
    taken = (second @ first)[0, 1:]
    expected = (taken - taken.min()) / np.ptp(taken)
    found = rollout.maps(grid=(2, 3), num_prefix_tokens=1)
    np.testing.assert_allclose(found[0].numpy().ravel(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", KINDS)
def test_every_layer_and_head_is_measured(fields: dict[str, Any]) -> None:
    model = random_model(**fields)
    pixels, maps = looked_at(model, random_images(size=model.config.image_size))
    rows, columns = model.config.grid
    assert (pixels.shape, maps.shape) == ((2, 3, 3), (3, rows, columns))
    longest = model.config.stride * np.hypot(rows - 1, columns - 1)
    assert ((pixels >= 0) & (pixels <= longest)).all()
    assert maps.amax((1, 2)).tolist() == [1.0] * 3
