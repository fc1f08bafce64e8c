"""Real runs that hang: all ranks end with 74 in time, their stacks are there, one message says who hangs and where, and
the same command continues as if nothing had happened. A rank that stands for less than the limit is waited for."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import exit_codes
from jobs.ranks import Ranks
from tests.rigs.faulty_connection import FaultyProxy
from tests.rigs.interrupting import behind_a_proxy
from tests.rigs.kills import Moment, step_at_least, wait_until
from tests.rigs.training import FinishedRuns, losses, pretrain_words, run, start

LIMIT_SECONDS = 4.0
HANG = ("--hang.step-seconds", str(LIMIT_SECONDS), "--hang.other-seconds", "60")
STATED_SECONDS = LIMIT_SECONDS + 3 + 60  # the limit, the time to write stacks, and what a busy machine takes
STOPPED_SECONDS = 3.0  # tests/soak/stops.py stops ranks for a minute
THREE = ("--global-batch", "48", "--data.lanes", "12")  # 3 ranks divide it
FP32 = ("--engine.precision", "fp32")


def ended(ranks: Ranks, *numbers: int) -> list[int | None]:
    """The exit codes of these ranks, without a launcher that ends them. TimeoutError if they do not end in time."""
    deadline, pause = time.monotonic() + STATED_SECONDS, threading.Event()
    while any(ranks.processes[number].poll() is None for number in numbers):
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {STATED_SECONDS} s: {[process.poll() for process in ranks.processes]}")
        pause.wait(0.05)
    return [ranks.processes[number].returncode for number in numbers]


def stands_in(text: str, *, rank: int = 0, batch: int = 0) -> Moment:
    """True once the heartbeat of a rank says so."""

    def stands(run_dir: Path) -> bool:
        path = run_dir / "heartbeats" / f"rank-{rank:05d}.json"
        beat: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return bool(beat) and beat["phase"] == text and int(beat["batch"]) >= batch

    return stands


def stacks_of(run_dir: Path, rank: int) -> str:
    (path,) = (run_dir / "stacks").glob(f"rank-{rank:05d}-attempt-*.txt")
    return path.read_text()


def all_said(capfd: pytest.CaptureFixture[str], folder: Path) -> str:
    return capfd.readouterr().err + "".join(log.read_text() for log in sorted(folder.glob("rank-*.log")))


def test_a_stopped_rank_is_named_and_the_run_continues(
    finished_runs: FinishedRuns, digits_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    unbroken, run_dir = finished_runs.get(3, *THREE, *FP32), tmp_path / "run"
    words = pretrain_words(digits_url, run_dir, *HANG, *THREE, *FP32)
    ranks = start(words, num_ranks=3, log_dir=tmp_path)
    assert wait_until(ranks, step_at_least(6), run_dir)
    capfd.readouterr()
    ranks.processes[2].send_signal(signal.SIGSTOP)
    assert ended(ranks, 0, 1) == [exit_codes.CRASH] * 2
    said = all_said(capfd, tmp_path)
    assert said.count("error: ") == 1, said
    who = f"rank 2 of 3 on host {os.uname().nodename} (process {ranks.processes[2].pid})"
    assert f"the run hangs: {who} has been silent for " in said
    assert "; last heard in step " in said
    assert "; the others wait for it in step " in said
    for rank in range(2):
        assert "all_reduce" in stacks_of(run_dir, rank)
    assert ranks.processes[2].poll() is None
    ranks.processes[2].send_signal(signal.SIGCONT)
    assert ended(ranks, 2) == [exit_codes.CRASH]

    assert run(words, num_ranks=3, log_dir=tmp_path) == 0
    assert losses(run_dir) == losses(unbroken)


@pytest.mark.long
def test_a_run_that_is_suspended_as_a_whole_continues(
    finished_runs: FinishedRuns, digits_url: str, tmp_path: Path
) -> None:
    unbroken, run_dir = finished_runs.get(2, *FP32), tmp_path / "run"
    hang = ("--hang.step-seconds", "3", "--hang.other-seconds", "60")
    ranks = start(pretrain_words(digits_url, run_dir, *hang, *FP32), num_ranks=2, log_dir=tmp_path)
    assert wait_until(ranks, step_at_least(5), run_dir)
    ranks.signal(signal.SIGSTOP)
    assert not threading.Event().wait(7)  # longer than the limit, and than that of the last resort
    ranks.signal(signal.SIGCONT)
    assert ranks.wait() == 0
    assert losses(run_dir) == losses(unbroken)
    assert not (run_dir / "stacks").exists()


@pytest.fixture
def stalling(digits_url: str, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, FaultyProxy]]:
    """The digits in a bucket, behind a proxy that stalls its answers on request."""
    with behind_a_proxy(digits_url, s3_bucket) as (url, proxy):
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield url, proxy


def test_a_read_that_hangs_is_in_the_stacks(
    stalling: tuple[str, FaultyProxy], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (url, proxy), run_dir = stalling, tmp_path / "run"
    words = pretrain_words(url, run_dir, *HANG, *FP32, "--data.window-blocks", "1", "--steps", "4000")
    ranks = start(words, num_ranks=1, log_dir=tmp_path)
    assert wait_until(ranks, step_at_least(3), run_dir)
    proxy.rates = {"silence": 1.0}
    assert proxy.stalling.wait(60)
    assert ended(ranks, 0) == [exit_codes.CRASH]
    said = all_said(capfd, tmp_path)
    assert "the run hangs: rank 0 of 1 on host " in said
    assert ", waiting for data. Stacks are in " in said
    assert "storage/s3.py" in stacks_of(run_dir, 0)


def test_a_rank_that_is_stopped_inside_an_evaluation_is_named(
    digits_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    evaluation = ("--evaluation.url", digits_url, "--evaluation.every-steps", "2", "--evaluation.batch-size", "1")
    ranks = start(pretrain_words(digits_url, run_dir, *HANG, *FP32, *evaluation), num_ranks=2, log_dir=tmp_path)
    assert wait_until(ranks, stands_in("evaluating", rank=1, batch=3), run_dir)
    ranks.processes[1].send_signal(signal.SIGSTOP)
    assert ended(ranks, 0) == [exit_codes.CRASH]
    ranks.kill()
    said = all_said(capfd, tmp_path)
    assert "the run hangs: rank 1 of 2 on host " in said
    assert re.search(r"; last heard in step \d+, evaluating batch \d+; the others wait for it in step", said), said
    assert "in evaluate\n" in stacks_of(run_dir, 0)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_that_is_stopped_for_a_while_changes_nothing(
    rank: int, finished_runs: FinishedRuns, digits_url: str, tmp_path: Path
) -> None:
    """SIGSTOP, then SIGCONT: the others wait for it."""
    run_dir = tmp_path / "run"
    ranks = start(pretrain_words(digits_url, run_dir), num_ranks=2, log_dir=tmp_path)
    assert wait_until(ranks, step_at_least(5), run_dir)
    ranks.processes[rank].send_signal(signal.SIGSTOP)
    before = len(losses(run_dir))
    assert not threading.Event().wait(STOPPED_SECONDS)
    assert ranks.poll(), "both ranks are still there"
    # The step that both had sent their gradients for, and the one before it, whose line may not have been written yet.
    assert len(losses(run_dir)) <= before + 2, "the other rank waits"
    ranks.processes[rank].send_signal(signal.SIGCONT)
    assert ranks.wait() == 0
    assert losses(run_dir) == losses(finished_runs.get(2))
