"""A real run whose checkpoint writers, or trainers, or both, are killed or held up while a checkpoint is written."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import exit_codes
from jobs.ranks import Ranks
from pipeline.checkpoints.manifest import manifest_from_json
from tests.rigs.forked_ranks import GOES_ON
from tests.rigs.kills import saving, step_at_least, wait_until
from tests.rigs.own_processes import is_alive
from tests.rigs.training import STEPS, FinishedRuns, losses, pretrain_words, resumed_steps, run, start
from tests.rigs.writers import writers_of

pytestmark = pytest.mark.slow
SECONDS = 60.0


def all_writers(ranks: Ranks) -> list[int]:
    return [writer for process in ranks.processes for writer in writers_of(process.pid)]


def weights(run_dir: Path) -> bytes:
    return (run_dir / "weights" / "model.safetensors").read_bytes()


def newest_step(run_dir: Path) -> int:
    manifests = [manifest_from_json(path.read_bytes()) for path in run_dir.glob("checkpoints/step-*/*/MANIFEST.json")]
    return max((manifest.id.step for manifest in manifests), default=0)


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_a_run_outlives_its_writers(
    finished_runs: FinishedRuns, digits_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One checkpoint is missing at most, and not a bit of the run."""
    run_dir = tmp_path / "run"
    ranks = start(pretrain_words(digits_url, run_dir), num_ranks=2, log_dir=tmp_path, stands_after=3)
    assert wait_until(ranks, step_at_least(3), run_dir)
    writers = all_writers(ranks)
    assert len(writers) == len(ranks.processes)
    for writer in writers:
        os.kill(writer, signal.SIGSTOP)
    (tmp_path / GOES_ON).touch()
    # The line of step 4 comes before its save. After step 5, which needs both ranks, both writers have their task.
    assert wait_until(ranks, step_at_least(5), run_dir)
    for writer in writers:
        os.kill(writer, signal.SIGKILL)
    assert ranks.wait() == 0
    said = capfd.readouterr().err
    assert "checkpoint of step 4 was not committed: the checkpoint writer (process " in said
    assert "was killed by SIGKILL" in said
    assert losses(run_dir) == losses(finished_runs.get(2))
    assert weights(run_dir) == weights(finished_runs.get(2))
    assert newest_step(run_dir) == STEPS


@pytest.mark.parametrize(
    "killed",
    [
        pytest.param("trainers", marks=pytest.mark.long),
        "trainers and writers",
        pytest.param("one trainer", marks=pytest.mark.long),
    ],
)
def test_a_run_that_is_killed_while_it_saves_continues_bit_for_bit(
    killed: str, finished_runs: FinishedRuns, digits_url: str, tmp_path: Path
) -> None:
    run_dir, words = tmp_path / "run", pretrain_words(digits_url, tmp_path / "run")
    ranks = start(words, num_ranks=2, log_dir=tmp_path, stands_after=9)  # or it may save step 12 before the kill
    assert wait_until(ranks, saving(8), run_dir)
    writers = all_writers(ranks)
    if killed == "trainers and writers":
        for writer in writers:
            os.kill(writer, signal.SIGKILL)
    if killed == "one trainer":
        ranks.processes[1].kill()
    ranks.kill()
    wait_for(lambda: not any(map(is_alive, writers)))
    assert newest_step(run_dir) in (4, 8)
    saved = newest_step(run_dir)
    assert run(words, num_ranks=2, log_dir=tmp_path) == 0
    assert resumed_steps(run_dir) == [0, saved]
    assert losses(run_dir) == losses(finished_runs.get(2))
    assert weights(run_dir) == weights(finished_runs.get(2))


@pytest.mark.long
def test_a_stop_waits_for_the_checkpoint_that_is_being_written(digits_url: str, tmp_path: Path) -> None:
    """Exit code 75 promises it, however long it takes; and a save that is under way holds up no step before."""
    run_dir = tmp_path / "run"
    words = pretrain_words(digits_url, run_dir, "--steps", "400", "--checkpoint.every-steps", "8")
    words += ["--checkpoint.when-busy", "skip"]
    ranks = start(words, num_ranks=1, log_dir=tmp_path)
    assert wait_until(ranks, step_at_least(2), run_dir)
    (writer,) = all_writers(ranks)
    os.kill(writer, signal.SIGSTOP)
    saved = newest_step(run_dir)
    assert wait_until(ranks, step_at_least(max(losses(run_dir)) + 24), run_dir), "training continues meanwhile"
    ranks.processes[0].send_signal(signal.SIGTERM)
    assert not threading.Event().wait(1.0)
    assert ranks.poll(), "it waits"
    assert newest_step(run_dir) <= saved + 8
    os.kill(writer, signal.SIGCONT)
    assert ranks.wait() == exit_codes.CONTINUE
    assert newest_step(run_dir) == max(losses(run_dir))
    assert not is_alive(writer)
