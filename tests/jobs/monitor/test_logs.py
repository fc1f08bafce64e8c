"""`patchline logs`: the last lines of a job's log, of a rank, and while it grows."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jobs.monitor.logs import run, shown
from shards.errors import UserError
from tests.jobs.reports.test_ls import CHECKOUT, make
from tests.rigs.processes import patchline

LINES = [
    "stage.sbatch: job 1, start 0, try 0: 12 ranks on n1",
    *(f"{rank:2}: step {step}" for step in range(3) for rank in range(12)),
    "stage.sbatch: done",
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
