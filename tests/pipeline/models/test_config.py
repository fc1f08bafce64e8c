"""Sizes: the paper's by name, others by fields; error messages say what would fit."""

from dataclasses import replace
from typing import Any

import pytest

from pipeline.models.config import NAMES, ModelConfig, ResNetSize, Size
from shards.errors import UserError

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
    with pytest.raises(ValueError, match="no transformer"):
        _ = config.size


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"image_size": 225}, "225, not a multiple of the patch (16 px); take 224 or 240", id="between"),
        pytest.param({"image_size": 8}, "image_size is 8, .*take 16 or a multiple", id="smaller than a patch"),
        pytest.param({"name": "vit_h14", "image_size": 512}, "take 504 or 518", id="H/14 is fine-tuned at 518"),
        pytest.param({"width": 770}, "width is 770, not a multiple of model.num_heads = 12", id="uneven heads"),
        pytest.param({"name": "vit_x"}, "'vit_x', which is none of vit_b32, .*--model.mlp-width", id="unknown name"),
        pytest.param(OWN | {"num_heads": None}, "also needs --model.num-heads$", id="one size is missing"),
        pytest.param({"depth": 0}, "model.depth is 0; allowed: 1 to 1,000", id="no layers"),
        pytest.param({"patch": 0}, "model.patch is 0; allowed: 1 to", id="no patch: not a division by zero"),
        pytest.param({"num_heads": -1}, "model.num_heads is -1; allowed: 1 to", id="negative"),
        pytest.param({"depth": 10**9}, "model.depth is 1000000000; allowed: 1 to 1,000", id="layers without end"),
        pytest.param({"width": 2**40}, "model.width is 1099511627776; allowed: 1 to 65,536", id="too wide"),
        pytest.param({"mlp_width": 2**62}, "model.mlp_width is .*; allowed: 1 to 1,048,576", id="too wide inside"),
        pytest.param({"image_size": 10**9}, "model.image_size is .*; allowed: 1 to 16,384", id="terabytes of pixels"),
        pytest.param({"num_classes": 10**9}, "num_classes is .* to 10,000,000", id="a head of terabytes"),
        pytest.param({"name": "bit_r50x1", "resnet_units": (1,) * 9}, "allowed: the units of 1 to 8", id="stages"),
        pytest.param({"name": "bit_r50x1", "resnet_units": (10**9,)}, "units.0 is .* to 1,000", id="units"),
        pytest.param({"name": "bit_r50x1", "resnet_factor": 10**6}, "resnet_factor is .* to 64", id="factor"),
        pytest.param({"num_classes": -1}, "num_classes is -1", id="negative classes"),
        pytest.param({"dropout": 1.0}, "model.dropout is 1.0; allowed: 0 to below 1", id="drops everything"),
        pytest.param({"pooling": "max"}, "pooling is 'max'; allowed: token, average, attention", id="another pooling"),
        pytest.param({"gelu": "erf"}, "gelu is 'erf'; allowed: tanh, exact", id="another GELU"),
        pytest.param(
            {"position": "none", "position_at": "layers"}, "adds nothing to the input; leave it out", id="no positions"
        ),
        pytest.param(
            {"position": "sincos2d", "position_at": "layers"}, "added to the input alone; leave it out", id="sines"
        ),
        pytest.param(
            OWN | {"width": 26, "num_heads": 2, "position": "sincos2d"},
            "width is 26: sincos2d .* a multiple of 4 from 8 on",
            id="a quarter of a width",
        ),
        pytest.param(
            {"position": "2d"},
            "allowed: none, learned_1d, learned_2d, relative, sincos2d, rope2d",
            id="another position",
        ),
        pytest.param({"attention": "axial"}, "class token is in no row .*; give --model.pooling average", id="axial"),
        pytest.param(
            {"attention": "axial", "pooling": "average", "position": "relative"},
            "'axial' with model.position 'relative', .*; give --model.position learned_1d",
            id="axial distances",
        ),
        pytest.param(
            {"attention": "axial", "pooling": "average", "position": "rope2d"},
            "'axial' with model.position 'rope2d'",
            id="axial rotations",
        ),
        pytest.param(
            {"attention": "axial", "pooling": "average", "registers": 4},
            "'axial' with model.registers 4, .*; give --model.registers 0",
            id="axial registers",
        ),
        pytest.param({"attention": "local"}, "attention is 'local'; allowed: global, axial", id="other attention"),
        pytest.param(
            {"name": "bit_r18x1", "attention": "axial"}, "attention is 'axial'; bit_r18x1 is a ResNet", id="axial BiT"
        ),
        pytest.param({"layer_norm_epsilon": 0.0}, "epsilon is 0.0; allowed: above 0", id="no epsilon"),
        pytest.param({"position_std": -0.1}, "position_std is -0.1; allowed: 0 or more", id="negative deviation"),
        pytest.param(
            OWN | {"width": 27, "num_heads": 3, "position": "learned_2d"},
            "width is 27: 2-D .* give an even --model.width",
            id="half of an odd width",
        ),
        pytest.param(
            {"resnet_factor": 2}, "without a ResNet; also give --model.resnet-units", id="a factor of nothing"
        ),
        pytest.param(
            {"name": "r50_vit_b16", "resnet_units": (3, 0)},
            "resnet_units.1 is 0; allowed",
            id="an empty stage",
        ),
        pytest.param({"name": "bit_r50x1", "resnet_units": ()}, "the units of 1 to 8 stages", id="no stage"),
        pytest.param({"name": "bit_r50x1", "resnet_factor": 0}, "resnet_factor is 0; allowed: 1", id="no channels"),
        pytest.param({"name": "r50_vit_b16", "image_size": 230}, "patch (16 px); take 224 or 240", id="hybrid"),
        pytest.param(
            {"name": "bit_r50x1", "representation": True, "depth": 3},
            "depth is 3, model.representation is True; bit_r50x1 is a ResNet",
            id="BiT has no transformer",
        ),
        pytest.param({"layer_scale": -1e-4}, "layer_scale is -0.0001; allowed: 0 .off. or more", id="negative scale"),
        pytest.param({"name": "bit_r50x1", "qk_norm": True}, "qk_norm is True; bit_r50x1 is a ResNet", id="BiT, norms"),
        pytest.param(
            {"pooling": "attention", "masked_patches": True, "num_classes": 512},
            "pooling is 'attention' with model.masked_patches, .*; give --model.pooling average or token",
            id="pooling that nothing trains",
        ),
        pytest.param({"name": "bit_r50x1", "pooling": "attention"}, "pooling is 'attention'; bit_r50x1", id="BiT, MAP"),
        pytest.param(
            {"position": "rope2d", "position_at": "layers"}, "'rope2d', which adds nothing to the input", id="rotary"
        ),
        pytest.param(
            OWN | {"width": 24, "position": "rope2d"},
            "width is 24 with 4 heads: rope2d .* a multiple of 4 channels, not 6; give another",
            id="channels of a head",
        ),
        pytest.param({"registers": -1}, "registers is -1; allowed: 0 .none. to 1,024", id="negative registers"),
        pytest.param(
            {"registers": 4, "position": "relative"}, "registers is 4 with model.position 'relative'", id="relative"
        ),
        pytest.param(
            {"registers": 4, "position_at": "layers"}, "registers is 4 with .* 'layers': registers have no", id="layers"
        ),
        pytest.param({"name": "bit_r50x1", "registers": 4}, "registers is 4; bit_r50x1 is a ResNet", id="BiT, four"),
        pytest.param(
            {"name": "bit_r50x1", "layer_scale": 1e-4}, "layer_scale is 0.0001; bit_r50x1 is a ResNet", id="BiT, scale"
        ),
        pytest.param({"name": "bit_r50x1", "image_size": 0}, "image_size is 0; allowed: 1", id="no pixels"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(").replace(")", r"\)")):
        ModelConfig(**fields)
