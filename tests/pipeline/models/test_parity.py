"""With the same weights, the logits differ from timm's and Hugging Face's by less than 2e-5 in fp32."""

from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from pipeline.models import ModelConfig
from tests.pipeline.models.names_elsewhere import bit_as_timm, vit_as_timm
from tests.pipeline.models.parity import (
    BOUND,
    HEADER,
    NUM_CLASSES,
    ROWS,
    Row,
    difference,
    difference_of,
    random_images,
    random_model,
    theirs_of,
    words_of,
)


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.title, marks=[pytest.mark.long] if row.is_long else []) for row in ROWS]
)
def test_logits(row: Row) -> None:
    assert difference_of(row) < BOUND


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"gelu": "exact"}, id="exact GELU for the tanh approximation: 1.7e-4 apart"),
        pytest.param({"layer_norm_epsilon": 1e-12}, id="Hugging Face's epsilon for the paper's: 1.1e-4 apart"),
    ],
)
def test_the_bound_tells_one_setting_from_another(fields: dict[str, Any]) -> None:
    images, config = random_images(224, 224), ModelConfig(name="vit_ti16", num_classes=NUM_CLASSES)
    other = random_model(replace(config, **fields))
    assert difference(random_model(config), lambda _: other(images), images) > 2 * BOUND


def test_each_row_is_in_the_table_once() -> None:
    assert len({words_of(row) for row in ROWS}) == len(ROWS)
    assert {len(words_of(row)) for row in ROWS} == {len(HEADER) - 1}


@pytest.mark.parametrize("epsilons", ["timm", "paper"])
def test_in_fp64_the_resnets_differ_by_their_epsilons_alone(timm: ModuleType, epsilons: Any) -> None:
    """In fp32 the rest is rounding. The paper's epsilons differ from timm's, hence the field."""
    images = random_images(48, 80)
    transformer: dict[str, Any] = {"patch": 2, "depth": 1, "width": 32, "mlp_width": 32, "num_heads": 2}
    fields: dict[str, Any] = {"image_size": 48, "resnet_units": (2, 2), "resnet_epsilons": epsilons}
    hybrid = random_model(ModelConfig(name="r50_vit_b16", **transformer, **fields)).double()
    bit = random_model(ModelConfig(name="bit_r50x1", **fields)).double()
    basic = random_model(ModelConfig(name="bit_r18x1", **fields)).double()
    build, layers = timm.models.resnetv2.ResNetV2, timm.layers
    headless = {"layers": (2, 2), "num_classes": 0}
    same, even = (partial(kind, eps=1e-8) for kind in (layers.StdConv2dSame, layers.StdConv2d))
    their_hybrid = build(**headless, global_pool="", preact=False, stem_type="same", conv_layer=same).double()
    their_hybrid.load_state_dict(
        {
            name.removeprefix("patch_embed.backbone."): value
            for name, value in vit_as_timm(hybrid).items()
            if "backbone" in name
        }
    )
    their_bit = build(**headless, stem_type="fixed", conv_layer=even).double()
    their_bit.load_state_dict({name: value for name, value in bit_as_timm(bit).items() if "head" not in name})
    smaller: dict[str, Any] = {"basic": True, "channels": (64, 128), "bottle_ratio": 1.0}
    their_basic = build(**headless, **smaller, stem_type="fixed", conv_layer=even).double()
    their_basic.load_state_dict({name: value for name, value in bit_as_timm(basic).items() if "head" not in name})
    x_BCHW = theirs_of(images).double()
    with torch.no_grad():
        map_BHWC = hybrid.get_submodule("embed.resnet")(x_BCHW.permute(0, 2, 3, 1))
        pairs = [(map_BHWC.permute(0, 3, 1, 2), their_hybrid(x_BCHW)), (bit.features(images), their_bit(x_BCHW))]
        pairs.append((basic.features(images), their_basic(x_BCHW)))
    for ours, expected in pairs:
        assert ours.shape == expected.shape
        assert (float((ours - expected).abs().max()) < 1e-11) == (epsilons == "timm")
