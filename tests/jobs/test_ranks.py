"""Ranks as real processes: their environment, their exit code, and how they end."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from jobs.ranks import Ranks, start_ranks


def ranks_of(*scripts: str) -> Ranks:
    """One process per script."""
    return Ranks(processes=tuple(subprocess.Popen([sys.executable, "-S", "-c", script]) for script in scripts))


@pytest.mark.parametrize(
    ("scripts", "code"),
    [
        pytest.param(("", ""), 0, id="all well"),
        pytest.param(("raise SystemExit(75)", "raise SystemExit(75)"), 75, id="stopped, to be continued"),
        pytest.param(("", "raise SystemExit(2)"), 2, id="one fails"),
        pytest.param(("import os; os.kill(os.getpid(), 9)",), -signal.SIGKILL, id="killed from outside"),
    ],
)
def test_waiting_gives_the_first_code_that_is_not_zero(scripts: tuple[str, ...], code: int) -> None:
    ranks = ranks_of(*scripts)
    assert ranks.wait() == code
    assert not ranks.poll()


def test_of_ranks_that_are_found_at_once_the_killed_one_is_the_cause() -> None:
    """The others end because of it, sooner than they are looked at again."""
    ranks = ranks_of("raise SystemExit(74)", "import os; os.kill(os.getpid(), 9)")
    for process in ranks.processes:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # both have ended, and have not been asked yet
    assert ranks.wait() == -signal.SIGKILL
    assert ranks.failed == [1, 0]


def test_when_a_rank_fails_the_others_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.ranks._GRACE_SECONDS", 0.1)
    ranks = ranks_of("raise SystemExit(3)", "import signal; signal.pause()")
    assert ranks.wait() == 3
    assert not ranks.poll()


def test_killing_ends_all_at_once() -> None:
    ranks = ranks_of(*["import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"] * 2)
    assert ranks.poll()
    ranks.kill()
    assert [process.returncode for process in ranks.processes] == [-signal.SIGKILL] * 2
    ranks.kill()  # a second time is no error


def test_at_the_end_of_the_block_none_is_left() -> None:
    with pytest.raises(KeyboardInterrupt), ranks_of("import signal; signal.pause()") as ranks:
        raise KeyboardInterrupt
    assert [process.returncode for process in ranks.processes] == [-signal.SIGKILL]


def test_every_rank_knows_its_place(tmp_path: Path) -> None:
    """An unknown stage makes each rank print its rank; the logs of ranks above 0 are appended to."""
    for _ in range(2):
        ranks = start_ranks(["nope"], num_ranks=3, environ=os.environ, log_dir=tmp_path / "logs")
        assert [process.wait() for process in ranks.processes] == [2, 2, 2]
        assert ranks.wait() == 2
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["rank-1.log", "rank-2.log"]
    for rank in (1, 2):
        lines = (tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert [line.startswith(f"rank {rank}: error: unknown stage 'nope'") for line in lines] == [True, True]


def test_an_interrupt_between_two_starts_leaves_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def second_interrupted(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        if started:
            raise KeyboardInterrupt
        started.append(start([sys.executable, "-S", "-c", "import signal; signal.pause()"]))
        return started[0]

    monkeypatch.setattr("jobs.ranks.subprocess.Popen", second_interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_ranks(["--version"], num_ranks=2, environ=dict(os.environ), log_dir=tmp_path)
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize("has_threads", [False, True], ids=["one thread", "a signal that another thread takes"])
def test_an_interrupt_during_a_start_leaves_no_rank(
    has_threads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal is held back while a rank starts, and comes as soon as that has started."""
    started: list[subprocess.Popen[bytes]] = []
    start, is_over = subprocess.Popen, threading.Event()

    def interrupted(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        os.kill(os.getpid(), signal.SIGINT)
        started.append(start([sys.executable, "-S", "-c", "import signal; signal.pause()"]))
        return started[0]

    other = threading.Thread(target=is_over.wait)
    if has_threads:
        other.start()
    try:
        monkeypatch.setattr("jobs.ranks.subprocess.Popen", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start_ranks(["--version"], num_ranks=2, environ=dict(os.environ), log_dir=tmp_path)
    finally:
        is_over.set()
    assert [process.poll() for process in started] == [-signal.SIGKILL]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
