"""A run that is killed and continued on other numbers of ranks, or under other ZeRO stages, stays the same run.

It has the same samples and pixels at every step, and losses within 1e-5 of the unbroken run's: in fp32 they differ only
in the order of additions.
"""

import zlib
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from jobs import exit_codes
from pipeline.data.config import DataConfig
from pipeline.data.stream import train_batches
from tests.rigs.kills import run_and_kill
from tests.rigs.training import FinishedRuns, losses, pretrain_words, resumed_steps, run

pytestmark = pytest.mark.slow
STEPS, BATCH, SAVE_STEPS = 50, 32, 10
FP32 = ("--engine.precision", "fp32", "--steps", str(STEPS), "--checkpoint.every-steps", str(SAVE_STEPS))
Leg = tuple[int, int]  # ranks, ZeRO stage


def has_committed(run_dir: Path, *, step: int) -> bool:
    """Whether a checkpoint of this step is committed."""
    return any(run_dir.glob(f"checkpoints/step-{step:08d}/*/MANIFEST.json"))


def train(url: str, run_dir: Path, legs: Sequence[Leg], folder: Path, *more: str) -> None:
    """Runs the legs one after another; each but the last is killed once a checkpoint further is committed."""
    for number, (num_ranks, stage) in enumerate(legs, start=1):
        words = pretrain_words(url, run_dir, *FP32, "--engine.zero-stage", str(stage), *more)
        if number == len(legs):
            assert run(words, num_ranks=num_ranks, log_dir=folder) == exit_codes.DONE
            return
        committed = partial(has_committed, step=number * SAVE_STEPS)
        is_killed = run_and_kill(words, run_dir, moment=committed, num_ranks=num_ranks, log_dir=folder)
        assert is_killed, "the run ended before the kill"


@pytest.mark.long
@pytest.mark.parametrize("legs", [((1, 1), (2, 1), (4, 1), (1, 1)), ((2, 1), (2, 3), (2, 2))], ids=["ranks", "stages"])
def test_losses_are_those_of_the_unbroken_run(
    digits_url: str, finished_runs: FinishedRuns, tmp_path: Path, legs: tuple[Leg, ...]
) -> None:
    train(digits_url, tmp_path / "elastic", legs, tmp_path)

    resumed = resumed_steps(tmp_path / "elastic")
    assert len(resumed) == len(legs)
    assert all(later > earlier for earlier, later in pairwise(resumed)), "each leg continues a later checkpoint"
    expected, found = losses(finished_runs.get(1, *FP32)), losses(tmp_path / "elastic")
    assert list(found) == list(expected) == list(range(1, STEPS + 1))
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("legs", [((16, 1), (4, 3), (12, 2)), ((3, 3), (2, 3)), ((3, 1), (4, 3))])
def test_other_ranks_that_do_not_divide_each_other_continue(
    digits_url: str, tmp_path: Path, legs: tuple[Leg, ...]
) -> None:
    more = ("--global-batch", "48", "--data.lanes", "48", "--steps", str(4 * SAVE_STEPS))
    train(digits_url, tmp_path / "unbroken", [(1, 1)], tmp_path, *more)
    train(digits_url, tmp_path / "elastic", legs, tmp_path, *more)

    resumed = resumed_steps(tmp_path / "elastic")
    assert resumed[1] in (SAVE_STEPS, 2 * SAVE_STEPS)
    assert all(later > earlier for earlier, later in pairwise(resumed))
    expected, found = losses(tmp_path / "unbroken"), losses(tmp_path / "elastic")
    assert found.keys() == expected.keys()
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5)


def test_samples_and_pixels_are_the_same_when_the_number_of_ranks_changes(digits_url: str, tmp_path: Path) -> None:
    """Each change hands over a position, as a checkpoint does."""
    steps_a_leg, config = 5, DataConfig(lanes=8, num_threads=1)

    def leg(
        position: dict[str, object] | None, num_ranks: int, num_steps: int
    ) -> tuple[list[object], dict[str, object]]:
        """Sample ids and checksums of the pixels at each step, in the order of the global batch."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(num_steps)]
        end: dict[str, object] = {}
        for rank in range(num_ranks):
            quarantine = tmp_path / "quarantine.jsonl"
            with train_batches(
                digits_url,
                global_batch=BATCH,
                image_size=16,
                rank=rank,
                num_ranks=num_ranks,
                position=position,
                config=config,
                quarantine=quarantine,
            ) as batches:
                for step in range(num_steps):
                    batch = next(batches)
                    pixels = [zlib.crc32(image.tobytes()) for image in batch.images.numpy()]
                    found[step] += list(zip(batch.sample_ids.tolist(), pixels, strict=True))
                end = batches.position
        return list(found), end

    expected, _ = leg(None, 1, 4 * steps_a_leg)
    found: list[object] = []
    position: dict[str, object] | None = None
    for num_ranks in (1, 2, 4, 1):
        steps, position = leg(position, num_ranks, steps_a_leg)
        found += steps
    assert found == expected
