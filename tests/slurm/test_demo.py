"""`make slurm-demo`: it ends with the report of a run that lost a rank, and leaves no process behind."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.test_stage import SCRIPT

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
CHECKOUT = SCRIPT.parents[1]


def processes_of(folder: Path) -> list[int]:
    """Returns the processes that have to do with the demonstration's folder."""
    mark, found = str(folder).encode(), []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def demo(folder: Path) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "tests.rigs.slurm_demo", f"--folder={folder}", "--steps=80"]
    return subprocess.Popen(words, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
def test_a_chain_with_a_kill_ends_in_its_report(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    process = demo(folder)
    said, errors = process.communicate(timeout=400)
    assert process.returncode == 0, said + errors
    assert said.count("KILLED: SIGKILL for rank 1") == 1
    assert "pretrain: try 1 ended: crashed" in said
    assert "pretrain: try 2 ended: done" in said
    assert "the chain is over: done" in said
    assert "step 80/80" in said
    assert "restart 0002 from step" in said
    assert (folder / "chain-of-digits" / "pretrain" / "report.html").exists()
    assert processes_of(folder) == []


@pytest.mark.long
def test_it_can_be_interrupted(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    process = demo(folder)
    assert process.stdout
    assert "are up, on loopback" in process.stdout.readline()
    while "submitted" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, "all of it is ended" in errors) == (130, True), errors
    assert processes_of(folder) == []
