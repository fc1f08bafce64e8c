"""`--processes N` with real ranks: signals are passed on, the ranks end with their parent, and no message is lost."""

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from jobs import exit_codes
from jobs.ranks import Ranks, _last_words, _log_dir, must_start, tell_torchrun
from tests.jobs.test_ranks import ranks_of
from tests.rigs.interrupting import started
from tests.rigs.training import losses, pretrain_words

LONG = ("--steps", "40000", "--checkpoint.every-steps", "10000", "--engine.precision", "fp32", "--processes", "2")


@pytest.mark.parametrize(
    ("processes", "environ", "starts"),
    [
        (1, {}, False),
        (2, {}, True),
        (2, {"RANK": "0", "WORLD_SIZE": "2"}, False),
        (1, {"RANK": "0", "WORLD_SIZE": "2"}, False),
        (2, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, False),
        (2, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, True),
        (2, {"SLURM_JOB_ID": "7"}, True),
    ],
)
def test_who_starts_the_ranks(processes: int, environ: dict[str, str], starts: bool) -> None:
    assert must_start(processes, environ) is starts


def steps_of(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def ranks_in(run_dir: Path) -> dict[int, int]:
    """Ids of the ranks that train in this folder, by rank. What a rank has just forked looks like it for a moment, and
    has a higher id."""
    found: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words, environ = ((path / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
        except OSError:  # it has ended
            continue
        ranks = [int(each.removeprefix(b"RANK=")) for each in environ if each.startswith(b"RANK=")]
        if ranks and b"jobs.cli" in words and str(run_dir).encode() in words:
            found[ranks[0]] = min(int(path.name), found.get(ranks[0], int(path.name)))
    return found


@pytest.mark.slow
def test_an_interrupt_saves_on_all_ranks_and_a_killed_parent_ends_them(digits_url: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = pretrain_words(digits_url, run_dir, *LONG)
    with started(tmp_path / "said", *words) as command:
        command.wait_until(lambda: steps_of(run_dir) > 1)
        assert ranks_in(run_dir).keys() == {0, 1}
        command.signal(signal.SIGINT)
        assert command.end() == exit_codes.CONTINUE
    assert f"saved at step {max(losses(run_dir))} of 40000; run the same command to continue" in command.said
    (asked_at,) = re.findall(r"finishing step (\d+) and at most 2 more, until all ranks know, and saving", command.said)
    assert int(asked_at) <= max(losses(run_dir)) <= int(asked_at) + 2
    assert "Traceback" not in command.said + (run_dir / "logs" / "rank-1.log").read_text()
    assert "processes" not in (run_dir / "job.yaml").read_text()
    assert ranks_in(run_dir) == {}

    with started(tmp_path / "again", *words) as command:
        command.wait_until(lambda: "continuing from step" in command.said)
        assert command.process.pid
        os.kill(command.process.pid, signal.SIGKILL)
        pause, deadline = threading.Event(), time.monotonic() + 120
        while ranks_in(run_dir) and time.monotonic() < deadline:
            pause.wait(0.05)
    assert ranks_in(run_dir) == {}


@pytest.mark.slow
def test_the_ranks_that_a_killed_one_leaves_end_with_one_line(digits_url: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with started(tmp_path / "said", *pretrain_words(digits_url, run_dir, *LONG)) as command:
        command.wait_until(lambda: steps_of(run_dir) > 1)
        os.kill(ranks_in(run_dir)[1], signal.SIGKILL)
        assert command.end() == 128 + signal.SIGKILL
    assert "Traceback" not in command.said
    (error,) = [line for line in command.said.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: the exchange with the other ranks failed (")
    assert error.endswith("; run the same command to continue")
    assert "rank 1 was killed by SIGKILL" in command.said


@pytest.mark.slow
def test_a_refused_command_says_so_once_and_leaves_nothing(tmp_path: Path) -> None:
    words = pretrain_words("/nowhere", tmp_path / "run", *LONG)
    with started(tmp_path / "said", *words) as command:
        assert command.end() == exit_codes.USER_MISTAKE
    assert command.said.count("there is nothing at '/nowhere'") == 1
    assert not (tmp_path / "run").exists()


def test_the_last_words_of_the_rank_that_failed_are_shown(tmp_path: Path) -> None:
    ranks = ranks_of("", "raise SystemExit(74)")
    assert ranks.wait() == 74
    old = "of an earlier attempt\n"
    lines = "".join(f"line {number}\n" for number in range(30))
    (tmp_path / "rank-1.log").write_text(old + lines)
    said = list(_last_words(ranks, tmp_path, [0, len(old)]))
    assert said[0] == f"rank 1 ended with 74; the last lines of {tmp_path}/rank-1.log:"
    assert said[1:] == [f"  line {number}" for number in range(10, 30)]


def test_a_mistake_of_one_rank_is_shown(tmp_path: Path) -> None:
    ranks = ranks_of("raise SystemExit(74)", "raise SystemExit(2)")
    assert ranks.wait() == exit_codes.USER_MISTAKE
    (tmp_path / "rank-1.log").write_text("rank 1: error: no compiler\n")
    assert list(_last_words(ranks, tmp_path, [0, 0]))[1:] == ["  rank 1: error: no compiler"]


@pytest.mark.parametrize("codes", [(2, 2), (75, 75), (130, 130), (74, 0)])
def test_what_rank_0_has_said_is_not_said_again(tmp_path: Path, codes: tuple[int, int]) -> None:
    ranks: Ranks = ranks_of(*(f"raise SystemExit({code})" for code in codes))
    assert ranks.wait() == max(codes)
    assert list(_last_words(ranks, tmp_path, [0, 0])) == []


def test_a_command_without_a_run_directory_logs_where_nothing_stays() -> None:
    with _log_dir("") as folder:
        assert folder.is_dir()
    assert not folder.exists()


def test_torchrun_reads_why_a_rank_stopped(tmp_path: Path) -> None:
    """In torch's own error format."""
    tell_torchrun(tmp_path / "error.json")
    from torch.distributed.elastic.multiprocessing.errors import (  # noqa: PLC0415 - it takes seconds
        ChildFailedError,
        ProcessFailure,
    )

    failure = ProcessFailure(local_rank=0, pid=os.getpid(), exitcode=75, error_file=str(tmp_path / "error.json"))
    shown = ChildFailedError("patchline", {0: failure}).format_msg()  # type: ignore[no-untyped-call]
    assert "traceback : no failure: stopped with a committed checkpoint (exit code 75); run the same command" in shown


@pytest.mark.parametrize("name", ["missing/error.json", "."])
def test_torchruns_file_may_be_unwritable(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    tell_torchrun(tmp_path / name)
    assert "TORCHELASTIC_ERROR_FILE cannot be written: [Errno " in caplog.text
