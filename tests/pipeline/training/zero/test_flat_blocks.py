"""A block with flat tensors computes what it computed before, and they hold its parameters as the layout says."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pipeline.models import ModelConfig, build_model, shapes_of
from pipeline.models.build import unfilled_model
from pipeline.ranks.world import World
from pipeline.training.settings.job import EngineConfig, OptimizerConfig
from pipeline.training.zero import engine as engines
from pipeline.training.zero.batch_plan import plan_batch
from pipeline.training.zero.flat_blocks import flatten_blocks, layout_of, views_of
from pipeline.training.zero.optimizer import ways_of
from tests.rigs.processes import run_ranks

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


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(VIT, id="ViT"),
        pytest.param(replace(VIT, layer_scale=0.1, qk_norm=True, position="rope2d"), id="all that a block can have"),
        pytest.param(replace(VIT, position="learned_2d", position_at="layers"), id="positions in each block"),
        pytest.param(ModelConfig(name="bit_r50x1", image_size=32, num_classes=3, resnet_units=(2, 1, 1, 1)), id="BiT"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_are_equal_to_the_bit(config: ModelConfig, dtype: torch.dtype) -> None:
    plain = build_model(config).to(dtype)
    with torch.no_grad():
        for number, tensor in enumerate(plain.parameters()):
            tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)), alpha=0.05)
    flat = copy.deepcopy(plain)
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


def gathered_weights_left_after_the_forward_pass(world: World) -> tuple[int, int]:
    """How many flat tensors were gathered in a forward pass under stage 3, and how many of them are still in memory
    after it. DeepSpeed is told to keep none for later."""
    real = engines.deepspeed_config

    def keep_nothing(*words: Any, **more: Any) -> dict[str, Any]:
        settings = real(*words, **more)
        names = ("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size", "param_persistence_threshold")
        settings["zero_optimization"] |= {f"stage3_{name}": 0 for name in names}
        return settings

    engines.deepspeed_config = keep_nothing
    engine = engines.Engine(
        unfilled_model(VIT),
        config=EngineConfig(zero_stage=3, precision="fp32"),
        plan=plan_batch(4, micro_batch=2, num_ranks=world.num_ranks, lanes=4),
        optimizer=ADAMW,
        clip_norm=0.0,
    )
    gathered = list[StorageWeakRef]()

    def note(block: torch.nn.Module) -> None:
        storages = (tensor.untyped_storage() for tensor in block.parameters(recurse=False))
        gathered.extend(StorageWeakRef(storage) for storage in storages)  # type: ignore[no-untyped-call]

    for block in engine.module.get_submodule("blocks").children():
        block.get_submodule("mlp").register_forward_hook(lambda *_, block=block: note(block))
    left = list[StorageWeakRef]()

    def loss_of(model: torch.nn.Module) -> torch.Tensor:
        loss: torch.Tensor = model(torch.zeros(2, 16, 16, 3, dtype=torch.uint8)).square().sum()
        left.extend(storage for storage in gathered if not storage.expired())  # type: ignore[no-untyped-call]
        return loss

    num_gathered = []
    for _ in range(2):  # DeepSpeed traces the first step, and learns from it what it may free
        gathered.clear()
        left.clear()
        engine.accumulate(loss_of)
        num_gathered.append(len(gathered))
        engine.update(learning_rate=1e-3)
    return num_gathered[1], len(left)


def test_stage_3_frees_gathered_weights_before_the_backward_pass() -> None:
    """Although autograd saves views of them."""
    assert run_ranks(gathered_weights_left_after_the_forward_pass, num_ranks=2) == [(4, 0)] * 2
