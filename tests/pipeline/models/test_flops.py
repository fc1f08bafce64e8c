"""Costs: exact numbers of parameters, operations by formula and counted, and the paper's own pre-training costs."""

import math
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from jobs.recipes.paper_images import JFT
from pipeline.models import ModelConfig, shapes_of, unfilled_model
from pipeline.models.config import NAMES
from pipeline.models.flops import (
    FORWARD_AND_BACKWARD,
    Convolution,
    forward_flops,
    num_parameters,
    skipped_flops,
    training_flops,
)
from pipeline.training.settings.job import OptimizerConfig
from pipeline.training.zero.optimizer import freeze

AXIAL: dict[str, Any] = {"name": "vit_b16", "pooling": "average", "attention": "axial"}
TINY: dict[str, Any] = {"image_size": 32, "depth": 2, "width": 24, "mlp_width": 40, "num_heads": 3, "num_classes": 7}


def jft(name: str) -> ModelConfig:
    """The model as pre-trained on JFT-300M: 18,291 classes, and the hidden layer if the model may have one."""
    return ModelConfig(name=name, num_classes=18_291, representation=not name.startswith("bit"))


def counted_flops(config: ModelConfig) -> int:
    """The same as `forward_flops`, counted while the module runs (on the meta device: no memory, no time)."""
    with torch.device("meta"):
        model = unfilled_model(config).eval()
        images = torch.empty(1, config.image_size, config.image_size, 3, dtype=torch.uint8)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(images)
    return int(counter.get_total_flops())


def counted_parameters(config: ModelConfig) -> int:
    """The same as `num_parameters`, counted in the module."""
    return sum(math.prod(shape) for shape in shapes_of(config).values())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_b32", {}),
        ("vit_b32", {"representation": True}),
        ("bit_r50x1", {}),
        ("bit_r50x1", {"num_classes": 1}),
        ("vit_b32", {"distillation_token": True}),
    ],
)
def test_a_frozen_backbone_passes_nothing_back(name: str, options: dict[str, Any]) -> None:
    """Counted by PyTorch, with gradients for the head alone."""
    config = ModelConfig(name=name, **{"num_classes": 7, **options})
    with torch.device("meta"):
        model = unfilled_model(config).eval()
        images = torch.empty(2, config.image_size, config.image_size, 3, dtype=torch.uint8)
    freeze(model, OptimizerConfig(freeze_backbone=True))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    assert counter.get_total_flops() == 2 * training_flops(config, is_frozen=True)
    assert training_flops(config) == 3 * forward_flops(config)


@pytest.mark.parametrize(
    ("name", "without_head", "with_1k", "with_21k", "with_21k_and_hidden"),
    [
        ("vit_b16", 85_798_656, 86_567_656, 102_595_923, 103_186_515),
        ("vit_l16", 303_301_632, 304_326_632, 325_690_707, 326_740_307),
        ("vit_h14", 630_764_800, 632_045_800, 658_745_683, 660_385_363),
        ("r50_vit_b16", 97_890_112, 98_659_112, 114_687_379, 115_277_971),
        ("r50_vit_l32", 327_969_856, 328_994_856, 350_358_931, 351_408_531),
    ],
)
def test_parameters_to_the_integer(
    name: str, without_head: int, with_1k: int, with_21k: int, with_21k_and_hidden: int
) -> None:
    large: dict[str, Any] = {"name": name, "num_classes": 21_843}
    assert num_parameters(ModelConfig(name=name), head=False) == without_head
    assert num_parameters(ModelConfig(name=name)) == counted_parameters(ModelConfig(name=name)) == with_1k
    assert num_parameters(ModelConfig(**large)) == counted_parameters(ModelConfig(**large)) == with_21k
    with_hidden = ModelConfig(**large, representation=True)
    assert num_parameters(with_hidden) == counted_parameters(with_hidden) == with_21k_and_hidden
    assert num_parameters(with_hidden, head=False) == without_head


