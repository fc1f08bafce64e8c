"""LAMB's updates are timm's in every stage and on any number of ranks, which cut and join its tensors."""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.models import ModelConfig, shapes_of
from pipeline.training.settings.job import OptimizerConfig
from pipeline.training.zero.flat_blocks import HeldPart
from pipeline.training.zero.lamb import step_tensors
from pipeline.training.zero.optimizer import decay_of
from tests.pipeline.models.parity import imported
from tests.rigs.given_gradients import NUM_UPDATES, RATE, after_our_updates, gradient, initial, largest_difference
from tests.rigs.processes import run_ranks
from tests.rigs.training import losses, pretrain_words, run

# Its flat blocks have padding, its class token and biases have no trust ratio, and its head has a ratio of 1 at first.
MODEL = ModelConfig(
    name="vit", image_size=16, patch=8, depth=2, width=24, mlp_width=40, num_heads=2, num_classes=3, layer_scale=0.1
)
CONFIG = OptimizerConfig(name="lamb", weight_decay=0.05, epsilon=1e-6, head_decay=2.0)
CLIP = 1.0  # exceeded in every other update


def after_timms_updates() -> dict[str, torch.Tensor]:
    weights = {name: torch.nn.Parameter(initial(MODEL, name)) for name in shapes_of(MODEL)}
    groups = [{"params": [weight], "weight_decay": decay_of(name, CONFIG)} for name, weight in weights.items()]
    timm: Any = imported("timm.optim.lamb")
    optimizer = timm.Lamb(groups, lr=RATE, betas=(0.9, 0.999), eps=CONFIG.epsilon, max_grad_norm=CLIP)
    for update in range(NUM_UPDATES):
        for name, weight in weights.items():
            weight.grad = gradient(MODEL, name, update)
        optimizer.step()
    return {name: weight.detach().flatten() for name, weight in weights.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "num_ranks"),
    [
        pytest.param(1, 1, marks=pytest.mark.long),
        (1, 2),
        pytest.param(1, 3, marks=pytest.mark.long),
        pytest.param(2, 2, marks=pytest.mark.long),
        pytest.param(3, 2, marks=pytest.mark.long),
    ],
)
def test_updates_are_timms(stage: int, num_ranks: int) -> None:
    found = run_ranks(after_our_updates, MODEL, CONFIG, stage, CLIP, num_ranks=num_ranks)
    difference, name = largest_difference(found, after_timms_updates())
    assert difference < 1e-6, name


@pytest.mark.long
def test_a_new_head_is_learned(digits_url: str, tmp_path: Path) -> None:
    """From a matrix of zeros, which is refused, the loss stays at 2.2: the trust ratio is the norm of the matrix."""
    words = pretrain_words(digits_url, tmp_path / "run", "--steps", "300", "--schedule.learning-rate", "0.01")
    words += ["--optimizer.name", "lamb", "--optimizer.weight-decay", "0.05", "--model.head-std", "0.02"]
    assert run([*words, "--global-batch", "64", "--engine.precision", "fp32"], num_ranks=1, log_dir=tmp_path) == 0
    assert statistics.mean(losses(tmp_path / "run")[step] for step in range(291, 301)) < 0.7


def test_a_skipped_update_changes_nothing() -> None:
    """Its gradient is NaN. It may be the first one, before the moments have values."""
    weights, part = (
        torch.randn(6, generator=torch.Generator().manual_seed(1)),
        HeldPart(number=0, first=0, start=0, end=6),
    )
    state = {name: torch.zeros(6) for name in ("exp_avg", "exp_avg_sq")} | {"step": torch.zeros(())}
    group = {"betas": (0.9, 0.999), "eps": 1e-6, "lr": 0.1, "weight_decay": 0.1, "num_tensors": 1}
    for given in (torch.full((6,), torch.nan), torch.ones(6), torch.full((6,), torch.nan)):
        is_skipped = given.isnan().any()
        before = {name: value.clone() for name, value in {"weights": weights, **state}.items()}
        step_tensors(weights, given, state, parts=[part], group=group, found_inf=is_skipped.float())
        same = {name for name, value in {"weights": weights, **state}.items() if torch.equal(value, before[name])}
        assert same == (set(before) if is_skipped else set())
