"""LAMB's updates are timm's in every stage and on any number of ranks, which cut and join its tensors."""

from typing import Any, Literal

import pytest
import torch

from pipeline.checkpoints.checkpoint import Fragment
from pipeline.checkpoints.manifest import MASTER
from pipeline.models import ModelConfig, build_model, shapes_of
from pipeline.models.loss import classification_loss
from pipeline.ranks.world import World
from pipeline.training.settings.job import EngineConfig, OptimizerConfig
from pipeline.training.zero.batch_plan import plan_batch
from pipeline.training.zero.engine import Engine
from pipeline.training.zero.lamb import HeldPart, step_tensors
from pipeline.training.zero.optimizer import decay_of
from tests.pipeline.models.parity import imported
from tests.rigs.processes import run_ranks

# Its flat blocks have padding, and its class token and biases have no trust ratio.
MODEL = ModelConfig(
    name="vit", image_size=16, patch=8, depth=2, width=24, mlp_width=40, num_heads=2, num_classes=3, layer_scale=0.1
)
CONFIG = OptimizerConfig(name="lamb", weight_decay=0.05, epsilon=1e-6, head_decay=2.0)
NUM_UPDATES, RATE, CLIP = 20, 0.02, 1.0


def initial(name: str) -> torch.Tensor:
    """Random weights; those of the head are zero, for which the ratio is 1."""
    shape = shapes_of(MODEL)[name]
    return torch.zeros(shape) if name == "head.weight" else 0.3 * gradient(name, -1)


def gradient(name: str, update: int) -> torch.Tensor:
    """The same on every rank. Its norm is above CLIP in about half of the updates."""
    number = 1000 * list(shapes_of(MODEL)).index(name) + update + 1
    size = 0.01 if update % 2 else 1.0
    return size * torch.randn(shapes_of(MODEL)[name], generator=torch.Generator().manual_seed(number))


def after_timms_updates() -> dict[str, torch.Tensor]:
    weights = {name: torch.nn.Parameter(initial(name)) for name in shapes_of(MODEL)}
    groups = [{"params": [weight], "weight_decay": decay_of(name, CONFIG)} for name, weight in weights.items()]
    timm: Any = imported("timm.optim.lamb")
    optimizer = timm.Lamb(groups, lr=RATE, betas=(0.9, 0.999), eps=CONFIG.epsilon, max_grad_norm=CLIP)
    for update in range(NUM_UPDATES):
        for name, weight in weights.items():
            weight.grad = gradient(name, update)
        optimizer.step()
    return {name: weight.detach().flatten() for name, weight in weights.items()}


def after_our_updates(world: World, stage: Literal[1, 2, 3]) -> dict[str, tuple[int, torch.Tensor]]:
    """This rank's fragments of the weights: the first element of each, and its values. The engine's own gradients are
    replaced before each update. The first update is discarded, and then made again."""
    engine = Engine(
        build_model(MODEL),
        config=EngineConfig(zero_stage=stage, precision="fp32"),
        plan=plan_batch(2 * world.num_ranks, micro_batch=2, num_ranks=world.num_ranks, lanes=1),
        optimizer=CONFIG,
        clip_norm=CLIP,
    )
    starts = {fragment.name: fragment.start for fragment in engine.fragments()}

    def own(name: str, whole: torch.Tensor, length: int) -> torch.Tensor:
        return whole.flatten()[starts[name] : starts[name] + length]

    def fill(fragment: Fragment, slot: str) -> None:
        fragment.slots[slot].copy_(own(fragment.name, initial(fragment.name), fragment.length))

    engine.load(fill, moments=[], num_updates=0)
    images, labels = torch.zeros(2, 16, 16, 3, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.int64)
    for place, update in enumerate((0, *range(NUM_UPDATES))):
        engine.accumulate(lambda model: classification_loss(model(images), labels, name="softmax"))
        for name, view in engine.gradients().items():
            view.copy_(own(name, gradient(name, update), len(view)))
        engine.update(learning_rate=RATE, discard=place == 0)
    return {f.name: (f.start, f.slots[MASTER].clone()) for f in engine.fragments()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "num_ranks"),
    [
        pytest.param(1, 1, marks=pytest.mark.long),
        (1, 3),
        pytest.param(2, 2, marks=pytest.mark.long),
        pytest.param(3, 2, marks=pytest.mark.long),
    ],
)
def test_updates_are_timms(stage: int, num_ranks: int) -> None:
    expected = after_timms_updates()
    for found in run_ranks(after_our_updates, stage, num_ranks=num_ranks):
        for name, (start, weights) in found.items():
            difference = (weights - expected[name][start : start + len(weights)]).abs().max()
            assert float(difference) < 1e-6, name


def test_a_skipped_update_changes_nothing() -> None:
    """Its gradient is NaN. It may be the first one, before the moments have values."""
    weights, part = torch.randn(6, generator=torch.Generator().manual_seed(1)), HeldPart(number=0, start=0, end=6)
    state = {name: torch.zeros(6) for name in ("exp_avg", "exp_avg_sq")} | {"step": torch.zeros(())}
    group = {"betas": (0.9, 0.999), "eps": 1e-6, "lr": 0.1, "weight_decay": 0.1, "num_tensors": 1}
    for gradient in (torch.full((6,), torch.nan), torch.ones(6), torch.full((6,), torch.nan)):
        is_skipped = gradient.isnan().any()
        before = {name: value.clone() for name, value in {"weights": weights, **state}.items()}
        step_tensors(weights, gradient, state, parts=[part], group=group, found_inf=is_skipped.float())
        same = {name for name, value in {"weights": weights, **state}.items() if torch.equal(value, before[name])}
        assert same == (set(before) if is_skipped else set())
