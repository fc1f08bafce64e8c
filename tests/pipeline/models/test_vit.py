"""The model against the paper: parameter counts to the integer, and equations 1 to 4 in plain NumPy."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray

from pipeline.models import ModelConfig, ViT, build_model, shapes_of
from pipeline.models.initial import initial_tensor

Array = NDArray[np.float64]
TINY: dict[str, Any] = {"name": "vit", "image_size": 12, "num_classes": 5, "patch": 4, "depth": 2, "width": 24}
TINY |= {"mlp_width": 40, "num_heads": 3}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(ModelConfig(name="vit_b16"), 86_567_656, id="B/16"),
        pytest.param(ModelConfig(name="vit_l16"), 304_326_632, id="L/16"),
        pytest.param(ModelConfig(name="vit_h14"), 632_045_800, id="H/14"),
        pytest.param(ModelConfig(name="vit_b16", num_classes=21_843), 102_595_923, id="B/16 on ImageNet-21k"),
        pytest.param(
            ModelConfig(name="vit_b16", num_classes=21_843, representation=True),
            103_186_515,
            id="B/16 on ImageNet-21k with the hidden layer",
        ),
        pytest.param(
            ModelConfig(name="vit_h14", num_classes=18_291, representation=True), 655_835_251, id="H/14 on JFT-300M"
        ),
        pytest.param(ModelConfig(name="vit_l16", image_size=512), 305_174_504, id="L/16 fine-tuned at 512"),
        pytest.param(ModelConfig(name="vit_h14", image_size=518), 633_470_440, id="H/14 fine-tuned at 518"),
    ],
)
def test_parameter_counts(config: ModelConfig, expected: int) -> None:
    assert sum(math.prod(shape) for shape in shapes_of(config).values()) == expected


def random_model(*, seed: int = 0, **fields: Any) -> ViT:
    """A tiny model in which no tensor is zero or one, head included."""
    model = build_model(ModelConfig(**(TINY | fields)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def random_images(num: int = 3, size: int = 12) -> torch.Tensor:
    return torch.randint(0, 256, (num, size, size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    centred: Array = x - x.mean(-1, keepdims=True)
    normal: Array = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    return normal * weight + bias


def gelu(x: Array) -> Array:
    inner: Array = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    result: Array = 0.5 * x * (1 + np.tanh(inner))
    return result


def reference_logits(model: ViT, images: NDArray[np.uint8]) -> Array:
    """Equations 1 to 4 in float64, one image, one patch and one head at a time."""
    p = {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}
    size = model.config.size
    logits = []
    for image in images:
        tokens = [p["embed.class_token"][0, 0]]
        for top in range(0, image.shape[0], size.patch):
            for left in range(0, image.shape[1], size.patch):
                patch = image[top : top + size.patch, left : left + size.patch].astype(np.float64)
                flat = ((patch - 127.5) / 127.5).reshape(-1)  # rows, columns, colours
                tokens.append(p["embed.patch.weight"] @ flat + p["embed.patch.bias"])
        z = np.stack(tokens) + p["embed.position"][0]  # equation 1
        for number in range(size.depth):
            z = z + attention(p, f"blocks.{number}", z, num_heads=size.num_heads)  # equation 2
            normed = layer_norm(z, p[f"blocks.{number}.norm2.weight"], p[f"blocks.{number}.norm2.bias"])
            mlp = f"blocks.{number}.mlp.dense"
            hidden = gelu(normed @ p[f"{mlp}1.weight"].T + p[f"{mlp}1.bias"])
            z = z + hidden @ p[f"{mlp}2.weight"].T + p[f"{mlp}2.bias"]  # equation 3
        y = layer_norm(z[0], p["norm.weight"], p["norm.bias"])  # equation 4
        if model.config.representation:
            y = np.tanh(p["representation.weight"] @ y + p["representation.bias"])
        logits.append(p["head.weight"] @ y + p["head.bias"] + model.config.head_bias)
    return np.stack(logits)


def attention(p: dict[str, Array], block: str, z: Array, *, num_heads: int) -> Array:
    normed = layer_norm(z, p[f"{block}.norm1.weight"], p[f"{block}.norm1.bias"])
    width = normed.shape[1]
    weights = p[f"{block}.attention.qkv.weight"].reshape(3, width, width)
    biases = p[f"{block}.attention.qkv.bias"].reshape(3, width)
    q, k, v = (normed @ weights[i].T + biases[i] for i in range(3))
    side, heads = width // num_heads, []
    for head in range(num_heads):
        own = slice(head * side, (head + 1) * side)
        scores = q[:, own] @ k[:, own].T / np.sqrt(side)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(shares / shares.sum(-1, keepdims=True) @ v[:, own])
    result: Array = np.concatenate(heads, axis=1) @ p[f"{block}.attention.out.weight"].T
    return result + p[f"{block}.attention.out.bias"]


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="a linear head"),
        pytest.param({"representation": True}, id="a hidden tanh layer before the head"),
        pytest.param({"head_bias": -10.0}, id="the constant of the multi-label head"),
        pytest.param({"patch": 6, "num_heads": 1, "depth": 1}, id="one head"),
        pytest.param({"image_size": 4}, id="a single patch"),
    ],
)
def test_logits_are_the_papers_equations(fields: dict[str, Any]) -> None:
    model = random_model(**fields)
    images = random_images(size=model.config.image_size)
    with torch.no_grad():
        found = model(images)
    expected = reference_logits(model, images.numpy())
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert np.ptp(expected) > 0.1, "logits that hardly differ would prove nothing"


def test_layer_norms_epsilon_is_flaxs() -> None:
    """Features as small as epsilon tell 1e-6 from PyTorch's 1e-5."""
    model, images = random_model(depth=1), random_images()
    with torch.no_grad():
        for parameter in (*model.embed.parameters(), *model.blocks.parameters()):
            parameter.mul_(1e-3)
        found = model(images)
    np.testing.assert_allclose(found.numpy(), reference_logits(model, images.numpy()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("representation", [False, True])
def test_the_head_is_fp32_in_a_bf16_model(representation: bool) -> None:
    model = random_model(representation=representation, head_bias=-10.0).to(torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        features, logits = model.features(random_images()), model(random_images())
    assert features.dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    expected = F.linear(features.float(), model.head.weight.float(), model.head.bias.float()) - 10.0
    assert torch.equal(logits, expected)
    assert not torch.equal(logits, logits.bfloat16().float()), "finer than bf16 can tell"


@pytest.mark.parametrize("constant", [0.0, -10.0, -6.9])
def test_a_new_model_says_its_constant_for_every_class(constant: float) -> None:
    model = build_model(ModelConfig(**TINY, head_bias=constant))
    assert torch.equal(model(random_images()), torch.full((3, 5), constant))


def test_a_zero_head_gives_no_gradient_to_the_rest_and_a_random_one_to_all() -> None:
    for model, everything in ((build_model(ModelConfig(**TINY)), False), (random_model(), True)):
        torch.autograd.backward(F.cross_entropy(model(random_images()), torch.tensor([0, 1, 2])))
        moved = {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.abs().sum() > 0)}
        assert moved == (set(shapes_of(model.config)) if everything else {"head.weight", "head.bias"})


def test_dropout_acts_in_training_only() -> None:
    plain, dropping = random_model(), random_model(dropout=0.5)
    images = random_images()
    assert torch.equal(dropping(images), plain(images))
    torch.manual_seed(0)
    assert not torch.equal(dropping.train()(images), plain(images))


def test_the_initial_weights_are_those_of_seed_and_name() -> None:
    config = ModelConfig(**TINY, position_std=0.3)
    model = build_model(config, seed=5)
    for name, parameter in model.named_parameters():
        expected = initial_tensor(name, tuple(parameter.shape), seed=5, position_std=0.3)
        assert torch.equal(parameter, expected), name


def test_shapes_are_known_without_building() -> None:
    config = ModelConfig(**TINY, representation=True)
    assert shapes_of(config) == {name: tuple(p.shape) for name, p in build_model(config).named_parameters()}


def test_a_model_needs_its_classes() -> None:
    with pytest.raises(ValueError, match="num_classes is 0"):
        ViT(ModelConfig(**(TINY | {"num_classes": 0})))
