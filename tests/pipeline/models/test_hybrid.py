"""The ResNet in front of a hybrid, against the simplest implementation. test_parity.py compares it with timm's."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from pipeline.models import ModelConfig, ViT, build_model, shapes_of
from pipeline.models.config import ResNetSize
from pipeline.models.hybrid import HybridResNet, PostActivationUnit
from pipeline.models.resnet import HYBRID_EPSILONS, StandardConv, UnitSize

SIZES: dict[str, Any] = {"image_size": 32, "depth": 1, "width": 32, "mlp_width": 32, "num_heads": 2, "num_classes": 3}


def convolve(convolution: StandardConv, x_BCHW: torch.Tensor, stride: int = 1) -> torch.Tensor:
    weight: torch.Tensor = convolution.weight
    weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / (
        weight.std((1, 2, 3), correction=0, keepdim=True) + 1e-5
    )
    if weight.shape[-1] == 1:
        return F.conv2d(x_BCHW, weight, stride=stride)
    return F.conv2d(F.pad(x_BCHW, (0, 1, 0, 1) if stride == 2 else (1, 1, 1, 1)), weight, stride=stride)


def test_a_unit_is_three_convolutions_each_with_its_norm_and_a_projected_shortcut() -> None:
    unit = PostActivationUnit(UnitSize(channels=64, inner=32, stride=2), HYBRID_EPSILONS["paper"])
    torch.nn.init.normal_(unit.norm_out.bias)
    x = torch.randn(2, 64, 8, 8)
    y = F.relu(F.group_norm(convolve(unit.conv1, x), 32, unit.norm1.weight, unit.norm1.bias, 1e-6))
    y = F.relu(F.group_norm(convolve(unit.conv2, y, stride=2), 32, eps=1e-6))
    y = F.group_norm(convolve(unit.conv3, y), 32, unit.norm_out.weight, unit.norm_out.bias, 1e-6)
    assert unit.conv_proj is not None
    shortcut = F.group_norm(convolve(unit.conv_proj, x, stride=2), 32, eps=1e-6)
    torch.testing.assert_close(unit(x), F.relu(shortcut + y))


def test_a_unit_of_the_same_width_has_no_projection_and_at_first_adds_nothing() -> None:
    model = build_model(ModelConfig(name="r50_vit_b16", **SIZES | {"image_size": 4}, resnet_units=(2,)))
    assert isinstance(model, ViT)
    assert model.embed.resnet is not None
    unit = model.embed.resnet.get_submodule("stages.0.1")
    x = torch.randn(1, 256, 4, 4)
    assert torch.equal(unit(x), F.relu(x))


def test_stages_halve_the_map_and_double_the_channels() -> None:
    resnet = HybridResNet(ResNetSize(units=(1, 1, 1)), epsilons="paper")
    assert resnet(torch.randn(2, 64, 96, 3)).shape == (2, 4, 6, 1024)


def test_the_root_alone_halves_the_map_twice() -> None:
    resnet = HybridResNet(ResNetSize(units=()), epsilons="paper")
    assert resnet(torch.randn(2, 64, 96, 3)).shape == (2, 16, 24, 64)


def test_a_place_of_the_map_is_a_patch() -> None:
    """R50+ViT-B/16: 32 px are 2 x 2 positions of 1024 channels."""
    shapes = shapes_of(ModelConfig(name="r50_vit_b16", **SIZES))
    assert shapes["embed.patch.weight"] == (32, 1024)
    assert shapes["embed.position"] == (1, 1 + 2 * 2, 32)
    assert shapes["embed.resnet.conv_root.weight"] == (64, 3, 7, 7)
    units = {tuple(name.split(".")[3:5]) for name in shapes if "resnet.stages" in name}
    assert len(units) == 3 + 4 + 9
