"""What decays, in which group, and what one step does."""

from typing import Any

import pytest
import torch

from pipeline.models import ModelConfig, build_model
from pipeline.training.optimizer import OptimizerConfig, build_optimizer, is_decayed
from shards.errors import UserError

MODEL = ModelConfig(
    name="vit", image_size=8, patch=4, depth=1, width=8, mlp_width=12, num_heads=2, num_classes=3, representation=True
)
KERNELS = {
    "embed.patch.weight",
    "blocks.0.attention.qkv.weight",
    "blocks.0.attention.out.weight",
    "blocks.0.mlp.dense1.weight",
    "blocks.0.mlp.dense2.weight",
    "representation.weight",
    "head.weight",
}


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        pytest.param("kernels", KERNELS, id="big_vision's mask: no bias, norm, class token or position"),
        pytest.param("all", {name for name, _ in build_model(MODEL).named_parameters()}, id="every parameter"),
    ],
)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_groups(decay: Any, expected: set[str], name: Any) -> None:
    model = build_model(MODEL)
    config = OptimizerConfig(name=name, weight_decay=0.1, decay=decay)
    optimizer = build_optimizer(model.named_parameters(), config)
    names = {parameter: name for name, parameter in model.named_parameters()}
    by_decay = {group["weight_decay"]: {names[p] for p in group["params"]} for group in optimizer.param_groups}
    assert by_decay[0.1] == expected
    assert by_decay.get(0.0, set()) == set(names.values()) - expected
    assert {group["lr"] for group in optimizer.param_groups} == {0.0}, "the loop sets the rate at each step"


@pytest.mark.parametrize(
    ("name", "decayed"),
    [
        ("head.weight", True),
        ("head.bias", False),
        ("norm.weight", False),
        ("blocks.7.norm1.weight", False),
        ("blocks.7.norm2.bias", False),
        ("embed.class_token", False),
        ("embed.position", False),
    ],
)
def test_the_mask_by_name(name: str, decayed: bool) -> None:
    assert is_decayed(name, OptimizerConfig()) == decayed
    assert is_decayed(name, OptimizerConfig(decay="all"))


def one_step(config: OptimizerConfig, *, rate: float, gradient: float) -> torch.Tensor:
    """The weight 2.0 after one step."""
    weight = torch.nn.Parameter(torch.full((1, 1), 2.0))
    optimizer = build_optimizer([("head.weight", weight)], config)
    weight.grad = torch.full((1, 1), gradient)
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    return weight.detach()


def test_adams_decay_is_decoupled_and_scaled_by_the_rate() -> None:
    config = OptimizerConfig(weight_decay=0.1)
    expected = 2.0 - 0.01 * (1.0 + 0.1 * 2.0)  # Adam's first step is the rate, whatever the gradient
    assert float(one_step(config, rate=0.01, gradient=7.0)) == pytest.approx(expected, rel=1e-6)


def test_sgd_is_momentum_without_decay() -> None:
    config = OptimizerConfig(name="sgd", momentum=0.9)
    weight = torch.nn.Parameter(torch.full((1, 1), 2.0))
    optimizer = build_optimizer([("head.weight", weight)], config)
    optimizer.param_groups[0]["lr"] = 0.1
    for gradient in (1.0, 1.0):
        weight.grad = torch.full((1, 1), gradient)
        optimizer.step()
    assert float(weight.detach()) == pytest.approx(2.0 - 0.1 * 1.0 - 0.1 * 1.9)


@pytest.mark.parametrize(
    "fields",
    [{"beta1": 1.0}, {"beta2": -0.1}, {"momentum": 1.5}, {"weight_decay": -0.1}],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="allowed are betas and momentum from 0 to below 1"):
        OptimizerConfig(**fields)
