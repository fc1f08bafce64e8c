"""Image sizes that change within a run: the batches' sizes and crops, positions, operations, and a run after a kill."""

import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from jobs import exit_codes
from jobs.recipes.pretrain import digits_smoke
from jobs.recipes.shorter import shortened, smoke
from pipeline.data.config import AugmentConfig, DataConfig, Share
from pipeline.data.stream import PlannedStream, open_stream, plan_stream
from pipeline.models import ModelConfig, ViT, build_model
from pipeline.models.positions import resample_position_embeddings
from pipeline.planning.step_time import flops_at, flops_of_steps
from pipeline.training.settings.tokens import TokenPhase, TokensConfig
from tests.rigs.training import STEPS, losses, pretrain_words, run

VIT = ModelConfig(name="vit", image_size=32, patch=8, depth=2, width=16, mlp_width=24, num_heads=2, num_classes=10)
BASE = digits_smoke()
SIZES = TokensConfig(image_sizes=(16, 24), size_steps=(4, 6))
JOB = replace(BASE, model=VIT, steps=10, schedule=replace(BASE.schedule, warmup_steps=0), tokens=SIZES)


def test_phases_follow_sizes_and_patches_that_are_left_out() -> None:
    both = replace(SIZES, patch_dropout=0.5, whole_steps=5)
    assert JOB.phases == tuple(TokenPhase(end=end, image_size=size) for end, size in ((4, 16), (6, 24), (10, 32)))
    assert replace(JOB, tokens=both).phases == (
        TokenPhase(end=4, image_size=16, num_stay=2),
        TokenPhase(end=5, image_size=24, num_stay=4),
        TokenPhase(end=6, image_size=24),
        TokenPhase(end=10, image_size=32),
    )
    assert replace(JOB, tokens=replace(both, whole_steps=0)).largest_phase.num_stay == 8


def test_operations_are_those_of_models_of_each_size() -> None:
    each = [
        flops_at(replace(JOB, model=replace(VIT, image_size=size), tokens=TokensConfig()), 0) for size in (16, 24, 32)
    ]
    assert [flops_at(JOB, step) for step in range(10)] == [*4 * each[:1], *2 * each[1:2], *4 * each[2:]]
    assert flops_of_steps(JOB, 10) == 4 * each[0] + 2 * each[1] + 4 * each[2]


def test_shorter_runs_keep_the_share_of_each_size() -> None:
    assert shortened(JOB, steps=5).tokens == TokensConfig(image_sizes=(16, 24), size_steps=(2, 3))
    assert shortened(JOB, steps=1).tokens == TokensConfig()
    assert smoke(JOB).tokens == TokensConfig()


def test_positions_are_resampled_in_the_pass_and_get_gradients() -> None:
    model = build_model(VIT, seed=1)
    assert isinstance(model, ViT)
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(2))
    images = torch.randint(0, 256, (2, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    table = dict(model.named_parameters())["embed.position"]
    small = build_model(replace(VIT, image_size=16), seed=1)
    resampled = resample_position_embeddings(table[0], from_grid=(4, 4), to_grid=(2, 2)).detach().unsqueeze(0)
    small.load_state_dict({**model.state_dict(), "embed.position": resampled})
    assert torch.equal(model(images), small(images))
    (gradient,) = torch.autograd.grad(model(images).square().sum(), [table])
    assert gradient.any()


def test_rotary_positions_of_smaller_images_are_those_of_the_models_own_grid() -> None:
    rotary = replace(VIT, position="rope2d")
    images = torch.randint(0, 256, (2, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))

    def tokens(config: ModelConfig) -> torch.Tensor:
        model = build_model(config, seed=1)
        assert isinstance(model, ViT)
        return model.tokens(images)

    found = tokens(rotary)
    assert torch.equal(found, tokens(replace(rotary, rotary_grid=4)))
    assert not torch.allclose(found, tokens(replace(rotary, image_size=16))), "places that are counted"


CROPS = [AugmentConfig(crop="inception"), AugmentConfig(crop="resize_crop")]


@pytest.mark.parametrize("augment", CROPS, ids=lambda augment: augment.crop)
def test_batches_change_their_size_and_nothing_else(digits_url: str, tmp_path: Path, augment: AugmentConfig) -> None:
    """Each batch is that of a stream of its own size, from any step on."""
    config = DataConfig(url=digits_url, augment=augment, lanes=8)

    def stream_of(size: int) -> PlannedStream:
        share = Share(global_batch=8, rank=0, num_ranks=1)
        return plan_stream(config, seed=3, image_size=size, share=share, num_cores=1)

    def batches(planned: PlannedStream, *, first: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
        with open_stream(planned, next_step=first, quarantine=tmp_path / "quarantine.jsonl") as stream:
            own = islice(stream, 8 - first)
            return [(batch.images.clone(), batch.labels.clone()) for batch in own]

    alone = {size: batches(stream_of(size)) for size in (16, 24, 32)}
    expected = [alone[16 if step < 4 else 24 if step < 6 else 32][step] for step in range(8)]
    changing = replace(stream_of(32), sizes=((4, 16), (6, 24)))
    for first in (0, 5):
        for own, other in zip(batches(changing, first=first), expected[first:], strict=True):
            assert all(map(torch.equal, own, other))


@pytest.mark.long
def test_a_run_is_the_same_on_any_topology_and_after_a_kill(digits_url: str, tmp_path: Path) -> None:
    """Micro-batches, ranks and a ZeRO stage change results to rounding. A continuation at one size, into steps of
    another, changes no bit."""
    whole, other, again = (tmp_path / name for name in ("whole", "other", "again"))
    options = ("--engine.precision", "fp32", "--tokens.image-sizes", "16", "--tokens.size-steps", "14")
    parts = ("--micro-batch", "4", "--engine.zero-stage", "3")
    for run_dir, num_ranks, more in ((whole, 1, ()), (other, 2, parts)):
        words = pretrain_words(digits_url, run_dir, *options, *more)
        assert run(words, num_ranks=num_ranks, log_dir=tmp_path) == exit_codes.DONE
    assert list(losses(other).values()) == pytest.approx(list(losses(whole).values()), rel=1e-4)

    shutil.copytree(whole, again)
    (again / "DONE").unlink()
    shutil.rmtree(again / "weights")
    shutil.rmtree(again / "checkpoints" / f"step-{STEPS:08d}")
    assert run(pretrain_words(digits_url, again, *options), num_ranks=1, log_dir=tmp_path) == exit_codes.DONE
    weights = [(folder / "weights" / "model.safetensors").read_bytes() for folder in (whole, again)]
    assert weights[0] == weights[1]
    assert losses(again) == losses(whole)
