"""`patchline watch` on a pseudo-terminal: it is left by a key or by Ctrl-C, and leaves the terminal as it was."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from jobs.watch import line_of
from jobs.watch_view import view_of
from tests.jobs.test_ls import CHECKOUT, make
from tests.jobs.test_slurm import programs
from tests.jobs.test_status import submitted
from tests.rigs.processes import patchline

LEAVES, ENTERS, ENDS = "q or Ctrl-C leaves", "\x1b[?1049h", "\x1b[?1049l"


def read_until(terminal: int, wanted: str, *, seconds: float = 60.0) -> str:
    said, deadline = "", time.monotonic() + seconds
    while wanted not in said:
        assert time.monotonic() < deadline, said
        if select.select([terminal], [], [], 0.2)[0]:
            said += os.read(terminal, 65536).decode(errors="replace")
    return said


@pytest.mark.parametrize("leave", ["q", "Ctrl-C"])
def test_it_draws_and_is_left(tmp_path: Path, leave: str) -> None:
    """Slurm does not answer at all, which holds up nothing."""
    run_dir = submitted(make(tmp_path / "run", step=100), 12)
    environ = os.environ | programs(tmp_path, scontrol="exec sleep 600") | {"TERM": "xterm"}
    outside, inside = pty.openpty()
    termios.tcsetwinsize(inside, (24, 80))
    before = termios.tcgetattr(inside)
    command = [sys.executable, "-m", "jobs.cli", "watch", str(run_dir), "--seconds=1"]
    process = subprocess.Popen(
        command, cwd=CHECKOUT, env=environ, stdin=inside, stdout=inside, stderr=inside, start_new_session=True
    )
    said = read_until(outside, LEAVES)
    assert ENTERS in said
    assert "100/300" in said
    (run_dir / "metrics.jsonl").write_text(json.dumps({"step": 250, "loss": 0.5}) + "\n")
    read_until(outside, "250/300")
    if leave == "q":
        os.write(outside, b"q")
    else:
        process.send_signal(signal.SIGINT)
    read_until(outside, ENDS)
    assert process.wait(30) == 0
    assert termios.tcgetattr(inside) == before
    os.close(outside)
    os.close(inside)


def test_without_a_terminal_a_line(tmp_path: Path) -> None:
    """It ends with the run, here at once."""
    run_dir = make(tmp_path / "run", step=100)
    ended = patchline("watch", str(run_dir), environ={"PATH": str(tmp_path)})
    assert ended.code == 0, ended.errors
    assert ended.output.rstrip().endswith("stopped  step 100/300  loss 1")
    view = view_of(run_dir)
    assert view
    assert line_of(view).endswith("stopped  step 100/300  loss 1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "'nowhere' is no run"),
        (["--seconds=0", "x"], "--seconds is '0'; allowed: 1 to 3,600"),
        (["x", "y"], "usage: patchline watch RUN [--seconds N]"),
        (["x", "--secs"], "there is no flag '--secs'"),
    ],
)
def test_mistakes(words: list[str], message: str) -> None:
    ended = patchline("watch", *words)
    assert (ended.code, message in " ".join(ended.errors.split())) == (2, True), ended.errors
