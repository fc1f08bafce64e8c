"""Updates of an engine with gradients that a test gives, on any number of ranks, to compare with another optimiser."""

from typing import Literal

import torch

from pipeline.checkpoints.checkpoint import Fragment
from pipeline.checkpoints.manifest import MASTER
from pipeline.models import ModelConfig, build_model, shapes_of
from pipeline.models.loss import classification_loss
from pipeline.ranks.world import World
from pipeline.training.settings.job import EngineConfig, OptimizerConfig
from pipeline.training.zero.batch_plan import plan_batch
from pipeline.training.zero.engine import Engine

NUM_UPDATES, RATE = 20, 0.02


def initial(model: ModelConfig, name: str) -> torch.Tensor:
    """Random weights; those of the head are zero, as in a run."""
    shape = shapes_of(model)[name]
    return torch.zeros(shape) if name == "head.weight" else 0.3 * gradient(model, name, -1)


def gradient(model: ModelConfig, name: str, update: int) -> torch.Tensor:
    """The same on every rank, and small in every other update."""
    number = 1000 * list(shapes_of(model)).index(name) + update + 1
    size = 0.01 if update % 2 else 1.0
    return size * torch.randn(shapes_of(model)[name], generator=torch.Generator().manual_seed(number))


def after_our_updates(
    world: World, model: ModelConfig, config: OptimizerConfig, stage: Literal[1, 2, 3], clip_norm: float
) -> dict[str, tuple[int, torch.Tensor]]:
    """This rank's fragments of the weights: the first element of each, and its values. The engine's own gradients are
    replaced before each update. The first update is discarded, and then made again."""
    engine = engine_of(world, model, config, stage, clip_norm)
    values = {(name, MASTER): initial(model, name) for name in shapes_of(model)}
    starts = filled(engine, values, num_updates=0)
    images = torch.zeros(2, model.image_size, model.image_size, 3, dtype=torch.uint8)
    labels = torch.zeros(2, 1, dtype=torch.int64)
    for place, update in enumerate((0, *range(NUM_UPDATES))):
        engine.accumulate(lambda module: classification_loss(module(images), labels, name="softmax"))
        for name, view in engine.gradients().items():
            whole = gradient(model, name, update).flatten()
            view.copy_(whole[starts[name] : starts[name] + len(view)])
        engine.update(learning_rate=RATE, discard=place == 0)
    return {each.name: (each.start, each.slots[MASTER].clone()) for each in engine.fragments()}


def engine_of(
    world: World, model: ModelConfig, config: OptimizerConfig, stage: Literal[1, 2, 3], clip_norm: float
) -> Engine:
    """An engine in fp32."""
    return Engine(
        build_model(model),
        config=EngineConfig(zero_stage=stage, precision="fp32"),
        plan=plan_batch(2 * world.num_ranks, micro_batch=2, num_ranks=world.num_ranks, lanes=1),
        optimizer=config,
        clip_norm=clip_norm,
    )


def filled(engine: Engine, values: dict[tuple[str, str], torch.Tensor], *, num_updates: int) -> dict[str, int]:
    """Fills an engine with whole tensors, by name and slot. Returns where the fragments of this rank begin."""

    def fill(fragment: Fragment, slot: str) -> None:
        whole = values[fragment.name, slot].flatten()
        fragment.slots[slot].copy_(whole[fragment.start : fragment.start + fragment.length])

    engine.load(fill, moments=sorted({slot for _, slot in values} - {MASTER}), num_updates=num_updates)
    return {fragment.name: fragment.start for fragment in engine.fragments()}


def largest_difference(
    found: list[dict[str, tuple[int, torch.Tensor]]], expected: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """The largest difference of the fragments of all ranks from whole, flat tensors, and where it is."""
    return max(
        (float((weights - expected[name][start : start + len(weights)]).abs().max()), name)
        for of_rank in found
        for name, (start, weights) in of_rank.items()
    )
