"""Stochastic depth: its rates, what a block makes of it, and the same run on any topology and after a kill."""

import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from jobs import exit_codes
from pipeline.models import ModelConfig, ViT, build_model, checkpoint_blocks, compile_blocks
from pipeline.models.vit import Block
from pipeline.training.gradients import branch_factors
from shards.errors import UserError
from tests.pipeline.models.parity import imported
from tests.rigs.training import STEPS, FinishedRuns, losses, pretrain_words, run

DEPTH, RATE, NUM_IMAGES = 5, 0.4, 4000
PLACES = np.arange(NUM_IMAGES)
VIT = ModelConfig(name="vit", image_size=16, patch=8, depth=3, width=16, mlp_width=24, num_heads=2, num_classes=5)


@pytest.fixture(scope="module")
def timm_models() -> ModuleType:
    return imported("timm.models")


def factors(step: int = 3, *, rate: float = RATE, depth: int = DEPTH, places: np.ndarray = PLACES) -> np.ndarray:
    return branch_factors(step, places, seed=1, rate=rate, depth=depth)


def test_rates_rise_in_a_straight_line_as_in_timm(timm_models: ModuleType) -> None:
    """Within four standard deviations; a branch that is kept makes up for those left out."""
    theirs = timm_models.VisionTransformer(
        img_size=16, patch_size=8, embed_dim=16, num_heads=2, depth=DEPTH, num_classes=2, drop_path_rate=RATE
    )
    drawn = factors()
    assert drawn.shape == (DEPTH, NUM_IMAGES, 2)
    assert drawn.dtype == np.float32
    for block, own in zip(theirs.blocks, drawn, strict=True):
        rate = getattr(block.drop_path1, "drop_prob", 0.0)  # timm has no module for a rate of 0
        assert set(np.unique(own)) <= {np.float32(0), np.float32(1 / (1 - rate))}
        for branch in own.T:
            assert (branch == 0).mean() == pytest.approx(rate, abs=4 * (rate * (1 - rate) / NUM_IMAGES) ** 0.5)
    assert (drawn[0] == 1).all(), "the first block is always there"


def test_branches_blocks_images_and_steps_are_independent() -> None:
    dropped = factors(rate=0.5) == 0
    both = (dropped[-1, :, 0] & dropped[-1, :, 1]).mean()
    assert both == pytest.approx(0.25, abs=0.03)
    assert (dropped[-1, 1:, 0] & dropped[-1, :-1, 0]).mean() == pytest.approx(0.25, abs=0.03)
    assert (dropped[-1] & (factors(4, rate=0.5)[-1] == 0)).mean() == pytest.approx(0.25, abs=0.03)


def test_an_images_draws_are_those_of_its_place_in_the_batch() -> None:
    whole, part = factors(), factors(places=PLACES[100:140])
    assert np.array_equal(whole[:, 100:140], part)
    assert (factors(rate=0.9, depth=1) == 1).all()


@pytest.mark.parametrize(("rate", "depth"), [(1.0, 2), (-0.1, 2), (0.5, 0)])
def test_impossible_values_are_refused(rate: float, depth: int) -> None:
    with pytest.raises(ValueError, match="allowed: 0 to below 1, and 1 or more"):
        factors(rate=rate, depth=depth)


def test_resnets_and_rates_of_one_are_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"model\.stochastic_depth is 1\.0; allowed: 0 \(off\) to below 1"):
        ModelConfig(stochastic_depth=1.0)
    with pytest.raises(UserError, match=r"model\.stochastic_depth is 0\.1; bit_r50x1 is a ResNet"):
        ModelConfig(name="bit_r50x1", stochastic_depth=0.1)


def vit() -> ViT:
    """With a head that is not zero."""
    model = build_model(VIT, seed=1)
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(2))
    assert isinstance(model, ViT)
    return model


IMAGES = torch.randint(0, 256, (8, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def gradients(model: ViT, branches: torch.Tensor) -> list[torch.Tensor]:
    """The logits, and the gradients of their squares."""
    logits = model(IMAGES, branches)
    return [logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))]


def test_an_image_skips_what_it_leaves_out() -> None:
    """Against the same model without these branches, image by image."""
    drawn = torch.from_numpy(branch_factors(0, np.arange(8), seed=5, rate=0.8, depth=3))
    model = vit()
    found = model(IMAGES, drawn)
    for image in range(8):
        z, _ = model.embed(IMAGES[image : image + 1])
        for block, (attention, mlp) in zip(model.blocks, drawn[:, image].tolist(), strict=True):
            assert isinstance(block, Block)
            z = z + attention * block.attention(block.norm1(z)) if attention else z
            z = z + mlp * block.mlp(block.norm2(z)) if mlp else z
        torch.testing.assert_close(model.head(model.norm(z[:, 0]))[0], found[image])
    assert torch.equal(model(IMAGES, torch.ones(3, 8, 2)), model(IMAGES))


def test_recomputed_and_compiled_blocks_leave_out_the_same() -> None:
    drawn = torch.from_numpy(branch_factors(0, np.arange(8), seed=5, rate=0.8, depth=3))
    expected = gradients(vit(), drawn)
    recomputed, compiled = vit(), vit()
    checkpoint_blocks(recomputed)
    assert all(map(torch.equal, gradients(recomputed, drawn), expected))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compile_blocks(compiled, backend="aot_eager")
    for own, other in zip(gradients(compiled, drawn), expected, strict=True):
        assert (own - other).norm().item() <= 1e-5 * other.norm().item()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "all blocks share their kernels"


@pytest.mark.long
def test_a_run_is_the_same_on_any_topology_and_after_a_kill(
    digits_url: str, finished_runs: FinishedRuns, tmp_path: Path
) -> None:
    """Micro-batches, ranks, a ZeRO stage and recomputation change results to rounding; a continuation changes no
    bit."""
    whole, other, again = (tmp_path / name for name in ("whole", "other", "again"))
    options = ("--engine.precision", "fp32", "--model.stochastic-depth", "0.6")
    parts = ("--micro-batch", "4", "--engine.zero-stage", "2", "--engine.activation-checkpointing")
    words = {
        whole: pretrain_words(digits_url, whole, *options),
        other: pretrain_words(digits_url, other, *options, *parts),
        again: pretrain_words(digits_url, again, *options),
    }
    for run_dir, num_ranks in ((whole, 1), (other, 2)):
        assert run(words[run_dir], num_ranks=num_ranks, log_dir=tmp_path) == exit_codes.DONE
    assert list(losses(other).values()) == pytest.approx(list(losses(whole).values()), rel=1e-5)
    plain = finished_runs.get(2, *options[:2])
    assert list(losses(plain).values()) != pytest.approx(list(losses(whole).values()), rel=1e-5)

    shutil.copytree(whole, again)
    (again / "DONE").unlink()
    shutil.rmtree(again / "weights")
    for folder in again.glob(f"checkpoints/step-{STEPS:08d}"):
        shutil.rmtree(folder)
    assert run(words[again], num_ranks=1, log_dir=tmp_path) == exit_codes.DONE
    expected, found = (load_file(folder / "weights" / "model.safetensors") for folder in (whole, again))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert losses(again) == losses(whole)
