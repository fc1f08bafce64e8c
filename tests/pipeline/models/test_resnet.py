"""Standardised weights, their epsilons, and TensorFlow's padding."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from pipeline.models.config import ResNetSize
from pipeline.models.resnet import (
    BIT_EPSILONS,
    HYBRID_EPSILONS,
    Epsilons,
    StandardConv,
    UnitSize,
    group_norm,
    pad_same,
    units_by_stage,
)
from pipeline.models.resnet import same_padding as padding_of

PLAIN = Epsilons(group_norm=1e-6)


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
