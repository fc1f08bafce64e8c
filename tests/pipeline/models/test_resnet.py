"""ResNets of hybrids and of BiT against the simplest implementation. test_parity.py compares them with timm's."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from pipeline.models import ModelConfig, ViT, build_model, shapes_of
from pipeline.models.config import ResNetSize
from pipeline.models.resnet import (
    BIT_EPSILONS,
    HYBRID_EPSILONS,
    BasicPreActivationUnit,
    BiT,
    Epsilons,
    HybridResNet,
    PostActivationUnit,
    PreActivationUnit,
    StandardConv,
    UnitSize,
    group_norm,
    pad_same,
    units_by_stage,
)
from pipeline.models.resnet import same_padding as padding_of
from tests.pipeline.models.parity import random_images, random_model, theirs_of

PLAIN = Epsilons(group_norm=1e-6)
SIZES: dict[str, Any] = {"image_size": 32, "depth": 1, "width": 32, "mlp_width": 32, "num_heads": 2, "num_classes": 3}
TINY = ModelConfig(name="bit_r50x1", image_size=32, num_classes=3, resnet_units=(1, 2), head_bias=-10.0)


def filled(convolution: StandardConv, *, scale: float = 1.0) -> StandardConv:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        convolution.weight.copy_(3.0 + scale * torch.randn(convolution.weight.shape, generator=generator))
    return convolution


def test_a_standardised_weight_has_mean_zero_and_variance_one_for_each_channel_out() -> None:
    standardised = filled(StandardConv((4, 6, 3), epsilons=PLAIN), scale=0.1).standardised()
    torch.testing.assert_close(standardised.mean(dim=(1, 2, 3)), torch.zeros(6), atol=1e-5, rtol=0)
    torch.testing.assert_close(standardised.var(dim=(1, 2, 3), correction=0), torch.ones(6))


@pytest.mark.parametrize(
    ("epsilons", "deviation"),  # divides a weight with a standard deviation of 1e-4
    [
        pytest.param(HYBRID_EPSILONS["paper"], 1.1e-4, id="hybrid: beside the deviation, 1e-5"),
        pytest.param(BIT_EPSILONS["paper"], (1e-8 + 1e-10) ** 0.5, id="BiT: in the variance, 1e-10"),
        pytest.param(HYBRID_EPSILONS["timm"], (1e-8 + 1e-8) ** 0.5, id="timm: in the variance, 1e-8"),
        pytest.param(BIT_EPSILONS["timm"], (1e-8 + 1e-8) ** 0.5, id="timm's BiT too"),
    ],
)
def test_epsilons_of_each_code(epsilons: Epsilons, deviation: float) -> None:
    convolution = StandardConv((2, 1, 1), epsilons=epsilons)
    with torch.no_grad():
        convolution.weight.copy_(torch.tensor([1e-4, -1e-4]).reshape(1, 2, 1, 1))
    expected = torch.tensor([1e-4, -1e-4]).reshape(1, 2, 1, 1) / deviation
    torch.testing.assert_close(convolution.standardised(), expected)


def test_weights_of_a_bf16_model_are_standardised_in_fp32() -> None:
    convolution = filled(StandardConv((4, 6, 3), epsilons=PLAIN)).to(torch.bfloat16)
    assert convolution.standardised().dtype == torch.float32
    assert convolution(torch.randn(1, 4, 5, 5).bfloat16()).dtype == torch.bfloat16


def test_group_norms_are_of_32_groups() -> None:
    norm = group_norm(64, Epsilons(group_norm=1e-6))
    assert (norm.num_groups, norm.eps) == (32, 1e-6)


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "expected"),
    [
        pytest.param(224, 7, 2, (2, 3), id="the root: the odd one at the end"),
        pytest.param(112, 3, 2, (0, 1), id="pooling"),
        pytest.param(225, 7, 2, (3, 3), id="an odd map"),
        pytest.param(56, 3, 1, (1, 1), id="stride 1: as many on both sides"),
        pytest.param(56, 1, 2, (0, 0), id="a projection needs none"),
        pytest.param(1, 3, 2, (1, 1), id="one place"),
    ],
)
def test_tensorflows_same_padding(size: int, kernel: int, stride: int, expected: tuple[int, int]) -> None:
    assert padding_of(size, kernel, stride) == expected


@pytest.mark.parametrize("size", [6, 7])
def test_same_and_even_padding_see_other_places(size: int) -> None:
    """With a stride of 2, the receptive fields are one position apart on an even map, and the same on an odd one."""
    same = filled(StandardConv((2, 3, 3), stride=2, same=True, epsilons=PLAIN))
    even = filled(StandardConv((2, 3, 3), stride=2, epsilons=PLAIN))
    x = torch.randn(1, 2, size, size)
    assert same(x).shape == even(x).shape
    assert torch.allclose(same(x), even(x)) == (size == 7)
    shifted = F.conv2d(F.pad(x, padding_of(size, 3, 2) * 2), same.standardised(), stride=2)
    torch.testing.assert_close(same(x), shifted)


def test_padding_of_a_pooled_map_is_minus_infinity_not_zero() -> None:
    x = torch.full((1, 1, 4, 4), -5.0)
    assert F.max_pool2d(pad_same(x, 3, 2, value=float("-inf")), 3, 2).eq(-5.0).all()


def test_every_stage_is_twice_as_wide_and_all_but_the_first_begin_with_a_stride() -> None:
    first, second, third = units_by_stage(ResNetSize(units=(2, 1, 3), factor=2))
    assert first == [UnitSize(channels=128, inner=128, stride=1), UnitSize(channels=512, inner=128, stride=1)]
    assert second == [UnitSize(channels=512, inner=256, stride=2)]
    assert third == [UnitSize(channels=1024, inner=512, stride=2)] + [UnitSize(channels=2048, inner=512, stride=1)] * 2
    assert [unit.is_projected for unit in (*first, *second, *third)] == [True, False, True, True, False, False]


def hybrid_convolution(convolution: StandardConv, x_BCHW: torch.Tensor, stride: int = 1) -> torch.Tensor:
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
    y = F.relu(F.group_norm(hybrid_convolution(unit.conv1, x), 32, unit.norm1.weight, unit.norm1.bias, 1e-6))
    y = F.relu(F.group_norm(hybrid_convolution(unit.conv2, y, stride=2), 32, eps=1e-6))
    y = F.group_norm(hybrid_convolution(unit.conv3, y), 32, unit.norm_out.weight, unit.norm_out.bias, 1e-6)
    assert unit.conv_proj is not None
    shortcut = F.group_norm(hybrid_convolution(unit.conv_proj, x, stride=2), 32, eps=1e-6)
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


def bit_convolution(convolution: StandardConv, x_BCHW: torch.Tensor, stride: int = 1) -> torch.Tensor:
    weight: torch.Tensor = convolution.weight
    mean, variance = weight.mean((1, 2, 3), keepdim=True), weight.var((1, 2, 3), correction=0, keepdim=True)
    weight = (weight - mean) / torch.sqrt(variance + 1e-10)
    return F.conv2d(x_BCHW, weight, stride=stride, padding=weight.shape[-1] // 2)


def test_a_unit_norms_and_activates_before_each_convolution_and_before_the_projection() -> None:
    unit = PreActivationUnit(UnitSize(channels=64, inner=32, stride=2), BIT_EPSILONS["paper"])
    x = torch.randn(2, 64, 8, 8)
    first = F.relu(F.group_norm(x, 32, eps=1e-5))
    y = bit_convolution(unit.conv1, first)
    y = bit_convolution(unit.conv2, F.relu(F.group_norm(y, 32, eps=1e-5)), stride=2)
    y = bit_convolution(unit.conv3, F.relu(F.group_norm(y, 32, eps=1e-5)))
    assert unit.conv_proj is not None
    torch.testing.assert_close(unit(x), bit_convolution(unit.conv_proj, first, stride=2) + y)


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
    y = bit_convolution(unit.conv1, first, stride=2)
    y = bit_convolution(unit.conv2, F.relu(F.group_norm(y, 32, eps=1e-5)))
    assert unit.conv_proj is not None
    assert y.shape == (2, 96, 4, 4)
    torch.testing.assert_close(unit(x), bit_convolution(unit.conv_proj, first, stride=2) + y)


def test_a_basic_unit_of_the_same_width_adds_to_what_came_in() -> None:
    unit = BasicPreActivationUnit(UnitSize(channels=64, inner=64, stride=1, is_basic=True), BIT_EPSILONS["paper"])
    assert unit.conv_proj is None
    torch.nn.init.zeros_(unit.conv2.weight)
    x = torch.randn(1, 64, 4, 4)
    assert torch.equal(unit(x), x)


class PlainBasicResNet:
    """ResNet-18 and 34 with BiT's layers, computed from tensors by functions of PyTorch. Neither our modules nor a
    library's norm take part. `used`: the tensors that it has used."""

    def __init__(self, state: dict[str, torch.Tensor], *, units: tuple[int, ...], in_variance: float) -> None:
        self.state, self.units, self.in_variance, self.used = state, units, in_variance, set[str]()

    def tensor(self, name: str) -> torch.Tensor:
        self.used.add(name)
        return self.state[name]

    def convolved(self, name: str, x: torch.Tensor, stride: int = 1) -> torch.Tensor:
        weight = self.tensor(f"{name}.weight")
        rows = weight.flatten(1) - weight.flatten(1).mean(1, keepdim=True)
        rows = rows / (rows.square().mean(1, keepdim=True) + self.in_variance).sqrt()
        return F.conv2d(x, rows.view_as(weight), stride=stride, padding=weight.shape[-1] // 2)

    def activated(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Group norm, then ReLU."""
        groups = x.reshape(len(x), 32, -1)
        groups = groups - groups.mean(2, keepdim=True)
        normed = (groups / (groups.square().mean(2, keepdim=True) + 1e-5).sqrt()).view_as(x)
        scale, offset = (self.tensor(f"{name}.{kind}")[:, None, None] for kind in ("weight", "bias"))
        return torch.clamp(normed * scale + offset, min=0)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        x = self.convolved("conv_root", theirs_of(images).to(self.state["head.weight"].dtype), 2)
        x = F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2)
        for stage, num_units in enumerate(self.units):
            for number in range(num_units):
                unit, is_first = f"stages.{stage}.{number}", stage > 0 and number == 0
                y = self.activated(f"{unit}.norm1", x)
                shortcut = self.convolved(f"{unit}.conv_proj", y, 2) if is_first else x
                y = self.convolved(f"{unit}.conv1", y, 2 if is_first else 1)
                x = shortcut + self.convolved(f"{unit}.conv2", self.activated(f"{unit}.norm2", y))
        return self.activated("norm", x).flatten(2).mean(2)

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        return self.features(images) @ self.tensor("head.weight").T + self.tensor("head.bias")


@pytest.mark.parametrize(
    ("name", "units", "epsilons", "in_variance"),
    [
        ("bit_r18x1", (2, 2, 2, 2), "paper", 1e-10),
        pytest.param("bit_r18x1", (2, 2, 2, 2), "timm", 1e-8, marks=pytest.mark.long),
        pytest.param("bit_r34x1", (3, 4, 6, 3), "paper", 1e-10, marks=pytest.mark.long),
        pytest.param("bit_r34x1", (3, 4, 6, 3), "timm", 1e-8, marks=pytest.mark.long),
    ],
)
def test_logits_of_whole_basic_resnets(name: str, units: tuple[int, ...], epsilons: Any, in_variance: float) -> None:
    """In fp64; the product of the head is in fp32."""
    images, config = random_images(33, 40), ModelConfig(name=name, num_classes=7, resnet_epsilons=epsilons)
    model = random_model(config).double()
    plain = PlainBasicResNet(model.state_dict(), units=units, in_variance=in_variance)
    with torch.no_grad():
        found, expected = model(images), plain.logits(images)
        torch.testing.assert_close(model.features(images), plain.features(images), rtol=1e-9, atol=1e-12)
    assert plain.used == set(model.state_dict())
    assert float(expected.std()) > 0.1
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-6


def test_features_are_the_mean_of_the_last_normed_map() -> None:
    model = build_model(TINY)
    assert isinstance(model, BiT)
    images = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)
    x = bit_convolution(model.conv_root, ((images.float() - 127.5) / 127.5).permute(0, 3, 1, 2), stride=2)
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