@pytest.mark.parametrize(("name", "millions"), [("vit_g14", 1011), ("vit_bigg14", 1843)])
def test_g_and_big_g_are_as_large_as_published(name: str, millions: int) -> None:
    """The number of parameters is that of "Scaling Vision Transformers", Table 2, up to the kind of pooling."""
    assert round(num_parameters(ModelConfig(name=name, pooling="average"), head=False) / 1e6) == millions


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(ModelConfig(name="vit_l16", image_size=512), 305_174_504, id="L/16 fine-tuned at 512"),
        pytest.param(ModelConfig(name="vit_h14", image_size=518), 633_470_440, id="H/14 fine-tuned at 518"),
        pytest.param(jft("vit_b16"), 100_455_027, id="B/16 on JFT-300M, with its hidden layer"),
        pytest.param(jft("vit_l16"), 323_099_507, id="L/16 on JFT-300M, with its hidden layer"),
        pytest.param(jft("vit_h14"), 655_835_251, id="H/14 on JFT-300M, with its hidden layer"),
        pytest.param(ModelConfig(name="vit_s32"), 22_878_952, id="S/32, as timm's vit_small_patch32_224"),
        pytest.param(ModelConfig(name="vit_b8"), 86_576_872, id="B/8, as timm's vit_base_patch8_224"),
        pytest.param(ModelConfig(name="r26_vit_s32"), 36_431_912, id="R26+S/32, as timm's vit_small_r26_s32_224"),
        pytest.param(ModelConfig(name="r_vit_ti16"), 6_337_704, id="R+Ti/16, as timm's vit_tiny_r_s16_p8_224"),
        pytest.param(
            ModelConfig(name="vit_ti16", distillation_token=True), 5_910_800, id="as timm's deit_tiny_distilled"
        ),
        pytest.param(
            ModelConfig(name="vit_b16", distillation_token=True), 87_338_192, id="as timm's deit_base_distilled"
        ),
        pytest.param(ModelConfig(name="bit_r50x1"), 25_549_352, id="R50x1, as timm's resnetv2_50x1_bit"),
        pytest.param(ModelConfig(name="bit_r152x4"), 936_533_224, id="R152x4, as timm's resnetv2_152x4_bit"),
        # torchvision's resnet18 has 11,689,512, resnet34 21,797,672. With pre-activation, the root (64 channels) and
        # the three shortcuts (128 + 256 + 512) have no norm, the first norms of stages 2 to 4 have half the channels
        # (64 + 128 + 256 fewer), and there is a last norm of 512: 896 scales and 896 shifts fewer.
        pytest.param(ModelConfig(name="bit_r18x1"), 11_689_512 - 2 * 896, id="R18, as timm's resnetv2_18"),
        pytest.param(ModelConfig(name="bit_r34x1"), 21_797_672 - 2 * 896, id="R34, as timm's resnetv2_34"),
    ],
)
def test_parameters_of_other_sizes(config: ModelConfig, expected: int) -> None:
    assert num_parameters(config) == counted_parameters(config) == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_formulas_are_what_the_modules_do(name: str) -> None:
    config = ModelConfig(name=name)
    assert num_parameters(config) == counted_parameters(config)
    assert forward_flops(config) == counted_flops(config)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"name": "vit_b16", "pooling": "average"}, id="no class token"),
        pytest.param({"name": "vit_b16", "position": "learned_2d"}, id="2-D position embeddings"),
        pytest.param({"name": "vit_b16", "position": "none"}, id="no position embeddings"),
        pytest.param({"name": "vit_s16", "position": "sincos2d", "pooling": "average"}, id="fixed sines"),
        pytest.param({"name": "vit_b16", "position": "relative"}, id="relative positions"),
        pytest.param({"name": "vit_b16", "position_at": "layers"}, id="1-D positions at each layer"),
        pytest.param({"name": "vit_b16", "position_at": "layers_shared"}, id="the same positions at each layer"),
        pytest.param({"position": "learned_2d", "position_at": "layers"}, id="2-D positions at each layer"),
        pytest.param({"name": "vit_b16", "representation": True}, id="a hidden layer"),
        pytest.param({"name": "vit_b16", "layer_scale": 1e-4}, id="LayerScale"),
        pytest.param({"name": "vit_b16", "qk_norm": True}, id="norms of queries and keys"),
        pytest.param({"name": "vit_b16", "pooling": "attention"}, id="attention pooling"),
        pytest.param(
            {"name": "vit_b16", "pooling": "attention", "registers": 2, "representation": True}, id="the same"
        ),
        pytest.param({"name": "vit_b16", "position": "rope2d", "num_heads": 2}, id="rotary positions"),
        pytest.param({"position": "learned_rope2d", "num_heads": 2, "registers": 2}, id="rotary and learned positions"),
        pytest.param({"mlp": "swiglu", "inner_norms": "mlp"}, id="SwiGLU with a norm inside"),
        pytest.param({"inner_norms": "both", "last_norm": "none", "gelu": "quick"}, id="norms inside alone"),
        pytest.param({"first_norm": True, "last_norm": "pooled", "pooling": "average"}, id="a norm before the layers"),
        pytest.param({"norm": "rmsnorm", "patch_norm": True, "mlp": "swiglu", "pooling": "average"}, id="AIMv2"),
        pytest.param(
            {"norm": "rmsnorm", "first_norm": True, "qk_norm": True, "inner_norms": "both", "pooling": "attention"},
            id="RMSNorm in all places",
        ),
        pytest.param({"mlp": "swiglu", "pooling": "attention", "last_norm": "none"}, id="attention pooling has a GELU"),
        pytest.param({"name": "vit_b16", "registers": 4}, id="registers"),
        pytest.param({"name": "vit_b16", "distillation_token": True}, id="a distillation token"),
        pytest.param({"distillation_token": True, "registers": 2, "mlp": "swiglu"}, id="with registers"),
        pytest.param({"name": "vit_b16", "registers": 4, "pooling": "average"}, id="registers, no class token"),
        pytest.param({**AXIAL, "position": "learned_2d"}, id="axial attention"),
        pytest.param({**AXIAL, "position_at": "layers"}, id="axial, each block its own positions"),
        pytest.param(
            {"name": "r50_vit_b16", "resnet_units": (1, 2), "resnet_factor": 2, "patch": 2}, id="patches of 2"
        ),
    ],
)
def test_the_formulas_hold_for_models_of_ones_own(fields: dict[str, Any]) -> None:
    config = ModelConfig(**(TINY | fields))
    assert num_parameters(config) == counted_parameters(config)
    assert forward_flops(config) == counted_flops(config)


