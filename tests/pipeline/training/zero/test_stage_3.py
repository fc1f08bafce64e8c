"""Stage 3 gathers one block ahead and keeps two, and sums gradients as DeepSpeed's own function does."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipeline.models import Model, ModelConfig, checkpoint_blocks, compile_blocks
from pipeline.models.build import unfilled_model
from pipeline.models.recompute import recompute_selectively
from pipeline.ranks.world import World
from pipeline.training.settings.job import EngineConfig, OptimizerConfig
from pipeline.training.zero import engine as engines
from pipeline.training.zero.batch_plan import plan_batch
from pipeline.training.zero.stage_3 import reduce_scatter_coalesced
from tests.rigs.processes import run_ranks
from tests.rigs.random_weights import fill_randomly

# A block has 110,592 decayed weights. DeepSpeed would not gather a tensor of at most 100,000.
VIT = ModelConfig(name="vit", image_size=16, num_classes=3, patch=8, depth=4, width=96, mlp_width=384, num_heads=2)


FP32 = EngineConfig(zero_stage=3, precision="fp32")


def engine_of(
    world: World, *, ema_decay: float = 0.0, model: Model | None = None, config: EngineConfig = FP32
) -> engines.Engine:
    engine = engines.Engine(
        unfilled_model(VIT) if model is None else model,
        config=config,
        plan=plan_batch(2 * world.num_ranks, micro_batch=2, num_ranks=world.num_ranks, lanes=4),
        optimizer=OptimizerConfig(weight_decay=0.1),
        clip_norm=0.0,
        ema_decay=ema_decay,
    )
    fill_randomly(engine, std=0.02)
    return engine


def loss_of(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(images).square().sum()
    return loss


def events_of_a_step(world: World) -> tuple[str, int, int]:
    """What happens to the blocks in the third step, in order ("gather", and "forward" or "backward" when the block's
    last layer has run or its gradient arrives), and the most blocks that are gathered at any of these moments, in that
    step and in the one after an evaluation."""
    engine = engine_of(world)
    blocks: list[Any] = list(engine.module.get_submodule("blocks").children())
    tensors: list[Any] = [max(block.parameters(recurse=False), key=lambda each: each.ds_numel) for block in blocks]
    events, held = list[str](), [0]

    def note(kind: str, number: int) -> None:
        events.append(f"{kind} {number}")
        held[0] = max(held[0], sum(tensor.ds_status.name != "NOT_AVAILABLE" for tensor in tensors))

    def gather(params: list[Any], real: Any, **options: Any) -> Any:
        params = list(params)
        handle = real(params, **options)
        for number, tensor in enumerate(tensors):
            if any(param is tensor for param in params):
                note("gather", number)
        return handle

    def ran(_: nn.Module, __: object, output: torch.Tensor, number: int) -> None:
        note("forward", number)
        if output.requires_grad:
            output.register_hook(lambda _: note("backward", number))  # type: ignore[no-untyped-call]

    for parameter in engine.module.parameters():
        own: Any = parameter
        own.all_gather_coalesced = partial(gather, real=own.all_gather_coalesced)
    for number, block in enumerate(blocks):
        block.mlp.register_forward_hook(partial(ran, number=number))
    images = torch.zeros(2, 16, 16, 3, dtype=torch.uint8)

    def step() -> tuple[str, int]:
        events.clear()
        held[0] = 0
        engine.accumulate(partial(loss_of, images=images))
        engine.update(learning_rate=1e-3)
        return ", ".join(events), held[0]

    *_, third = [step() for _ in range(3)]  # DeepSpeed learns the order in the first one
    engine.train(False)
    with torch.no_grad():
        loss_of(engine.module, images)
    engine.train(True)
    return *third, step()[1]


def test_the_next_block_is_gathered_while_one_is_computed_and_two_are_held() -> None:
    """In both passes, also after an evaluation. The last block is gathered once for both."""
    found = run_ranks(events_of_a_step, num_ranks=2)
    expected = "gather 0, gather 1, forward 0, gather 2, forward 1, gather 3, forward 2, gather 2, forward 3, "
    expected += "backward 3, gather 1, backward 2, gather 0, backward 1, backward 0"
    assert found == [(expected, 2, 2)] * 2


def losses_with_and_without_an_evaluation(world: World) -> list[list[float]]:
    """The losses of four steps. The second engine's averaged weights are evaluated before the last step."""
    found = []
    for is_evaluated in (False, True):
        engine = engine_of(world, ema_decay=0.5)
        images = torch.full((2, 16, 16, 3), 100 + world.rank, dtype=torch.uint8)
        losses = []
        for step in range(4):
            if is_evaluated and step == 3:
                engine.swap_averages()
                engine.train(False)
                with torch.no_grad():
                    losses.append(float(loss_of(engine.module, images)))
                engine.train(True)
                engine.swap_averages()
            losses.append(float(engine.accumulate(partial(loss_of, images=images))))
            engine.update(learning_rate=1e-3)
        found.append(losses)
    return found


