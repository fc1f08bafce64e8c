"""Whole runs that save by time, at a new best score, or at the end alone; on real ranks, killed and resumed."""

import json
from pathlib import Path

import pytest

from jobs import exit_codes
from pipeline.checkpoints.stored import Best, read_best
from pipeline.training.reporting.metrics import read_metrics
from pipeline.training.summary import scores_of
from tests.rigs.kills import run_and_kill, step_at_least, wait_until
from tests.rigs.training import STEPS, FinishedRuns, losses, pretrain_words, run, start

pytestmark = pytest.mark.slow

SCORED = ("--evaluation.every-steps", "2", "--checkpoint.every-steps", "0", "--checkpoint.keep-newest", "1")


def saved_steps(run_dir: Path) -> list[int]:
    """Of the checkpoints that are there."""
    return sorted(int(path.parts[-3][5:]) for path in run_dir.glob("checkpoints/step-*/*/MANIFEST.json"))


def recorded_steps(run_dir: Path) -> list[int]:
    """Of all checkpoints that were ever committed."""
    ledger = run_dir / "ledger.jsonl"
    return [json.loads(line)["step"] for line in ledger.read_text().splitlines()] if ledger.exists() else []


def best_steps(run_dir: Path) -> list[int]:
    """The steps whose score was the best so far."""
    scores = scores_of(run_dir)
    keys = [(score.accuracy, -score.loss) for score in scores]
    return [score.step for number, score in enumerate(scores) if keys[number] > max(keys[:number], default=(-1.0, 0.0))]


def named(run_dir: Path) -> Best:
    """What RUN/best.json names."""
    best = read_best(run_dir)
    assert best
    return best


def test_without_any_interval_only_the_end_saves(
    digits_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = pretrain_words(digits_url, tmp_path / "run", "--checkpoint.every-steps", "0")
    assert run(words, num_ranks=1, log_dir=tmp_path) == 0
    assert recorded_steps(tmp_path / "run") == [STEPS]
    said = capfd.readouterr().err
    assert said.count("checkpoints at the end only, or on request (a signal, RUN/STOP, RUN/SAVE)") == 1


def test_ranks_save_together_by_the_clock_of_the_first(digits_url: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = pretrain_words(digits_url, run_dir, "--steps", "4000", "--checkpoint.every-steps", "0")
    ranks = start([*words, "--checkpoint.every-seconds", "0.3"], num_ranks=2, log_dir=tmp_path)
    assert wait_until(ranks, lambda folder: len(recorded_steps(folder)) >= 3, run_dir)
    (run_dir / "STOP").touch()
    assert ranks.wait() == exit_codes.CONTINUE
    assert all(line["checkpoint/interval_seconds"] == 0.3 for line in read_metrics(run_dir))


@pytest.fixture(scope="module")
def unbroken(finished_runs: FinishedRuns, digits_url: str) -> Path:
    """A run of two ranks that saves at each new best score and at the end."""
    return finished_runs.get(2, "--evaluation.url", digits_url, *SCORED)


def test_no_interval_is_chosen_once_the_run_is_over(
    digits_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = pretrain_words(digits_url, tmp_path / "run", "--checkpoint.every-steps", "0", "--checkpoint.auto-interval")
    assert run(words, num_ranks=1, log_dir=tmp_path) == 0
    said = capfd.readouterr().err
    assert "checkpoints by time" in said
    assert "from now on" not in said


def test_each_new_best_is_saved_and_the_last_of_them_named(unbroken: Path) -> None:
    best = best_steps(unbroken)
    assert recorded_steps(unbroken) == sorted({*best, STEPS})
    line = next(line for line in read_metrics(unbroken) if line["step"] == best[-1])
    found = named(unbroken)
    assert (found.step, found.accuracy, found.loss) == (best[-1], line["test_accuracy"], line["test_loss"])
    assert (unbroken / "checkpoints" / found.checkpoint / "MANIFEST.json").is_file()
    assert {best[-1], STEPS} <= set(saved_steps(unbroken))


@pytest.mark.long
def test_a_run_killed_right_after_a_best_ends_like_the_unbroken_one(
    digits_url: str, tmp_path: Path, unbroken: Path
) -> None:
    run_dir = tmp_path / "run"
    words = pretrain_words(digits_url, run_dir, "--evaluation.url", digits_url, *SCORED)
    second = best_steps(unbroken)[1]

    def is_named(folder: Path) -> bool:
        return (folder / "best.json").exists() and named(folder).step == second

    assert run_and_kill(words, run_dir, moment=is_named, num_ranks=2, log_dir=tmp_path)
    assert run(words, num_ranks=2, log_dir=tmp_path) == 0
    assert losses(run_dir) == losses(unbroken)
    assert best_steps(run_dir) == best_steps(unbroken)
    ours, theirs = named(run_dir), named(unbroken)
    assert (ours.step, ours.accuracy, ours.loss) == (theirs.step, theirs.accuracy, theirs.loss)
    assert set(saved_steps(run_dir)) >= {ours.step, STEPS}


def test_auto_says_what_it_does(digits_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    words = pretrain_words(
        digits_url, run_dir, "--steps", "4000", "--checkpoint.every-steps", "0", "--checkpoint.auto-interval"
    )
    ranks = start(words, num_ranks=1, log_dir=tmp_path)
    assert wait_until(ranks, step_at_least(2), run_dir)
    (run_dir / "SAVE").touch()
    assert wait_until(ranks, lambda folder: len(recorded_steps(folder)) == 1, run_dir)
    step = read_metrics(run_dir)[-1]["step"]
    assert wait_until(ranks, step_at_least(step + 3), run_dir)
    (run_dir / "STOP").touch()
    assert ranks.wait() == exit_codes.CONTINUE
    said = capfd.readouterr().err
    assert "checkpoints by time: the first after 1 min 0 s, then at an interval" in said
    assert "s and is committed after" in said
    assert "1 node with 0.0065 failures per node and day" in said
    intervals = [line["checkpoint/interval_seconds"] for line in read_metrics(run_dir)]
    assert intervals[0] == 60
    assert intervals[-1] > 60