@pytest.mark.parametrize(
    ("fields", "rates"),
    [
        ({"name": "vit_b16"}, (0, 0.25, 0.5)),
        ({"name": "vit_b16", "position": "relative"}, (0, 0.25, 0.5)),
        ({"name": "vit_b16", "stochastic_depth_rates": "uniform"}, (0.5, 0.5, 0.5)),
    ],
)
def test_operations_that_stochastic_depth_skips(fields: dict[str, Any], rates: tuple[float, ...]) -> None:
    """Counted while the module runs on 8 images, of which each block keeps as many as its rate says."""
    config = ModelConfig(**(TINY | {"depth": 3, "stochastic_depth": 0.5} | fields))
    assert config.skipped_rates == rates
    with torch.device("meta"):
        model = unfilled_model(config)
        images = torch.empty(8, 32, 32, 3, dtype=torch.uint8)
        kept = [(torch.empty(int(8 * (1 - rate)), dtype=torch.int64),) * 2 if rate else None for rate in rates]
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(images, torch.empty(3, 8, 2), None, kept)
    assert counter.get_total_flops() == 8 * (forward_flops(config) - skipped_flops(config))
    computed = forward_flops(config) - skipped_flops(config)
    assert training_flops(config, skips_branches=True) == 3 * computed < training_flops(config)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "vit_b16", "registers": 2},
        {"name": "vit_b16", "pooling": "attention", "patch": 8},
        {"name": "vit_b16", "patch": 4, "stochastic_depth": 0.5},
        {"name": "r50_vit_b16", "resnet_units": (1,)},
    ],
)
def test_operations_of_patches_that_patch_dropout_leaves_out(fields: dict[str, Any]) -> None:
    """Counted while the module runs: the embedding has all patches, the blocks those that stay."""
    config = ModelConfig(**(TINY | fields))
    with torch.device("meta"):
        model = unfilled_model(config)
        images, stay = torch.empty(1, 32, 32, 3, dtype=torch.uint8), torch.empty(1, 2, dtype=torch.int64)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(images, stay_BS=stay)
    assert counter.get_total_flops() == forward_flops(config, num_stay=2) < forward_flops(config)
    is_deep = config.stochastic_depth > 0
    assert (0 < skipped_flops(config, num_stay=2) < skipped_flops(config)) is is_deep


