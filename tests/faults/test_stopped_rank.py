"""A rank that is stopped for a while (SIGSTOP) and continued (SIGCONT) changes nothing: the others wait for it."""

import signal
import threading
from pathlib import Path

import pytest

from tests.rigs.kills import step_at_least, wait_until
from tests.rigs.training import FinishedRuns, losses, pretrain_words, start

SECONDS = 3.0  # tests/soak/stops.py stops ranks for a minute


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_the_run_continues(rank: int, finished_runs: FinishedRuns, digits_url: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ranks = start(pretrain_words(digits_url, run_dir), num_ranks=2, log_dir=tmp_path)
    assert wait_until(ranks, step_at_least(5), run_dir)
    ranks.processes[rank].send_signal(signal.SIGSTOP)
    before = len(losses(run_dir))
    assert not threading.Event().wait(SECONDS)
    assert ranks.poll(), "both ranks are still there"
    assert len(losses(run_dir)) <= before + 1, "the other rank waits"
    ranks.processes[rank].send_signal(signal.SIGCONT)
    assert ranks.wait() == 0
    assert losses(run_dir) == losses(finished_runs.get(2))
