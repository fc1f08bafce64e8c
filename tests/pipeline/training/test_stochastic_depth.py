"""Stochastic depth: its rates, what a block makes of it, and the same run on any topology and after a kill."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from jobs import exit_codes
from jobs.recipes.pretrain import digits_smoke
from pipeline.models import ModelConfig, ViT, build_model, checkpoint_blocks, compile_blocks
from pipeline.models.vit import Block, Kept
from pipeline.training.gradients import Gradients, branch_factors, kept_images
from pipeline.training.settings.job import TrainingJob
from pipeline.training.zero.batch_plan import plan_batch
from shards.errors import UserError
from tests.pipeline.models.parity import imported
from tests.rigs.processes import one_world
from tests.rigs.training import STEPS, FinishedRuns, losses, pretrain_words, run

DEPTH, RATE, NUM_IMAGES = 5, 0.4, 4000
PLACES = np.arange(NUM_IMAGES)
VIT = ModelConfig(name="vit", image_size=16, patch=8, depth=3, width=16, mlp_width=24, num_heads=2, num_classes=5)
DEEP = replace(VIT, stochastic_depth=0.5)  # its second and third block skip branches
AXIAL = {"attention": "axial", "pooling": "average"}


@pytest.fixture(scope="module")
def timm_models() -> ModuleType:
    return imported("timm.models")


def factors(step: int = 3, *, rate: float = RATE, depth: int = DEPTH, places: np.ndarray = PLACES) -> np.ndarray:
    return branch_factors(step, places, seed=1, rates=rising(rate, depth))


def rising(rate: float, depth: int) -> tuple[float, ...]:
    return replace(VIT, stochastic_depth=rate, depth=depth).branch_rates


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


def test_every_block_may_have_the_same_rate_as_in_deit_3() -> None:
    """models_v2.py of facebookresearch/deit: dpr = [drop_path_rate for i in range(depth)]. In a run, all blocks then
    skip branches, the first one, too."""
    config = replace(VIT, num_classes=10, stochastic_depth=0.5, stochastic_depth_rates="uniform")
    assert config.branch_rates == config.skipped_rates == (0.5, 0.5, 0.5)
    drawn = branch_factors(3, PLACES, seed=1, rates=config.branch_rates)
    assert set(np.unique(drawn)) == {0.0, 2.0}
    assert (drawn == 0).mean(axis=1).ravel().tolist() == pytest.approx([0.5] * 6, abs=4 * 0.5 / NUM_IMAGES**0.5)
    job = replace(digits_smoke(), model=config)
    assert kept_by(job) == [True, True, True]


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


def test_resnets_and_rates_of_one_are_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"model\.stochastic_depth is 1\.0; allowed: 0 \(off\) to below 1"):
        ModelConfig(stochastic_depth=1.0)
    with pytest.raises(UserError, match=r"model\.stochastic_depth is 0\.1; bit_r50x1 is a ResNet"):
        ModelConfig(name="bit_r50x1", stochastic_depth=0.1)


def vit(config: ModelConfig = VIT) -> ViT:
    """With a head that is not zero."""
    model = build_model(config, seed=1)
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(2))
    assert isinstance(model, ViT)
    return model


IMAGES = torch.randint(0, 256, (8, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def gradients(model: ViT, branches: torch.Tensor, kept: Sequence[Kept | None] = ()) -> list[torch.Tensor]:
    """The logits, and the gradients of their squares."""
    logits = model(IMAGES, branches, None, kept)
    return [logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))]


def test_an_image_skips_what_it_leaves_out() -> None:
    """Against the same model without these branches, image by image."""
    drawn = torch.from_numpy(branch_factors(0, np.arange(8), seed=5, rates=rising(0.8, 3)))
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


def kept_of(drawn: torch.Tensor, config: ModelConfig = DEEP) -> list[Kept | None]:
    """As training makes them of the factors, for all blocks that skip branches."""
    pairs = [kept_images(drawn.numpy(), block) for block in range(len(drawn))]
    skipped = zip(pairs, config.skipped_rates, strict=True)
    return [(torch.from_numpy(one), torch.from_numpy(two)) if rate else None for (one, two), rate in skipped]


def rows_of(model: ViT) -> list[int]:
    """Adds the number of images of each pass through an MLP, from now on."""
    rows: list[int] = []
    for block in model.blocks:
        assert isinstance(block, Block)
        block.mlp.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    return rows


@pytest.mark.parametrize("seed", [5, 6])
@pytest.mark.parametrize(
    "options",
    [{}, {"layer_scale": 0.5, "position": "rope2d"}, AXIAL, {"stochastic_depth_rates": "uniform"}],
    ids=["plain", "more", "axial", "uniform"],
)
def test_branches_that_are_skipped_are_not_computed_and_change_nothing(seed: int, options: dict[str, Any]) -> None:
    """In fp32, to rounding; the first block drops nothing unless rates are uniform, and is as it is without."""
    config = replace(DEEP, **options)
    rates = replace(config, stochastic_depth=0.8).branch_rates
    drawn = torch.from_numpy(branch_factors(0, np.arange(8), seed=seed, rates=rates))
    whole, skipping = vit(config), vit(config)
    expected, rows = gradients(whole, drawn), rows_of(skipping)
    found = gradients(skipping, drawn, kept_of(drawn, config))
    for own, other in zip(found, expected, strict=True):
        assert (own - other).norm().item() <= 1e-5 * other.norm().item()
    num_kept = (drawn[:, :, 1] != 0).sum(dim=1).clamp(min=2).tolist()
    assert rows == [number if rate else 8 for number, rate in zip(num_kept, config.skipped_rates, strict=True)]
    assert (rows[0] < 8, rows[-1] < 8) == (rates[0] > 0, True)


def test_a_branch_that_no_image_keeps_still_has_gradients() -> None:
    """A rank without them would add up other tensors than the others."""
    drawn = torch.ones(3, 8, 2)
    drawn[2] = 0
    model, kept = vit(DEEP), kept_of(drawn)
    assert [images.tolist() for images in kept[2] or ()] == [[0, 1], [0, 1]]
    found = torch.autograd.grad(model(IMAGES, drawn, None, kept).sum(), list(model.blocks[2].parameters()))
    assert all(not gradient.any() for gradient in found)


def test_a_number_of_images_that_varies_compiles_nothing_again() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled, plain = vit(DEEP), vit(DEEP)
    compile_blocks(compiled, backend="aot_eager")
    found = set()
    for step in range(4):
        drawn = torch.from_numpy(branch_factors(step, np.arange(8), seed=7, rates=rising(0.5, 3)))
        kept = kept_of(drawn)
        found.add(tuple(len(images) for pair in kept if pair for images in pair))
        for own, other in zip(gradients(compiled, drawn, kept), gradients(plain, drawn, kept), strict=True):
            assert (own - other).norm().item() <= 1e-5 * other.norm().item()
    assert len(found) == 4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "blocks with and without skipped branches"


def test_a_run_skips_branches_where_enough_are_dropped() -> None:
    """Blocks that drop up to 0.1 of the images compute branches for all of them, and so do all blocks if asked."""
    assert replace(VIT, stochastic_depth=0.1).skipped_rates == (0, 0, 0)
    assert replace(VIT, stochastic_depth=0.2).skipped_rates == (0, 0, 0.2)
    job = replace(digits_smoke(), model=replace(VIT, num_classes=10, stochastic_depth=0.5))
    assert kept_by(job) == [False, True, True]
    assert kept_by(replace(job, engine=replace(job.engine, skip_branches=False))) == []


def kept_by(job: TrainingJob) -> list[bool]:
    plan = plan_batch(job.global_batch, micro_batch=0, num_ranks=1, lanes=job.data.lanes)
    passes = Gradients(job, plan, None, one_world())  # type: ignore[arg-type]  # no engine is needed for draws
    factors, kept = passes.branches(3, slice(0, plan.micro_batch))
    assert factors is not None
    for pair, of_block in zip(kept, factors.unbind(), strict=False):
        for images, of_branch in zip(pair or (), of_block.T, strict=False):
            assert torch.equal(images, of_branch.nonzero().flatten())
    return [pair is not None for pair in kept]


def test_recomputed_and_compiled_blocks_leave_out_the_same() -> None:
    drawn = torch.from_numpy(branch_factors(0, np.arange(8), seed=5, rates=rising(0.8, 3)))
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
    parts = ("--micro-batch", "4", "--engine.zero-stage", "2", "--engine.activation-checkpointing", "selective")
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
