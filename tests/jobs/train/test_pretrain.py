"""`patchline pretrain` under kill -9: whenever it is killed, the same command ends with the losses of the unbroken
run."""

import json
import os
import signal
import stat
from pathlib import Path

import pytest

from jobs import exit_codes
from tests.rigs.kills import Moment, attempts_at_least, run_and_kill, saving, step_at_least, wait_until
from tests.rigs.training import STEPS, FinishedRuns, losses, pretrain_words, resumed_steps, run, start

pytestmark = pytest.mark.slow
STAGE_1 = ("--engine.zero-stage", "1")


# Each start is killed at the next moment of this list, whether it made progress or not.
TEN_MOMENTS: list[Moment] = [
    attempts_at_least(1),  # before the first step
    step_at_least(1),
    step_at_least(3),  # before the first checkpoint
    saving(4),  # while the first checkpoint is written
    step_at_least(5),
    saving(8),
    step_at_least(9),
    step_at_least(11),
    step_at_least(14),
    saving(STEPS),  # while the last checkpoint, the weights or the marker are written
]


@pytest.mark.long
def test_ten_kills_end_at_the_unbroken_runs_losses(
    digits_url: str, finished_runs: FinishedRuns, tmp_path: Path
) -> None:
    unbroken, killed = finished_runs.get(2, *STAGE_1), tmp_path / "killed"
    words = pretrain_words(digits_url, killed)

    for moment in TEN_MOMENTS:
        assert run_and_kill(words, killed, moment=moment, num_ranks=2, log_dir=tmp_path)
    assert not (killed / "weights" / "config.json.part").exists()
    assert run(words, num_ranks=2, log_dir=tmp_path) == 0

    assert len(resumed_steps(killed)) >= len(TEN_MOMENTS)
    assert losses(killed) == losses(unbroken)
    weights = [(folder / "weights" / "model.safetensors").read_bytes() for folder in (unbroken, killed)]
    assert weights[0] == weights[1]


def test_when_one_rank_dies_the_other_ends_and_the_run_goes_on(
    digits_url: str, finished_runs: FinishedRuns, tmp_path: Path
) -> None:
    unbroken, killed = finished_runs.get(2, *STAGE_1), tmp_path / "killed"
    words = pretrain_words(digits_url, killed)
    ranks = start(words, num_ranks=2, log_dir=tmp_path)
    assert wait_until(ranks, step_at_least(6), killed)
    ranks.processes[1].kill()

    assert ranks.wait() not in (0, exit_codes.USER_MISTAKE, exit_codes.CONTINUE, exit_codes.WILL_NOT_SUCCEED)

    assert run(words, num_ranks=2, log_dir=tmp_path) == 0
    assert losses(killed) == losses(unbroken)


@pytest.mark.parametrize("ask", ["USR2", "STOP"])
def test_asked_to_stop_it_saves_and_says_75(digits_url: str, tmp_path: Path, ask: str) -> None:
    run_dir = tmp_path / "run"
    words = pretrain_words(digits_url, run_dir, "--steps", "400", "--checkpoint.every-steps", "1000")
    ranks = start(words, num_ranks=1, log_dir=tmp_path)
    assert wait_until(ranks, step_at_least(3), run_dir)
    if ask == "STOP":
        (run_dir / "STOP").touch()
    else:
        os.kill(ranks.processes[0].pid, signal.Signals[f"SIG{ask}"])

    assert ranks.wait() == exit_codes.CONTINUE

    saved = sorted((run_dir / "checkpoints").glob("step-*/*/MANIFEST.json"))
    assert len(saved) == 1
    assert json.loads(saved[0].read_text())["id"]["step"] == max(losses(run_dir))
    assert not (run_dir / "DONE").exists()


def test_the_run_directory_says_everything_and_replays(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    run_dir = finished_runs.get(1, *STAGE_1)

    names = {path.name for path in run_dir.iterdir()}
    assert {"job.yaml", "metrics.jsonl", "checkpoints", "ledger.jsonl", "weights", "DONE"} <= names
    assert stat.S_IMODE(run_dir.stat().st_mode) == stat.S_IMODE((run_dir / "checkpoints").stat().st_mode)
    assert any(name.startswith("events.out.tfevents.") for name in names)

    again = ["pretrain", str(run_dir / "job.yaml"), "--run-dir", str(tmp_path / "again")]
    assert run(again, num_ranks=1, log_dir=tmp_path) == 0
    assert losses(tmp_path / "again") == losses(run_dir)
