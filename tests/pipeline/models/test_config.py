"""Sizes: the paper's by name, others by fields; error messages say what would fit."""

from dataclasses import replace
from typing import Any

import pytest

from pipeline.models.config import NAMES, ModelConfig, ResNetSize, Size

OWN: dict[str, Any] = {"name": "vit", "patch": 8, "depth": 2, "width": 32, "mlp_width": 64, "num_heads": 4}


@pytest.mark.parametrize(
    ("name", "expected"),  # the paper's Table 1
    [
        ("vit_ti16", Size(patch=16, depth=12, width=192, mlp_width=768, num_heads=3)),
        ("vit_s16", Size(patch=16, depth=12, width=384, mlp_width=1536, num_heads=6)),
        ("vit_b32", Size(patch=32, depth=12, width=768, mlp_width=3072, num_heads=12)),
        ("vit_b16", Size(patch=16, depth=12, width=768, mlp_width=3072, num_heads=12)),
        ("vit_l32", Size(patch=32, depth=24, width=1024, mlp_width=4096, num_heads=16)),
        ("vit_l16", Size(patch=16, depth=24, width=1024, mlp_width=4096, num_heads=16)),
        ("vit_h14", Size(patch=14, depth=32, width=1280, mlp_width=5120, num_heads=16)),
        ("vit_b32_half", Size(patch=32, depth=12, width=384, mlp_width=1536, num_heads=12)),  # Figure 4
    ],
)
def test_the_papers_sizes(name: str, expected: Size) -> None:
    assert ModelConfig(name=name).size == expected
    assert ModelConfig(name=name).resnet is None
    assert not ModelConfig(name=name).is_bit


@pytest.mark.parametrize(
    ("name", "like", "units", "grid"),
    [
        pytest.param("r50_vit_b16", "vit_b16", (3, 4, 9), (14, 14), id="stage 4 is moved into stage 3"),
        pytest.param("r50_vit_b32", "vit_b32", (3, 4, 6, 3), (7, 7), id="a whole ResNet-50"),
        pytest.param("r50_vit_l16", "vit_l16", (3, 4, 9), (14, 14), id="L/16"),
        pytest.param("r50_vit_l32", "vit_l32", (3, 4, 6, 3), (7, 7), id="L/32"),
        pytest.param("r26_vit_s32", "vit_s32", (2, 2, 2, 2), (7, 7), id="AugReg's: a whole ResNet-26"),
    ],
)
def test_hybrids_are_a_transformer_on_the_places_of_a_resnet(
    name: str, like: str, units: tuple[int, ...], grid: tuple[int, int]
) -> None:
    config = ModelConfig(name=name)
    assert config.size == replace(ModelConfig(name=like).size, patch=1)
    assert config.resnet == ResNetSize(units=units)
    assert (config.grid, config.stride) == (grid, ModelConfig(name=like).size.patch)


def test_r_ti16_is_the_root_of_a_resnet_with_patches_of_8_places() -> None:
    config = ModelConfig(name="r_vit_ti16")
    assert config.size == replace(ModelConfig(name="vit_ti16").size, patch=8)
    assert config.resnet == ResNetSize(units=())
    assert (config.resnet.stride, config.resnet.width, config.grid) == (4, 64, (7, 7))
    assert ModelConfig(name="r50_vit_b16", resnet_units=()).resnet == ResNetSize(units=())


@pytest.mark.parametrize(
    ("name", "units", "factor"),
    [
        ("bit_r50x1", (3, 4, 6, 3), 1),
        ("bit_r50x2", (3, 4, 6, 3), 2),
        ("bit_r101x1", (3, 4, 23, 3), 1),
        ("bit_r152x1", (3, 8, 36, 3), 1),
        ("bit_r152x2", (3, 8, 36, 3), 2),
        ("bit_r152x4", (3, 8, 36, 3), 4),
        ("bit_r200x3", (3, 24, 36, 3), 3),
    ],
)
def test_bits_resnets(name: str, units: tuple[int, ...], factor: int) -> None:
    config = ModelConfig(name=name)
    assert config.is_bit
    assert config.resnet == ResNetSize(units=units, factor=factor)
    assert (config.stride, config.resnet.width) == (32, 2048 * factor)


@pytest.mark.parametrize(("name", "units"), [("bit_r18x1", (2, 2, 2, 2)), ("bit_r34x1", (3, 4, 6, 3))])
def test_r18_and_r34_have_basic_units(name: str, units: tuple[int, ...]) -> None:
    """The channels and strides of the first two columns of "Deep Residual Learning", Table 1."""
    resnet = ModelConfig(name=name).resnet
    assert resnet == ResNetSize(units=units, is_basic=True)
    assert (resnet.root_width, resnet.width, resnet.stride) == (64, 512, 32)
    shorter = ModelConfig(name=name, resnet_units=(1, 1), resnet_factor=2).resnet
    assert shorter == ResNetSize(units=(1, 1), factor=2, is_basic=True)


def test_every_name_is_built_from_its_name_alone() -> None:
    assert len(NAMES) == 12 + 6 + 9
    for name in NAMES:
        assert ModelConfig(name=name).name == name


def test_a_resnets_units_may_come_from_json() -> None:
    units: Any = [1, 2]
    config = ModelConfig(name="bit_r50x1", resnet_units=units, resnet_factor=2)
    assert config == ModelConfig(name="bit_r50x1", resnet_units=(1, 2), resnet_factor=2)
    assert config.resnet == ResNetSize(units=(1, 2), factor=2)


def test_a_hybrid_of_ones_own() -> None:
    config = ModelConfig(**(OWN | {"name": "mine", "patch": 2, "resnet_units": (1, 1)}), image_size=48)
    assert (config.stride, config.grid) == (16, (3, 3))


def test_a_class_token_and_registers_are_the_only_prefix() -> None:
    assert ModelConfig().num_prefix_tokens == 1
    assert ModelConfig(pooling="average").num_prefix_tokens == 0
    assert (ModelConfig(registers=4).num_prefix_tokens, ModelConfig(registers=4).num_class_tokens) == (5, 1)


def test_the_defaults_are_b16_at_224_with_a_single_linear_head() -> None:
    assert ModelConfig(name="vit_b16", image_size=224, num_classes=1000) == ModelConfig()
    assert not ModelConfig().representation
    assert ModelConfig().grid == (14, 14)


def test_a_field_wins_over_the_names_size() -> None:
    assert ModelConfig(name="vit_l16", depth=3).size == Size(
        patch=16, depth=3, width=1024, mlp_width=4096, num_heads=16
    )
    assert ModelConfig(**OWN, image_size=48).size == Size(patch=8, depth=2, width=32, mlp_width=64, num_heads=4)
