"""Clocks that jump: while a run trains, and between a save and its resumption. File times say nothing either."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import exit_codes
from pipeline.training.reporting.ledger import Ledger
from tests.rigs.forks import ONE_THREAD
from tests.rigs.interrupting import started
from tests.rigs.kills import run_and_kill, step_at_least
from tests.rigs.training import AT_ONCE, FinishedRuns, losses, pretrain_words, resumed_steps, run

pytestmark = pytest.mark.slow
YEAR_SECONDS = 365 * 86400.0


def jumping() -> None:
    """For a forked command: from call to call its clock is right, ten years ahead, or ten years behind."""
    right, calls = time.time, [0]

    def now() -> float:
        calls[0] += 1
        return right() + (0.0, 10.0, -10.0)[calls[0] % 3] * YEAR_SECONDS

    time.time = now


@pytest.mark.long
def test_jumps_change_nothing(finished_runs: FinishedRuns, digits_url: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with started(
        tmp_path / "said", *pretrain_words(digits_url, run_dir), environ=ONE_THREAD, before=jumping
    ) as command:
        assert command.end() == exit_codes.DONE, command.said
    assert losses(run_dir) == losses(finished_runs.get(1))
    assert_sensible(run_dir, most_seconds=120.0)


@pytest.mark.parametrize("years", [pytest.param(10, marks=pytest.mark.long), -10])
def test_a_clock_that_was_wrong_and_file_times_turned_around(
    years: int, finished_runs: FinishedRuns, digits_url: str, tmp_path: Path
) -> None:
    """Saved with a clock that is years off; resumed now, with file times in the opposite order of the checkpoints."""
    run_dir = tmp_path / "run"
    words = pretrain_words(digits_url, run_dir, *AT_ONCE)
    assert run_and_kill(words, run_dir, moment=step_at_least(9), num_ranks=1, log_dir=tmp_path)
    of_last_save(run_dir, lambda now: now + years * YEAR_SECONDS)
    for path in sorted((run_dir / "checkpoints").rglob("*"), reverse=True):
        step = (
            int(path.relative_to(run_dir / "checkpoints").parts[0].removeprefix("step-") or 0)
            if "step-" in str(path)
            else 0
        )
        os.utime(path, (1e9 - step, 1e9 - step))
    assert run(words, num_ranks=1, log_dir=tmp_path) == exit_codes.DONE
    assert resumed_steps(run_dir) == [0, 8]
    assert losses(run_dir) == losses(finished_runs.get(1))
    assert_sensible(run_dir, most_seconds=240.0)


def of_last_save(run_dir: Path, change: Callable[[float], float]) -> None:
    """Changes the time of the ledger's last line."""
    path = run_dir / "ledger.jsonl"
    *lines, last = path.read_text().splitlines()
    line = json.loads(last)
    line["unix_time"] = change(line["unix_time"])
    path.write_text("\n".join([*lines, json.dumps(line)]) + "\n")


def assert_sensible(run_dir: Path, *, most_seconds: float) -> None:
    """No account of the ledger is negative or longer than the test, and no later one is shorter."""
    for line in (run_dir / "ledger.jsonl").read_text().splitlines():
        seconds = json.loads(line)["seconds"]
        assert all(0 <= spent <= most_seconds for name, spent in seconds.items() if name != "goodput"), seconds
        assert 0 <= seconds["goodput"] <= 1
    assert all(0 <= spent <= most_seconds for spent in Ledger(run_dir).seconds.values())
