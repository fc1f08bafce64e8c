"""Adafactor's updates are those of timm's copy of big_vision's, in every stage and on any number of ranks, if the
kernels have flax's axes; its moments lie where checkpoints find them."""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from pipeline.models import ModelConfig, shapes_of
from pipeline.training.settings.job import OptimizerConfig
from pipeline.training.zero.adafactor import Factoring, factorings_of
from pipeline.training.zero.flat_blocks import HeldPart, ParameterPlace
from pipeline.training.zero.optimizer import build_optimizer, decay_of
from tests.pipeline.models.parity import imported
from tests.rigs.given_gradients import NUM_UPDATES, RATE, after_our_updates, gradient, initial, largest_difference
from tests.rigs.processes import run_ranks

MODEL = ModelConfig(
    name="vit",
    image_size=48,
    patch=8,
    depth=1,
    width=64,
    mlp_width=96,
    num_heads=2,
    num_classes=33,
    pooling="attention",
)
CONFIG = OptimizerConfig(name="adafactor", weight_decay=0.05, head_decay=2.0)
AXES = {  # of flax's kernels, with the axes that torch's matrices have in another order left in torch's
    "qkv.weight": (6, 32, 64),
    "query.weight": (2, 32, 64),
    "key_value.weight": (4, 32, 64),
    "out.weight": (64, 2, 32),
    "patch.weight": (64, 3, 8, 8),
}


def axes_of(name: str) -> tuple[int, ...]:
    return AXES.get(".".join(name.split(".")[-2:]), shapes_of(MODEL)[name])


def after_timms_updates() -> dict[str, torch.Tensor]:
    """timm's lerp of r is not the sum of two products, so the last bits differ."""
    weights = {name: torch.nn.Parameter(initial(MODEL, name).reshape(axes_of(name))) for name in shapes_of(MODEL)}
    groups = [{"params": [weight], "weight_decay": decay_of(name, CONFIG)} for name, weight in weights.items()]
    timm: Any = imported("timm.optim.adafactor_bv")
    optimizer = timm.AdafactorBigVision(groups, lr=RATE, min_dim_size_to_factor=32, momentum_dtype=torch.float32)
    for update in range(NUM_UPDATES):
        for name, weight in weights.items():
            weight.grad = gradient(MODEL, name, update).reshape(axes_of(name))
        optimizer.step()
    return {name: weight.detach().flatten() for name, weight in weights.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "num_ranks"),
    [
        pytest.param(1, 1, marks=pytest.mark.long),
        pytest.param(1, 3, marks=pytest.mark.long),
        pytest.param(2, 2, marks=pytest.mark.long),
        (3, 2),
    ],
)
def test_updates_are_big_visions(stage: int, num_ranks: int) -> None:
    found = run_ranks(after_our_updates, MODEL, CONFIG, stage, 0.0, num_ranks=num_ranks)
    difference, name = largest_difference(found, after_timms_updates())
    assert difference < 1e-6, name


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("blocks.0.attention.qkv.weight", (192, 64), (6, 32, 1, 64)),
        ("blocks.0.attention.out.weight", (64, 64), (1, 64, 2, 32)),
        ("pool.key_value.weight", (128, 64), (4, 32, 1, 64)),
        ("blocks.0.mlp.dense1.weight", (96, 64), (1, 96, 1, 64)),
        ("embed.position", (1, 36, 64), (1, 36, 1, 64)),
        pytest.param("embed.patch.weight", (64, 192), None, id="flax's axes: 8, 8, 3, 64"),
        pytest.param("blocks.0.attention.qkv.bias", (192,), None, id="flax's axes: heads, 32"),
        pytest.param("pool.probe", (1, 1, 64), None, id="a vector"),
        pytest.param("head.weight", (31, 64), None, id="too few classes"),
    ],
)
def test_kernels_are_factored_along_flaxs_axes(
    name: str, shape: tuple[int, ...], expected: tuple[int, int, int, int] | None
) -> None:
    found = factorings_of([ParameterPlace(name=name, shape=shape)], num_heads=2).get(0)
    assert (found and (found.groups, found.rows, found.blocks, found.columns)) == expected
    if found:
        assert found.num_moments < ParameterPlace(name=name, shape=shape).numel, "they fit in the second moment's place"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_skipped_update_changes_nothing(precision: Literal["fp32", "bf16"]) -> None:
    """Its gradient is NaN. It may be the first one, before the moments have values."""
    weights = torch.nn.Parameter(torch.randn(10, generator=torch.Generator().manual_seed(1)))
    optimizer: Any = build_optimizer([("norm.weight", weights)], replace(CONFIG, first_moment=precision))
    optimizer.parts = {
        weights: [HeldPart(number=0, first=0, start=0, end=8), HeldPart(number=1, first=0, start=8, end=10)]
    }
    optimizer.about = {"factorings": {0: Factoring(groups=1, rows=2, blocks=1, columns=4)}}
    optimizer.param_groups[0] |= {"lr": 0.1, "weight_decay": 0.1}
    state = optimizer.state[weights]
    for given in (torch.full((10,), torch.nan), torch.arange(1.0, 11.0), torch.full((10,), torch.nan)):
        is_skipped = given.isnan().any()
        before = {name: value.detach().clone() for name, value in {"weights": weights, **state}.items()}
        weights.grad, optimizer.found_inf = given, is_skipped.float()
        optimizer.step()
        now = {"weights": weights, **state}
        # Moments are zero before the first update.
        same = {name for name, value in now.items() if torch.equal(value, before.get(name, torch.zeros_like(value)))}
        assert same == (set(now) if is_skipped else set())
    assert state["exp_avg"].dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    squares = torch.arange(1.0, 9.0).square().view(2, 4)
    expected = torch.cat([squares.mean(1), squares.mean(0), torch.zeros(2), torch.tensor([81.0, 100.0])])
    torch.testing.assert_close(state["exp_avg_sq"], expected, msg="rows, columns, nothing, and all of a vector")
