"""A block with flat tensors computes what it computed before, and they hold its parameters as the layout says."""

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.models import ModelConfig, build_model, shapes_of
from pipeline.models.config import NormKind
from pipeline.models.recompute import recompute_selectively
from pipeline.training.settings.job import OptimizerConfig
from pipeline.training.zero.flat_blocks import flatten_blocks, layout_of, views_of
from pipeline.training.zero.optimizer import ways_of

VIT = ModelConfig(name="vit", image_size=16, num_classes=3, patch=8, depth=2, width=24, mlp_width=40, num_heads=2)
ADAMW = OptimizerConfig(weight_decay=0.1)


def test_a_layout_has_a_tensor_for_each_way_that_parameters_of_a_block_are_updated() -> None:
    """Each parameter begins at a multiple of 64 elements; those outside of blocks and frozen ones stay alone."""
    shapes = {"embed.patch.weight": (8, 3), "blocks.0.mlp.weight": (10, 8), "blocks.0.mlp.bias": (10,)}
    shapes |= {"blocks.0.out.weight": (8, 10), "blocks.1.mlp.weight": (10, 8), "embed.resnet.stages.0.1.conv": (3, 3)}
    layout = layout_of(shapes, {name: name.endswith("weight") for name in shapes if name != "blocks.1.mlp.weight"})
    assert {name: [(place.name, place.start) for place in places] for name, places in layout.items()} == {
        "embed.patch.weight": [("embed.patch.weight", 0)],
        "blocks.0.flat_0": [("blocks.0.mlp.weight", 0), ("blocks.0.out.weight", 128)],
        "blocks.0.flat_1": [("blocks.0.mlp.bias", 0)],
        "blocks.1.mlp.weight": [("blocks.1.mlp.weight", 0)],
        "embed.resnet.stages.0.1.flat_0": [("embed.resnet.stages.0.1.conv", 0)],
    }


EVERY = replace(VIT, layer_scale=0.1, qk_norm=True, position="rope2d")  # all that a block can have
IN_LAYERS = replace(VIT, position="learned_2d", position_at="layers")
BIT = ModelConfig(name="bit_r50x1", image_size=32, num_classes=3, resnet_units=(2, 1, 1, 1))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        *((config, dtype) for config in (VIT, EVERY, IN_LAYERS) for dtype in (torch.float32, torch.bfloat16)),
        (BIT, torch.float32),
        pytest.param(BIT, torch.bfloat16, marks=pytest.mark.long),
    ],
)
def test_results_and_gradients_are_equal_to_the_bit(config: ModelConfig, dtype: torch.dtype) -> None:
    compare_with_flat(config, dtype)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_selective_recomputation_finds_the_scales_of_norms_in_flat_tensors(norm: NormKind) -> None:
    """They are no parameters of the norm any more, and a norm that is recomputed without them changes gradients."""
    compare_with_flat(replace(EVERY, norm=norm), torch.float32, is_recomputed=True)


def compare_with_flat(config: ModelConfig, dtype: torch.dtype, *, is_recomputed: bool = False) -> None:
    """Compares a model of random weights, its norms' among them, with the same in flat tensors."""
    plain = build_model(config).to(dtype)
    with torch.no_grad():
        for number, tensor in enumerate(plain.parameters()):
            tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)), alpha=0.05)
    flat = copy.deepcopy(plain)
    if is_recomputed:
        recompute_selectively(flat)
    layout = layout_of(shapes_of(config), ways_of(shapes_of(config), ADAMW))
    flatten_blocks(flat, layout)
    assert len(list(flat.parameters())) == len(layout) < len(list(plain.parameters()))
    images = torch.randint(0, 256, (2, config.image_size, config.image_size, 3), dtype=torch.uint8)
    found, expected = flat(images), plain(images)
    assert torch.equal(found, expected)
    for each in (found, expected):
        torch.autograd.backward(each.square().sum())
    expected_gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, tensor in flat.named_parameters():
        assert tensor.grad is not None
        for part, gradient in views_of(tensor.grad, layout[name]):
            assert torch.equal(gradient, expected_gradients[part]), part  # type: ignore[arg-type]


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def test_a_pass_makes_no_zeros_where_nothing_is_padded_and_views_only_of_kernels() -> None:
    config = replace(VIT, width=64, mlp_width=128)
    counts = []
    for layout in ({}, layout_of(shapes_of(config), ways_of(shapes_of(config), ADAMW))):
        model = build_model(config)
        flatten_blocks(model, layout)
        with Operations() as operations:
            torch.autograd.backward(model(torch.zeros(2, 16, 16, 3, dtype=torch.uint8)).square().sum())
        counts.append(operations.found)
    plain, flat = counts
    assert flat["aten::zeros"] == plain["aten::zeros"]
    assert flat["aten::view"] - plain["aten::view"] == 2 * 4 * config.num_blocks, "forward and backward"
