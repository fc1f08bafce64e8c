"""Layers and their rates by name: as timm's, and as written out."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from pipeline.models import ModelConfig, build_model
from pipeline.models.build import Model, shapes_of
from pipeline.training.settings.job import OptimizerConfig
from pipeline.training.zero.optimizer import RATE_FACTOR, build_optimizer, freeze, is_trained, rate_factors
from shards.errors import UserError
from tests.pipeline.models.names_elsewhere import bit_as_timm, vit_as_timm
from tests.pipeline.models.parity import imported

VIT = ModelConfig(name="vit", image_size=32, patch=8, depth=3, width=16, mlp_width=24, num_heads=2, num_classes=5)
BIT = ModelConfig(name="bit_r50x1", image_size=32, num_classes=5, resnet_units=(2, 3))
HYBRID = ModelConfig(name="r50_vit_b16", num_classes=5, resnet_units=(1, 2), depth=2, image_size=32)


@pytest.fixture(scope="module")
def optim() -> ModuleType:
    return imported("timm.optim")


def numbered(config: ModelConfig) -> tuple[Model, list[str]]:
    """A model whose tensors hold their own numbers, and their names by number."""
    model = build_model(config)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number)
    return model, [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("config", [VIT, BIT], ids=["vit", "bit"])
def test_rates_are_those_of_timm(optim: ModuleType, config: ModelConfig) -> None:
    """Every parameter's, against param_groups_layer_decay of timm's own model."""
    models = imported("timm.models")
    model, names = numbered(config)
    if config is VIT:
        theirs = models.VisionTransformer(
            img_size=32, patch_size=8, depth=3, embed_dim=16, num_heads=2, mlp_ratio=1.5, num_classes=5
        )
        state = vit_as_timm(model)
    else:
        theirs = models.resnetv2.ResNetV2(layers=(2, 3), num_classes=5, stem_type="fixed")
        state = bit_as_timm(model)
    names_of = {id(parameter): name for name, parameter in theirs.named_parameters()}
    groups = optim.param_groups_layer_decay(theirs, layer_decay=0.65)
    expected = {names_of[id(each)]: group["lr_scale"] for group in groups for each in group["params"]}
    factors = rate_factors(names, OptimizerConfig(layer_decay=0.65))
    found = {name: factors[names[int(value.flatten()[0])]] for name, value in state.items()}
    assert found == pytest.approx(expected, rel=1e-12)
    assert len(set(found.values())) == (5 if config is VIT else 7)


@pytest.mark.parametrize(
    ("config", "name", "power"),
    [
        (VIT, "embed.position", 4),
        (replace(VIT, registers=2), "embed.registers", 4),
        (VIT, "blocks.0.norm1.bias", 3),
        (VIT, "blocks.2.mlp.dense1.weight", 1),
        (VIT, "norm.weight", 1),
        (replace(VIT, layer_scale=0.1), "blocks.1.scale2.gamma", 2),
        (VIT, "head.bias", 0),
        (replace(VIT, pooling="attention"), "pool.key_value.weight", 0),
        (replace(VIT, pooling="attention"), "norm.weight", 1),
        (HYBRID, "embed.resnet.stages.1.1.conv1.weight", 3),
        (HYBRID, "embed.patch.weight", 3),
        (HYBRID, "blocks.0.attention.qkv.weight", 2),
        (BIT, "conv_root.weight", 6),
        (BIT, "stages.0.0.norm1.weight", 5),
        (BIT, "stages.1.2.conv3.weight", 1),
    ],
)
def test_rates_written_out(config: ModelConfig, name: str, power: int) -> None:
    factors = rate_factors(shapes_of(config), OptimizerConfig(layer_decay=0.5))
    assert factors[name] == 0.5**power
    assert set(rate_factors(shapes_of(config), OptimizerConfig()).values()) == {1.0}


def test_the_hidden_layer_belongs_to_the_head() -> None:
    config = OptimizerConfig(layer_decay=0.5, freeze_backbone=True)
    assert rate_factors(["representation.weight", "blocks.0.norm1.bias", "head.bias"], config) == {
        "representation.weight": 1.0,
        "blocks.0.norm1.bias": 0.5,
        "head.bias": 1.0,
    }
    assert is_trained("representation.weight", config)


def test_a_group_for_each_decay_and_rate() -> None:
    model = build_model(VIT)
    optimizer = build_optimizer(model.named_parameters(), OptimizerConfig(weight_decay=0.1, layer_decay=0.5))
    found = {(group["weight_decay"], group[RATE_FACTOR]): len(group["params"]) for group in optimizer.param_groups}
    blocks: dict[Any, int] = {(0.1, 0.5**power): 4 for power in (1, 2, 3)}
    blocks |= {(0.0, 0.5): 10, (0.0, 0.25): 8, (0.0, 0.125): 8}
    assert found == blocks | {(0.1, 1.0): 1, (0.0, 1.0): 1, (0.1, 0.0625): 1, (0.0, 0.0625): 3}


@pytest.mark.parametrize("config", [VIT, BIT, HYBRID], ids=["vit", "bit", "hybrid"])
def test_a_frozen_backbone_is_all_but_the_head(config: ModelConfig) -> None:
    model, optimizer = build_model(config), OptimizerConfig(freeze_backbone=True)
    freeze(model, optimizer)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"head.weight", "head.bias"}
    groups = build_optimizer(model.named_parameters(), optimizer).param_groups
    assert sum(len(group["params"]) for group in groups) == 2
    freeze(model, OptimizerConfig())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("value", [0.0, -0.5, 1.5])
def test_impossible_factors_are_refused(value: float) -> None:
    with pytest.raises(UserError, match=r"optimizer\.layer_decay is .*; allowed: above 0 to 1$"):
        OptimizerConfig(layer_decay=value)
