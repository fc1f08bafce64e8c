"""Which patches are corrupted: their shares, and the same run on any topology, after a kill and in a fine-tuning."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from jobs import exit_codes
from jobs.recipes.pretrain import masked_patches
from pipeline.models.weights.folder import open_weights
from pipeline.training.gradients import patch_sources
from pipeline.training.settings.job import TrainingJob
from tests.rigs.training import STEPS, losses, pretrain_words, run

NUM_IMAGES, NUM_PATCHES = 2000, 49
PLACES = np.arange(NUM_IMAGES)
MASKED = ("--model.masked-patches", "--model.num-classes", "512", "--engine.precision", "fp32")


def drawn(step: int = 3, places: np.ndarray = PLACES, num_corrupted: int = 24) -> tuple[np.ndarray, np.ndarray]:
    return patch_sources(step, places, seed=1, num_patches=NUM_PATCHES, num_corrupted=num_corrupted)


@pytest.mark.parametrize("num_corrupted", [pytest.param(24, id="half"), pytest.param(7, id="15 %")])
def test_as_many_patches_are_corrupted_80_10_10(num_corrupted: int) -> None:
    sources, corrupted = drawn(num_corrupted=num_corrupted)
    assert (corrupted.sum(axis=1) == num_corrupted).all(), "the same number in each image"
    own = np.arange(NUM_PATCHES)
    assert (sources == own)[~corrupted].all()
    found, places = sources[corrupted], np.broadcast_to(own, sources.shape)[corrupted]
    shares = [
        (found == NUM_PATCHES).mean(),
        ((found != NUM_PATCHES) & (found != places)).mean(),
        (found == places).mean(),
    ]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.01)
    assert corrupted.mean(axis=0) == pytest.approx(np.full(NUM_PATCHES, num_corrupted / 49), abs=0.05), (
        "each patch as often"
    )
    others = found[(found != NUM_PATCHES) & (found != places)]
    assert np.bincount(others, minlength=NUM_PATCHES).min() > 0, "any patch may take the place"


def test_an_images_draws_are_those_of_its_place_in_the_batch() -> None:
    whole, part = drawn(), drawn(places=PLACES[100:140])
    assert all(np.array_equal(own[100:140], other) for own, other in zip(whole, part, strict=True))
    assert not np.array_equal(drawn(4)[1], whole[1])
    assert not np.array_equal(whole[1][0], whole[1][1])


@pytest.mark.parametrize(
    ("share", "image_size", "expected"),
    [
        pytest.param(0.5, 224, 98, id="the paper's half of 196"),
        pytest.param(0.15, 224, 29, id="BERT's share, 29.4"),
        pytest.param(0.5, 112, 24, id="half of 49, rounded down"),
        pytest.param(0.29, 160, 29, id="0.29 x 100 is below 29 in binary"),
    ],
)
def test_the_share_is_rounded_down(share: float, image_size: int, expected: int) -> None:
    model = replace(masked_patches().model, masked_share=share, image_size=image_size)
    assert model.num_corrupted_patches == expected


def test_the_recipe_is_the_papers() -> None:
    job: TrainingJob = masked_patches()
    assert (job.steps, job.global_batch, job.schedule.learning_rate) == (1_000_000, 4096, 2e-4)
    assert (job.schedule.decay, job.schedule.warmup_steps, job.model.name) == ("cosine", 10_000, "vit_b16")


def test_a_run_is_the_same_on_any_topology_after_a_kill_and_is_fine_tuned(digits_url: str, tmp_path: Path) -> None:
    """Micro-batches, ranks, ZeRO stages and recomputation change results to rounding; a continuation no bit."""
    whole, other, third, again, tuned = (tmp_path / name for name in ("whole", "other", "third", "again", "tuned"))
    parts = ("--micro-batch", "4", "--engine.zero-stage", "2", "--engine.activation-checkpointing", "full")
    for run_dir, num_ranks, more in ((whole, 1, ()), (other, 2, parts), (third, 2, ("--engine.zero-stage", "3"))):
        words = pretrain_words(digits_url, run_dir, *MASKED, *more)
        assert run(words, num_ranks=num_ranks, log_dir=tmp_path) == exit_codes.DONE
    expected = list(losses(whole).values())
    assert expected[0] == pytest.approx(np.log(512), rel=1e-3)
    assert expected[-1] < expected[0] - 0.3, "it learns"
    assert list(losses(other).values()) == pytest.approx(expected, rel=1e-4)
    assert list(losses(third).values()) == pytest.approx(expected, rel=1e-4)

    shutil.copytree(whole, again)
    (again / "DONE").unlink()
    shutil.rmtree(again / "weights")
    shutil.rmtree(again / "checkpoints" / f"step-{STEPS:08d}")
    assert run(pretrain_words(digits_url, again, *MASKED), num_ranks=1, log_dir=tmp_path) == exit_codes.DONE
    weights = [(folder / "weights" / "model.safetensors").read_bytes() for folder in (whole, again)]
    assert weights[0] == weights[1]
    assert losses(again) == losses(whole)

    words = pretrain_words(digits_url, tuned, "--initial.weights", str(whole))
    assert run(words, num_ranks=1, log_dir=tmp_path) == exit_codes.DONE
    names = load_file(tuned / "weights" / "model.safetensors")
    assert (names["head.weight"].shape[0], "head.mask.token" in names) == (10, False)
    assert load_file(whole / "weights" / "model.safetensors")["head.mask.token"].abs().sum() > 0


@pytest.mark.long
def test_pixels_are_learned_on_several_ranks(digits_url: str, tmp_path: Path) -> None:
    """Means over the same number of values in each image: micro-batches and ranks change the loss to rounding."""
    pixels = (*MASKED[:2], "192", *MASKED[3:], "--model.masked-target", "pixels", "--model.masked-share", "0.2")
    found = []
    for name, num_ranks, more in (("one", 1, ()), ("two", 2, ("--micro-batch", "4", "--engine.zero-stage", "3"))):
        words = pretrain_words(digits_url, tmp_path / name, *pixels, *more)
        assert run(words, num_ranks=num_ranks, log_dir=tmp_path) == exit_codes.DONE
        found.append(list(losses(tmp_path / name).values()))
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0][-1] < 0.9 * found[0][0], "it learns"
    assert open_weights(str(tmp_path / "two")).labels[-1] == "row 7 column 7 blue"
