"""PatchDropout: how many patches stay and which, what the model makes of them, and the same run on any topology."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from jobs import exit_codes
from jobs.recipes.pretrain import digits_smoke
from jobs.recipes.shorter import shortened, smoke
from pipeline.models import ModelConfig, ViT, build_model, checkpoint_blocks, compile_blocks
from pipeline.models.positions import rotations
from pipeline.planning.step_time import flops_at, flops_of_steps
from pipeline.training.gradients import Gradients, staying_patches
from pipeline.training.settings.job import TrainingJob
from pipeline.training.settings.tokens import TokenPhase, TokensConfig, num_staying
from pipeline.training.zero.batch_plan import plan_batch
from tests.pipeline.models.parity import imported
from tests.rigs.processes import one_world
from tests.rigs.training import STEPS, losses, pretrain_words, run

NUM_IMAGES, NUM_PATCHES, NUM_STAY = 3000, 16, 6
PLACES = np.arange(NUM_IMAGES)
VIT = ModelConfig(name="vit", image_size=32, patch=8, depth=2, width=16, mlp_width=24, num_heads=2, num_classes=5)
IMAGES = torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
BASE = digits_smoke()
JOB = replace(
    BASE,
    model=replace(VIT, num_classes=10),
    steps=10,
    schedule=replace(BASE.schedule, warmup_steps=0),
    tokens=TokensConfig(patch_dropout=0.6, whole_steps=2),
)


@pytest.fixture(scope="module")
def timm_layers() -> ModuleType:
    return imported("timm.layers.patch_dropout")


def drawn(step: int = 3, places: np.ndarray = PLACES) -> np.ndarray:
    return staying_patches(step, places, seed=1, num_patches=NUM_PATCHES, num_stay=NUM_STAY)


@pytest.mark.parametrize(
    ("num_patches", "rate", "expected"),
    [
        pytest.param(196, 0.5, 98, id="half"),
        pytest.param(49, 0.29, 34, id="34.79, rounded down"),
        pytest.param(100, 0.9, 9, id="1 - 0.9 is below 0.1 in binary"),
        pytest.param(7, 0.9, 1, id="at least one"),
    ],
)
def test_the_number_that_stays(num_patches: int, rate: float, expected: int) -> None:
    assert num_staying(num_patches, rate) == expected


@pytest.mark.long
@pytest.mark.parametrize("num_patches", [1, 7, 49, 100, 196, 256])
def test_as_many_patches_stay_as_in_timm(timm_layers: ModuleType, num_patches: int) -> None:
    """The table above has the cases that differ from other ways of rounding."""
    for rate in (0.1, 0.25, 0.29, 0.5, 0.71, 0.75, 0.9, 0.99):
        theirs = timm_layers.PatchDropout(rate, num_prefix_tokens=2)(torch.zeros(1, 2 + num_patches, 1))
        assert num_staying(num_patches, rate) == theirs.shape[1] - 2


def test_each_patch_stays_as_often_and_in_its_order() -> None:
    found = drawn()
    assert found.shape == (NUM_IMAGES, NUM_STAY)
    assert (np.diff(found) > 0).all()
    counts = np.bincount(found.ravel(), minlength=NUM_PATCHES)
    share = NUM_STAY / NUM_PATCHES
    deviation = (share * (1 - share) / NUM_IMAGES) ** 0.5
    assert counts / NUM_IMAGES == pytest.approx(np.full(NUM_PATCHES, share), abs=4 * deviation)
    first, second = (found == 0).any(axis=1), (found == 1).any(axis=1)
    together = NUM_STAY * (NUM_STAY - 1) / (NUM_PATCHES * (NUM_PATCHES - 1))
    assert (first & second).mean() == pytest.approx(together, abs=0.03), "any subset is as likely"


def test_an_images_draws_are_those_of_its_place_in_the_batch() -> None:
    whole = drawn()
    assert np.array_equal(whole[100:140], drawn(places=PLACES[100:140]))
    assert not np.array_equal(whole, drawn(4))
    assert not np.array_equal(whole[0], whole[1])


def passes_of(job: TrainingJob, *, rank: int = 0, num_ranks: int = 1, micro_batch: int = 0) -> Gradients:
    plan = plan_batch(job.global_batch, micro_batch=micro_batch, num_ranks=num_ranks, lanes=job.data.lanes)
    world = replace(one_world(), rank=rank, num_ranks=num_ranks)
    return Gradients(job, plan, None, world)  # type: ignore[arg-type]  # no engine is needed for draws


def test_ranks_and_micro_batches_do_not_change_what_stays() -> None:
    half = JOB.global_batch // 2
    whole = passes_of(JOB).staying(7, slice(0, JOB.global_batch))
    second = passes_of(JOB, rank=1, num_ranks=2, micro_batch=half // 2)
    parts = [second.staying(7, slice(start, start + half // 2)) for start in (0, half // 2)]
    assert whole is not None
    assert torch.equal(whole[half:], torch.cat([part for part in parts if part is not None]))


def test_the_last_steps_have_all_patches() -> None:
    assert JOB.phases == (TokenPhase(end=8, image_size=32, num_stay=6), TokenPhase(end=10, image_size=32))
    assert JOB.largest_phase == TokenPhase(end=10, image_size=32)
    assert [passes_of(JOB).staying(step, slice(0, 2)) is None for step in (0, 7, 8, 9)] == [False, False, True, True]
    without = replace(JOB, tokens=TokensConfig())
    assert without.phases == (TokenPhase(end=10, image_size=32),)
    assert passes_of(without).staying(0, slice(0, 2)) is None
    always = replace(JOB, tokens=TokensConfig(patch_dropout=0.6))
    assert always.largest_phase == TokenPhase(end=10, image_size=32, num_stay=6)


def test_shorter_runs_keep_the_share_of_whole_steps() -> None:
    assert shortened(JOB, steps=5).tokens == TokensConfig(patch_dropout=0.6, whole_steps=1)
    assert shortened(JOB, steps=1).phases == (TokenPhase(end=1, image_size=32, num_stay=6),)
    assert smoke(replace(JOB, steps=1000, tokens=replace(JOB.tokens, whole_steps=100))).tokens.whole_steps == 4


def vit(config: ModelConfig = VIT) -> ViT:
    """With a head that is not zero."""
    model = build_model(config, seed=1)
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(2))
    assert isinstance(model, ViT)
    return model


OPTIONS: Sequence[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("mean of the patches that stay", {"pooling": "average"}),
    ("registers", {"registers": 3}),
    ("sines, attention pooling", {"position": "sincos2d", "pooling": "attention", "width": 32}),
    (
        "a hybrid",
        {"name": "r26_vit_s32", "resnet_units": (1,), "resnet_factor": 1, "patch": 2, "position": "learned_2d"},
    ),
]


@pytest.mark.parametrize("options", [row[1] for row in OPTIONS], ids=[row[0] for row in OPTIONS])
def test_blocks_see_the_first_tokens_and_the_patches_that_stay(options: dict[str, Any]) -> None:
    """Image by image, against the rest of the model after its own embedding."""
    model = vit(replace(VIT, **options)).train()
    prefix = model.config.num_prefix_tokens
    stay = torch.from_numpy(staying_patches(0, np.arange(4), seed=5, num_patches=16, num_stay=6))
    found = model(IMAGES, None, None, (), stay)
    for image, places in enumerate(stay.tolist()):
        z, _ = model.embed(IMAGES[image : image + 1])
        z = z[:, [*range(prefix), *(prefix + place for place in places)]]
        for block in model.blocks:
            z = block(z)
        patches = model.norm(z[:, prefix:])
        if model.config.pooling == "token":
            pooled = model.norm(z[:, 0])
        else:
            pooled = model.pool(patches) if model.pool else patches.mean(dim=1)
        torch.testing.assert_close(model.head(pooled)[0], found[image])


ROTARY = replace(VIT, position="learned_rope2d", registers=2, qk_norm=True)


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_patches_that_stay_are_turned_by_their_own_places(is_recomputed: bool) -> None:
    """Image by image, in fp64. The branches that some images skip are skipped, too."""
    model, prefix = vit(ROTARY).double().train(), ROTARY.num_prefix_tokens
    if is_recomputed:
        checkpoint_blocks(model)
    stay = torch.from_numpy(staying_patches(0, np.arange(4), seed=5, num_patches=16, num_stay=6))
    factors = torch.tensor([[[1, 1], [0, 2], [2, 0], [2, 2]], [[0, 2], [2, 0], [2, 2], [1, 1]]])
    kept = [tuple(factors[block, :, branch].nonzero().flatten() for branch in range(2)) for block in range(2)]
    for skipped in ((), kept):
        found = model.tokens(IMAGES, factors, None, skipped, stay)  # type: ignore[arg-type]  # the list holds pairs
        for image, places in enumerate(stay.tolist()):
            own = [*range(prefix), *(prefix + place for place in places)]
            z = model.embed(IMAGES[image : image + 1])[0][:, own]
            for block, branches in zip(model.blocks, factors, strict=True):
                z = block(z, branches[image : image + 1], rotations(ROTARY, (4, 4))[:, own])
            torch.testing.assert_close(found[image], z[0], rtol=0, atol=1e-12)
    assert all(
        gradient.any() for gradient in torch.autograd.grad(found.square().sum(), list(model.blocks.parameters()))
    )


def test_patches_that_are_left_out_get_no_gradient() -> None:
    model = vit()
    stay = torch.tensor([[0, 5, 15]]).expand(4, -1)
    loss, table = model(IMAGES, stay_BS=stay).square().sum(), dict(model.named_parameters())["embed.position"]
    (gradient,) = torch.autograd.grad(loss, [table])
    assert gradient[0].any(dim=1).nonzero().flatten().tolist() == [0, 1, 6, 16], "the class token, and these patches"


@pytest.mark.parametrize("config", [VIT, ROTARY], ids=["learned", "rotary"])
def test_all_patches_staying_changes_no_bit(config: ModelConfig) -> None:
    model = vit(config)
    assert torch.equal(model(IMAGES, stay_BS=torch.arange(16).expand(4, -1)), model(IMAGES))


@pytest.mark.parametrize("config", [VIT, ROTARY], ids=["learned", "rotary"])
def test_the_whole_steps_compile_each_block_once_more(config: ModelConfig) -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled, plain = vit(config), vit(config)
    compile_blocks(compiled, backend="aot_eager")
    num_graphs = []
    for num_stay in (6, 6, None, None, 6):
        stay = None if num_stay is None else torch.arange(num_stay).expand(4, -1)
        found, expected = (
            torch.autograd.grad(model(IMAGES, stay_BS=stay).square().sum(), list(model.parameters()))
            for model in (compiled, plain)
        )
        for own, other in zip(found, expected, strict=True):
            assert (own - other).norm().item() <= 1e-5 * other.norm().item()
        num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert num_graphs == [1, 1, 2, 2, 2]


def test_operations_follow_the_phases() -> None:
    first, last = flops_at(JOB, 0), flops_at(JOB, 9)
    assert first < 0.7 * last == 0.7 * flops_at(replace(JOB, tokens=TokensConfig()), 0)
    sums = [flops_of_steps(JOB, steps) for steps in (0, 3, 8, 9, 10, 12)]
    assert sums == [0, 3 * first, 8 * first, 8 * first + last, 8 * first + 2 * last, 8 * first + 4 * last]


@pytest.mark.long
def test_a_run_is_the_same_on_any_topology_and_after_a_kill(digits_url: str, tmp_path: Path) -> None:
    """Micro-batches, ranks, a ZeRO stage and recomputation change results to rounding. A continuation from a step with
    few patches, into the steps with all, changes no bit."""
    whole, other, third, again = (tmp_path / name for name in ("whole", "other", "third", "again"))
    options = ("--engine.precision", "fp32", "--tokens.patch-dropout", "0.5", "--tokens.whole-steps", "3")
    parts = ("--micro-batch", "4", "--engine.zero-stage", "2", "--engine.activation-checkpointing", "selective")
    for run_dir, num_ranks, more in ((whole, 1, ()), (other, 2, parts), (third, 2, ("--engine.zero-stage", "3"))):
        words = pretrain_words(digits_url, run_dir, *options, *more)
        assert run(words, num_ranks=num_ranks, log_dir=tmp_path) == exit_codes.DONE
    expected = list(losses(whole).values())
    assert list(losses(other).values()) == pytest.approx(expected, rel=1e-4)
    assert list(losses(third).values()) == pytest.approx(expected, rel=1e-4)

    shutil.copytree(whole, again)
    (again / "DONE").unlink()
    shutil.rmtree(again / "weights")
    shutil.rmtree(again / "checkpoints" / f"step-{STEPS:08d}")
    assert run(pretrain_words(digits_url, again, *options), num_ranks=1, log_dir=tmp_path) == exit_codes.DONE
    weights = [(folder / "weights" / "model.safetensors").read_bytes() for folder in (whole, again)]
    assert weights[0] == weights[1]
    assert losses(again) == losses(whole)