def test_nothing_is_skipped_without_stochastic_depth_and_in_resnets() -> None:
    assert skipped_flops(ModelConfig(name="vit_b16", stochastic_depth=0.1)) == 0, "too few to gather the others"
    assert skipped_flops(ModelConfig(name="vit_b16")) == skipped_flops(ModelConfig(name="bit_r50x1")) == 0


@pytest.mark.parametrize(
    ("name", "parameters", "multiplies"),
    [
        # Patches, positions, 24 blocks, the last norm and the head. Multiply-adds: for each of 196 or 49 tokens, the
        # patch's, and 24 times a block's matrices and two products with 14 or 7 tokens of width 768; then the head's.
        pytest.param(
            "vit_b16",
            590_592 + 196 * 768 + 24 * 7_087_872 + 1_536 + 769_000,
            196 * (768 * 768 + 24 * (7_077_888 + 2 * 14 * 768)) + 768_000,
            id="Axial-ViT-B/16",
        ),
        pytest.param(
            "vit_b32",
            2_360_064 + 49 * 768 + 24 * 7_087_872 + 1_536 + 769_000,
            49 * (3072 * 768 + 24 * (7_077_888 + 2 * 7 * 768)) + 768_000,
            id="Axial-ViT-B/32",
        ),
    ],
)
def test_axial_models_by_hand(name: str, parameters: int, multiplies: int) -> None:
    config = ModelConfig(**(AXIAL | {"name": name}))
    assert num_parameters(config) == counted_parameters(config) == parameters
    assert forward_flops(config) == counted_flops(config) == 2 * multiplies
    assert 1.85 < forward_flops(config) / forward_flops(ModelConfig(name=name)) < 2, "an extra MLP (appendix D.6)"


def test_vit_b_is_as_large_as_s() -> None:
    """Figure 4's ViT-b/32 and AugReg's S/32 differ in their heads, which have no parameters of their own."""
    half, s = ModelConfig(name="vit_b32_half"), ModelConfig(name="vit_s32")
    assert num_parameters(half) == counted_parameters(half) == num_parameters(s) == 22_878_952
    assert forward_flops(half) == counted_flops(half) == forward_flops(s)


def test_the_head_is_two_operations_a_weight() -> None:
    config = ModelConfig(num_classes=18_291)
    assert forward_flops(config) - forward_flops(config, head=False) == 2 * 768 * 18_291


@pytest.mark.parametrize(
    ("config", "giga"),  # worked out by hand, without the head
    [
        (ModelConfig(name="vit_b16"), 35.1),
        (ModelConfig(name="vit_l16"), 123.1),
        (ModelConfig(name="vit_h14"), 334.6),
        (ModelConfig(name="vit_l16", image_size=384), 382.1),
        (ModelConfig(name="vit_l16", image_size=512), 724.0),
        (ModelConfig(name="vit_h14", image_size=518), 2033.4),
    ],
)
def test_forward_operations_in_units_of_a_billion(config: ModelConfig, giga: float) -> None:
    assert forward_flops(config, head=False) / 1e9 == pytest.approx(giga, abs=0.05)


