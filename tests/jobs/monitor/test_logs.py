"""`patchline logs`: the log is found wherever the job writes it, and a rank's lines are found whoever started the
ranks. The lines of torchrun are those of two nodes with two ranks each."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.cluster.slurm import parsed
from jobs.monitor.logs import asked_log, lines_of_rank, newest_log, ranks_per_task, run, shown
from shards.errors import UserError
from tests.jobs.chains.test_state import chain  # noqa: F401 - a fixture
from tests.jobs.cluster.test_slurm import RUNNING, UNKNOWN, programs
from tests.jobs.reports.test_ls import CHECKOUT, make
from tests.rigs.processes import patchline

LINES = [
    "stage.sbatch: job 1, start 0, try 0: 12 ranks on n1",
    *(f"{rank:2}: step {step}" for step in range(3) for rank in range(12)),
    "stage.sbatch: done",
]
NO_SLURM = {"PATH": "/nowhere"}
RANK_LINES = [
    "stage.sbatch: job 1, start 0, try 0: 4 ranks on n1,n2",
    "0: W1123 18:00:00.000 7 torch/distributed/run.py:774] a word of torchrun",
    "0: [rank0]: 12:00:00 step 1",
    "1: [rank3]: 12:00:00 rank 3: a warning",
    "0: [rank1]: [rank1]: ValueError: no",
    "1: [rank2]: print",
]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = make(tmp_path / "run") / "submit"
    folder.mkdir()
    (folder / "x-1.out").write_text("old\n")
    os.utime(folder / "x-1.out", (1e9, 1e9))
    (folder / "x-2.out").write_text("".join(f"{line}\n" for line in LINES) + " 3: half a li")
    return folder.parent


def lines(*words: str) -> list[str]:
    ended = patchline("logs", *words)
    assert (ended.code, ended.errors) == (0, "")
    return ended.output.splitlines()


def test_the_newest_log(run_dir: Path) -> None:
    assert lines(str(run_dir)) == LINES
    assert lines(str(run_dir), "--lines", "2") == LINES[-2:]
    assert lines(str(run_dir), "--lines=0") == []


def test_one_rank(run_dir: Path) -> None:
    assert lines(str(run_dir), "--rank", "3") == [f" 3: step {step}" for step in range(3)]
    assert lines(str(run_dir), "--rank=11", "--lines=1") == ["11: step 2"]
    assert lines(str(run_dir), "--rank=11", "--lines=0") == []
    ended = patchline("logs", str(run_dir), "--rank=12")
    assert (ended.code, ended.output) == (0, ""), "its first line may come later"
    assert "its log has no line of rank 12; without --rank, all lines are shown" in " ".join(ended.errors.split())


def test_it_cannot_write_to_the_terminal() -> None:
    assert shown(b"a\x1b[2Jb\xff") == "a\\x1b[2Jb\ufffd"
    assert len(shown(b"x" * 1_000_000)) == 4096


def test_follow(run_dir: Path) -> None:
    command = [sys.executable, "-m", "jobs.cli", "logs", str(run_dir), "--follow", "--rank=3", "--lines=0"]
    process = subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    log = run_dir / "submit" / "x-2.out"
    ready = threading.Event()

    def write() -> None:
        while not ready.wait(0.2):  # until it is seen
            with log.open("a") as file:
                file.write("ne\n 4: not mine\n 3: ")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        first = process.stdout.readline()
    finally:
        ready.set()
        writer.join()
    assert first in (" 3: half a line\n", " 3: ne\n")
    log.write_text(" 3: from the beginning\n")  # a log that was made anew
    while (line := process.stdout.readline()) == " 3: ne\n":
        pass
    assert line == " 3: from the beginning\n"
    process.send_signal(2)
    assert process.wait(120) == 130


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "usage: patchline logs RUN"),
        (["a", "b"], "usage: patchline logs RUN"),
        (["a", "--rank=-1"], "--rank is '-1'; allowed: 0 to"),
        (["a", "--lines"], "--lines is ''; allowed"),
        (["a", "--folow"], "there is no flag '--folow'"),
    ],
)
def test_wrong_words(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        run(words, environ={})
    assert message in str(caught.value)


def test_no_log(tmp_path: Path) -> None:
    ended = patchline("logs", str(make(tmp_path / "run")))
    assert ended.code == 2
    assert "a job has one once it has started; `patchline status" in " ".join(ended.errors.split())


def written(path: Path, text: str = "0: a line\n", *, at: float = 1e9) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (at, at))
    return path


@pytest.fixture
def logged_run(tmp_path: Path) -> Path:
    """A run that plain sbatch has started as job 2."""
    folder = make(tmp_path / "run")
    (folder / "submit" / "exits-2-0-0").mkdir(parents=True)
    return folder


def test_the_one_that_was_written_last(logged_run: Path, tmp_path: Path) -> None:
    assert newest_log(tmp_path) is None
    job = parsed(RUNNING)
    assert job
    old = written(logged_run / "submit" / "x-1.out")
    (logged_run / "submit" / "submitted.jsonl").write_text('{"job": 2, "submitted": 1000}\n')
    assert newest_log(logged_run, [replace(job, log=""), replace(job, log="relative")]) == old
    elsewhere = written(tmp_path / "logs" / "my job.txt", at=2e9)
    assert newest_log(logged_run, [replace(job, log=str(elsewhere))]) == elsewhere
    os.mkfifo(logged_run / "submit" / "x-2.out")
    assert newest_log(logged_run) == old


def test_a_chain_knows_the_logs_of_its_runs(chain: Path) -> None:  # noqa: F811
    path = written(chain / "chain" / "jobs" / "tune-12_1.out")
    logged_run = make(chain / "tune" / "1")
    assert newest_log(logged_run) == path
    assert newest_log(make(chain / "tune" / "0")) is None
    assert patchline("logs", str(logged_run), environ=NO_SLURM).output == "0: a line\n"
    told = " ".join(patchline("logs", str(chain), environ=NO_SLURM).errors.split())
    assert "is a chain: name one of its runs, as `patchline status '" in told


@pytest.mark.parametrize(
    ("text", "is_used"),
    [
        ("{path}\n", True),
        ("{path}", True),
        ("run/submit\n", False),
        ("{path}\x1b[2J\n", False),
        ("{path}\n/etc/passwd\n", False),
        ("/dev/null\n", False),
        ("/" + "x" * 5000, False),
        ("\udcff", False),
    ],
)
def test_the_pointer_of_the_batch_script(logged_run: Path, tmp_path: Path, text: str, is_used: bool) -> None:
    path = written(tmp_path / "logs" / "job of 2.txt")
    pointer = logged_run / "submit" / "exits-2-0-0" / "log"
    pointer.write_bytes(text.replace("{path}", str(path)).encode(errors="surrogateescape"))
    assert newest_log(logged_run) == (path if is_used else None)


def test_slurm_is_asked_if_the_files_do_not_tell(logged_run: Path, tmp_path: Path) -> None:
    old = written(logged_run / "submit" / "x-1.out")
    (logged_run / "submit" / "submitted.jsonl").write_text('{"job": 2, "submitted": 1000}\n')
    path = written(tmp_path / "logs" / "log", at=2e9)
    told = RUNNING.replace("/runs/my run/submit/x-2.out", str(path))
    environ = programs(tmp_path, scontrol=f"[ $4 = 2 ] && echo '{told}' || {UNKNOWN}")
    assert asked_log(logged_run, environ) == path
    assert patchline("logs", str(logged_run), environ=environ).output == "0: a line\n"
    assert asked_log(logged_run, NO_SLURM) == old
    assert asked_log(logged_run, programs(tmp_path, scontrol="exit 1")) == old
    named = written(logged_run / "submit" / "x-2.out", at=3e9)
    assert asked_log(logged_run, programs(tmp_path, scontrol="exec sleep 600")) == named


def test_messages_that_have_a_file_of_their_own() -> None:
    job = parsed(RUNNING.replace("StdOut=", "StdErr=/runs/my run/errors StdIn=/dev/null StdOut="))
    assert job
    assert job.log == "/runs/my run/errors"


def under_torchrun(run_dir: Path, *lines: str) -> Path:
    folder = run_dir / "submit" / "exits-1-0-0"
    folder.mkdir(parents=True)
    for name in ("pid-0-0", "pid-0-1", "pid-1-0", "pid-1-1", "started", "rank-0"):
        (folder / name).write_text("1\n")
    (run_dir / "submit" / "x-1.out").write_text("".join(f"{line}\n" for line in lines))
    return run_dir


@pytest.mark.parametrize(
    ("rank", "shown"), [(0, RANK_LINES[2:3]), (1, RANK_LINES[4:5]), (2, RANK_LINES[5:]), (3, RANK_LINES[3:4]), (4, [])]
)
def test_under_torchrun(tmp_path: Path, rank: int, shown: list[str]) -> None:
    run_dir = under_torchrun(make(tmp_path / "run"), *RANK_LINES)
    assert ranks_per_task(run_dir) == 2
    ended = patchline("logs", str(run_dir), f"--rank={rank}", environ={"PATH": "/nowhere"})
    assert (ended.code, ended.output.splitlines()) == (0, shown)
    assert ("no line of rank 4" in ended.errors) is (rank == 4)


def test_under_srun_the_label_is_the_rank(tmp_path: Path) -> None:
    is_wanted = lines_of_rank(2, tmp_path)
    assert [is_wanted(line) for line in (b" 2: x", b"2:", b"12: x", b"2 x", b"stage.sbatch: 2: x", b"")] == [
        *(True, True),
        *(False, False, False, False),
    ]


def test_one_rank_per_node_has_the_label_of_its_node(tmp_path: Path) -> None:
    run_dir = under_torchrun(tmp_path)
    for name in ("pid-0-1", "pid-1-1"):
        (run_dir / "submit" / "exits-1-0-0" / name).unlink()
    assert lines_of_rank(1, run_dir)(b"1: 12:00:00 x")
    assert not lines_of_rank(1, under_torchrun(tmp_path / "b"))(b"1: 12:00:00 x"), "torchrun's have names"
