"""Whole small runs: continued ones equal unbroken ones bit for bit, for every ZeRO stage and number of ranks."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.training.run import is_done
from tests.rigs.training import STEPS, losses, pretrain_words, resumed_steps, run

pytestmark = pytest.mark.slow


def continue_from(source: Path, target: Path, *, step: int) -> None:
    """A copy of a run as a kill after `step` would have left it: later checkpoints and the end are missing."""
    shutil.copytree(source, target)
    for folder in (target / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    (target / "DONE").unlink()
    shutil.rmtree(target / "weights")


@pytest.mark.parametrize(
    ("stage", "num_ranks", "more"),
    [
        (1, 1, ()),
        (1, 2, ()),
        (2, 2, ("--optimizer.name", "sgd", "--schedule.learning-rate", "0.03")),  # another set of moments
        (3, 1, ("--engine.precision", "fp32")),
        (3, 2, ()),
        (1, 2, ("--micro-batch", "8")),  # accumulation in bf16 makes DeepSpeed take another optimiser class
    ],
)
def test_a_continued_run_equals_the_unbroken_one(
    digits_url: str, tmp_path: Path, stage: int, num_ranks: int, more: tuple[str, ...]
) -> None:
    options = ("--engine.zero-stage", str(stage), "--checkpoint.keep-newest", "4", *more)
    unbroken, continued = tmp_path / "unbroken", tmp_path / "continued"
    assert run(pretrain_words(digits_url, unbroken, *options), num_ranks=num_ranks, log_dir=tmp_path) == 0
    continue_from(unbroken, continued, step=STEPS // 2)

    assert run(pretrain_words(digits_url, continued, *options), num_ranks=num_ranks, log_dir=tmp_path) == 0

    assert resumed_steps(continued) == [0, STEPS // 2]
    assert losses(continued) == losses(unbroken)
    assert set(losses(unbroken)) == set(range(1, STEPS + 1))
    expected, found = (load_file(d / "weights" / "model.safetensors") for d in (unbroken, continued))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 1), (1, 3)), ((1, 3), (2, 2))],  # (ranks, ZeRO stage) before and after the continuation
)
def test_a_run_goes_on_with_other_ranks_and_stages(
    digits_url: str, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """fp32: equal to rounding, since the order of additions differs."""
    fp32 = ("--engine.precision", "fp32", "--checkpoint.keep-newest", "4")
    unbroken, continued = tmp_path / "unbroken", tmp_path / "continued"
    words = pretrain_words(digits_url, unbroken, *fp32, "--engine.zero-stage", str(before[1]))
    assert run(words, num_ranks=before[0], log_dir=tmp_path) == 0
    continue_from(unbroken, continued, step=STEPS // 2)

    words = pretrain_words(digits_url, continued, *fp32, "--engine.zero-stage", str(after[1]))
    assert run(words, num_ranks=after[0], log_dir=tmp_path) == 0

    expected, found = losses(unbroken), losses(continued)
    assert found.keys() == expected.keys()
    assert [found[s] for s in sorted(found)] == pytest.approx([expected[s] for s in sorted(expected)], abs=2e-5)


def test_a_finished_run_is_left_alone_and_a_longer_one_goes_on(digits_url: str, run_dir: Path, tmp_path: Path) -> None:
    words = pretrain_words(digits_url, run_dir)
    assert run(words, num_ranks=1, log_dir=tmp_path) == 0
    marker = (run_dir / "DONE").read_text()
    assert json.loads(marker)["step"] == STEPS
    assert is_done(run_dir, steps=STEPS)
    assert not is_done(run_dir, steps=STEPS + 1)

    assert run(words, num_ranks=1, log_dir=tmp_path) == 0
    assert (run_dir / "DONE").read_text() == marker
    assert resumed_steps(run_dir) == [0]  # no second start

    weights = run_dir / "weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert not is_done(run_dir, steps=STEPS)  # a marker that does not verify is none

    assert run([*words, "--steps", str(STEPS + 4)], num_ranks=1, log_dir=tmp_path) == 0
    assert resumed_steps(run_dir) == [0, STEPS]
    assert set(losses(run_dir)) == set(range(1, STEPS + 5))


def test_a_torn_checkpoint_is_passed_over(
    digits_url: str, run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = pretrain_words(digits_url, run_dir, "--checkpoint.keep-newest", "4")
    assert run(words, num_ranks=2, log_dir=tmp_path) == 0
    expected = losses(run_dir)
    newest = next((run_dir / "checkpoints").glob(f"step-{STEPS:08d}/*/rank-00001.safetensors"))
    data = bytearray(newest.read_bytes())
    data[-5] ^= 1
    newest.write_bytes(bytes(data))
    (run_dir / "DONE").unlink()

    assert run(words, num_ranks=2, log_dir=tmp_path) == 0

    assert resumed_steps(run_dir) == [0, STEPS - 4]
    assert losses(run_dir) == expected
    assert f"passing over checkpoint step-{STEPS:08d}" in capfd.readouterr().err


def test_a_change_that_would_be_another_run_is_refused(
    digits_url: str, run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = pretrain_words(digits_url, run_dir)
    assert run([*words, "--steps", "4"], num_ranks=1, log_dir=tmp_path) == 0
    for change in (("--seed", "1"), ("--data.lanes", "4"), ("--model.depth", "1")):
        capfd.readouterr()
        assert run([*words, *change], num_ranks=1, log_dir=tmp_path) == 2
        message = capfd.readouterr().err
        assert change[0].removeprefix("--").split(".")[-1] in message
        assert "another --run-dir" in message
        assert "Traceback" not in message