# The paper's Table 6: name, epochs over JFT-300M, its exaFLOPs, and the allowed difference of ours, with all taps of
# the convolutions and without those on padding. The aim is 0.2 % or the paper's rounding; larger differences are given.
# All 1,728 combinations of these were tried: head or none, hidden layer or none, class token or none, taps on padding,
# attention's products or not, 300 or 303 million images, no gradient of the first layer's input, additions and norms
# counted or not, weights standardised once per batch or not, a unit's stride in its first convolution. None gives all
# rows; the best gives 13, with a guessed cost of a norm and 8 images per device. B/16 to B/32 is 4.02 or more in
# the paper, which only 49 tokens give; L/16 to L/32 is 4.01 or less, which only 50 do.
TABLE_6 = [
    pytest.param("vit_b32", 7, 55, 0.0235, 0.0235, id="ViT-B/32: 56.3, 2.3 % above, unexplained"),
    pytest.param("vit_b16", 7, 224, 0.002, 0.002, id="ViT-B/16"),
    pytest.param("vit_l32", 7, 196, 0.001, 0.001, id="ViT-L/32"),
    pytest.param("vit_l16", 7, 783, 0.001, 0.001, id="ViT-L/16, 7 epochs"),
    pytest.param("vit_l16", 14, 1567, 0.001, 0.001, id="ViT-L/16, 14 epochs"),
    pytest.param("vit_h14", 14, 4262, 0.001, 0.001, id="ViT-H/14"),
    pytest.param("bit_r50x1", 7, 50, 0.050, 0.0141, id="R50x1: 50.7, 1.4 % above (its head is 1 %)"),
    pytest.param("bit_r50x2", 7, 199, 0.0353, 0.001, id="R50x2"),
    pytest.param("bit_r101x1", 7, 96, 0.039, 0.0041, id="R101x1: 95.6, its rounding"),
    pytest.param("bit_r152x1", 7, 141, 0.0425, 0.002, id="R152x1"),
    pytest.param("bit_r152x2", 7, 563, 0.0373, 0.0067, id="R152x2, 7 epochs: 559.3, 0.7 % below"),
    pytest.param("bit_r152x2", 14, 1126, 0.0373, 0.0067, id="R152x2, 14 epochs: 1118.6, 0.7 % below"),
    pytest.param("bit_r200x3", 14, 3306, 0.0352, 0.0045, id="R200x3: 3291.3, 0.4 % below"),
    pytest.param("r50_vit_b32", 7, 106, 0.0171, 0.001, id="R50+ViT-B/32"),
    pytest.param(
        "r50_vit_b16", 7, 274, 0.001, 0.0048, id="R50+ViT-B/16: 272.7 inside, 0.5 % below; 274.2 with all taps"
    ),
    pytest.param("r50_vit_l32", 7, 246, 0.0053, 0.0021, id="R50+ViT-L/32: 245.5, 0.2 % below"),
    pytest.param(
        "r50_vit_l16", 7, 859, 0.0288, 0.0306, id="R50+ViT-L/16: 832.8, not half of the paper's own 14 epochs"
    ),
    pytest.param("r50_vit_l16", 14, 1668, 0.001, 0.002, id="R50+ViT-L/16, 14 epochs"),
]


@pytest.mark.parametrize(("name", "epochs", "paper", "all_taps", "inside"), TABLE_6)
def test_the_papers_pre_training_costs(name: str, epochs: int, paper: int, all_taps: float, inside: float) -> None:
    for skip_padding, most in ((False, all_taps), (True, inside)):
        images = JFT.num_images * epochs
        exa = FORWARD_AND_BACKWARD * forward_flops(jft(name), skip_padding=skip_padding) * images / 1e18
        assert abs(exa / paper - 1) <= most, f"{exa:.2f} exaFLOPs, the paper has {paper}"


@pytest.mark.parametrize(("name", "giga"), [("bit_r18x1", 1.81), ("bit_r34x1", 3.66)])
def test_resnet_18_and_34_cost_what_torchvision_publishes(name: str, giga: float) -> None:
    """In multiply-adds, as on its models' pages; "Deep Residual Learning", Table 1, has 1.8 and 3.6."""
    assert forward_flops(ModelConfig(name=name)) / 2e9 == pytest.approx(giga, abs=0.005)


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "all_taps", "inside"),
    [
        pytest.param(4, 3, 1, 12, 10, id="one tap at each end is on padding"),
        pytest.param(4, 3, 2, 6, 5, id="one at the end"),
        pytest.param(4, 1, 2, 2, 2, id="no padding"),
        pytest.param(1, 3, 1, 3, 1, id="one place"),
    ],
)
def test_taps_on_padding(size: int, kernel: int, stride: int, all_taps: int, inside: int) -> None:
    one = Convolution(map_size=(size, size), channels_in=5, channels_out=7, kernel=kernel, stride=stride)
    assert one.num_multiplies(skip_padding=False) == all_taps**2 * 35
    assert one.num_multiplies(skip_padding=True) == inside**2 * 35
