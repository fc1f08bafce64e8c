"""BiT's ResNets against the simplest implementation. test_parity.py compares them with timm's."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from pipeline.models import ModelConfig, build_model
from pipeline.models.bit import BasicPreActivationUnit, BiT, PreActivationUnit
from pipeline.models.resnet import BIT_EPSILONS, StandardConv, UnitSize

TINY = ModelConfig(name="bit_r50x1", image_size=32, num_classes=3, resnet_units=(1, 2), head_bias=-10.0)


def convolve(convolution: StandardConv, x_BCHW: torch.Tensor, stride: int = 1) -> torch.Tensor:
    weight: torch.Tensor = convolution.weight
    mean, variance = weight.mean((1, 2, 3), keepdim=True), weight.var((1, 2, 3), correction=0, keepdim=True)
    weight = (weight - mean) / torch.sqrt(variance + 1e-10)
    return F.conv2d(x_BCHW, weight, stride=stride, padding=weight.shape[-1] // 2)


def test_a_unit_norms_and_activates_before_each_convolution_and_before_the_projection() -> None:
    unit = PreActivationUnit(UnitSize(channels=64, inner=32, stride=2), BIT_EPSILONS["paper"])
    x = torch.randn(2, 64, 8, 8)
    first = F.relu(F.group_norm(x, 32, eps=1e-5))
    y = convolve(unit.conv1, first)
    y = convolve(unit.conv2, F.relu(F.group_norm(y, 32, eps=1e-5)), stride=2)
    y = convolve(unit.conv3, F.relu(F.group_norm(y, 32, eps=1e-5)))
    assert unit.conv_proj is not None
    torch.testing.assert_close(unit(x), convolve(unit.conv_proj, first, stride=2) + y)


def test_a_unit_of_the_same_width_adds_to_what_came_in() -> None:
    unit = PreActivationUnit(UnitSize(channels=128, inner=32, stride=1), BIT_EPSILONS["paper"])
    assert unit.conv_proj is None
    torch.nn.init.zeros_(unit.conv3.weight)
    x = torch.randn(1, 128, 4, 4)
    assert torch.equal(unit(x), x)


def test_a_basic_unit_is_two_convolutions_each_after_its_norm() -> None:
    size = UnitSize(channels=64, inner=96, stride=2, is_basic=True)
    unit = BasicPreActivationUnit(size, BIT_EPSILONS["paper"]).double()
    x = torch.randn(2, 64, 7, 7, dtype=torch.float64)
    first = F.relu(F.group_norm(x, 32, eps=1e-5))
    y = convolve(unit.conv1, first, stride=2)
    y = convolve(unit.conv2, F.relu(F.group_norm(y, 32, eps=1e-5)))
    assert unit.conv_proj is not None
    assert y.shape == (2, 96, 4, 4)
    torch.testing.assert_close(unit(x), convolve(unit.conv_proj, first, stride=2) + y)


def test_a_basic_unit_of_the_same_width_adds_to_what_came_in() -> None:
    unit = BasicPreActivationUnit(UnitSize(channels=64, inner=64, stride=1, is_basic=True), BIT_EPSILONS["paper"])
    assert unit.conv_proj is None
    torch.nn.init.zeros_(unit.conv2.weight)
    x = torch.randn(1, 64, 4, 4)
    assert torch.equal(unit(x), x)


def test_features_are_the_mean_of_the_last_normed_map() -> None:
    model = build_model(TINY)
    assert isinstance(model, BiT)
    images = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)
    x = convolve(model.conv_root, ((images.float() - 127.5) / 127.5).permute(0, 3, 1, 2), stride=2)
    x = F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2)  # a zero around the map, as BiT has it
    for number in range(2):
        for unit in model.stages[number].children():
            x = unit(x)
    expected = F.relu(F.group_norm(x, 32, eps=1e-5)).mean((2, 3))
    torch.testing.assert_close(model.features(images), expected)
    assert expected.shape == (2, 512)
    assert torch.equal(model(images), torch.full((2, 3), -10.0)), "a zero head says its constant"


@pytest.mark.parametrize(("height", "width"), [(1, 1), (33, 40), (32, 64)])
def test_images_of_any_size(height: int, width: int) -> None:
    assert build_model(TINY)(torch.zeros(1, height, width, 3, dtype=torch.uint8)).shape == (1, 3)


def test_a_bf16_model_has_fp32_logits() -> None:
    model = build_model(TINY).to(torch.bfloat16)
    images = torch.zeros(1, 32, 32, 3, dtype=torch.uint8)
    assert (model.features(images).dtype, model(images).dtype) == (torch.bfloat16, torch.float32)


def test_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="vit_b16 is none of BiT's"):
        BiT(ModelConfig(name="vit_b16"))