def test_weights_that_stay_gathered_are_gathered_again_once_they_have_changed() -> None:
    for plain, evaluated in run_ranks(losses_with_and_without_an_evaluation, num_ranks=2):
        assert len(set(evaluated)) == 5
        assert [*evaluated[:3], evaluated[4]] == plain


def reduced_both_ways(world: World) -> list[bool]:
    """Whether our function and DeepSpeed's have equal bits: for one tensor that the ranks divide, and for tensors of
    which the last ranks have less or nothing."""
    from deepspeed.runtime.comm.coalesced_collectives import (  # noqa: PLC0415  # the server has loaded it
        reduce_scatter_coalesced as theirs,
    )

    engines._quiet_deepspeed()  # gives DeepSpeed the process group
    same = []
    for sizes in ((8,), (7,), (6, 1, 13, 4)):
        generator = torch.Generator().manual_seed(world.rank)
        tensors = [torch.randn(size, generator=generator) for size in sizes]
        expected, found = (
            function([each.clone() for each in tensors]) for function in (theirs, reduce_scatter_coalesced)
        )
        same.append(all(map(torch.equal, expected, found)) and len(found) == len(sizes))
    return same


def compiled_and_recomputed(world: World) -> list[tuple[list[float], int, int, int]]:
    """Of blocks as they are, compiled, recomputed and recomputed selectively: the losses of three steps, how many
    gathered blocks are in memory after the last forward pass, how often blocks are called in a step, and the number of
    graphs."""
    plain, compiled, recomputed, selective = (unfilled_model(VIT) for _ in range(4))
    compile_blocks(compiled, hooks_outside=True, backend="aot_eager")
    checkpoint_blocks(recomputed)
    recompute_selectively(selective)
    found = []
    for model in (plain, compiled, recomputed, selective):
        engine = engine_of(world, model=model)
        called, left = list[StorageWeakRef](), list[int]()

        def note(block: Any, _: object, called: list[StorageWeakRef] = called) -> None:
            tensor = max(block.parameters(recurse=False), key=lambda each: each.ds_numel)
            called.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]

        def watched(model: nn.Module, images: torch.Tensor, called: Any = called, left: Any = left) -> torch.Tensor:
            loss = loss_of(model, images)
            left.append(sum(not storage.expired() for storage in called))
            return loss

        for block in engine.module.get_submodule("blocks").children():
            block.register_forward_pre_hook(note)
        losses = []
        for step in range(3):
            called.clear()
            images = torch.full((2, 16, 16, 3), 50 * step + world.rank, dtype=torch.uint8)
            losses.append(float(engine.accumulate(partial(watched, images=images))))
            num_calls = len(called)
            engine.update(learning_rate=1e-3)
        found.append((losses, left[-1], num_calls, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return found


def test_compiled_and_recomputed_blocks_free_their_gathered_weights() -> None:
    """After a forward pass, only the last block is gathered. All blocks share one graph, which is compiled once."""
    for plain, compiled, recomputed, selective in run_ranks(compiled_and_recomputed, num_ranks=2):
        assert plain[1:] == (1, 4, 0)
        assert compiled[1:] == (1, 4, 1)
        assert compiled[0] == pytest.approx(plain[0], rel=1e-4)
        assert recomputed == (plain[0], 1, 8, 1)
        assert selective == (plain[0], 1, 4, 1)


def test_our_sum_of_gradients_has_the_bits_of_deepspeeds() -> None:
    assert run_ranks(reduced_both_ways, num_ranks=4) == [[True] * 3] * 4


def losses_in_bf16(world: World, config: EngineConfig) -> list[float]:
    engine, losses = engine_of(world, config=config), []
    images = torch.randint(0, 256, (2, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for _ in range(4):
        losses.append(float(engine.accumulate(partial(loss_of, images=images))))
        engine.update(learning_rate=1e-3)
    return losses


def test_stage_3_has_the_losses_of_stage_1_in_bf16() -> None:
    """DeepSpeed's own linear function for stage 3 rounds once more."""
    first, third = (
        run_ranks(losses_in_bf16, replace(FP32, zero_stage=stage, precision="bf16"), num_ranks=2) for stage in (1, 3)
    )
    assert third == first
