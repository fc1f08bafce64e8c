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
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.monitor.status import Status
from jobs.monitor.watch import is_over, line_of, view_of
from tests.jobs.cluster.test_slurm import SILENT, programs
from tests.jobs.monitor.test_status import submitted
from tests.jobs.reports.test_ls import CHECKOUT, make
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
    assert process.wait(120) == 0
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
    facts = replace(view.run.facts, state="running", reasons=("the checkpoint writer is stopped",))
    alive = replace(view, run=replace(view.run, facts=facts))
    assert line_of(alive).endswith("loss 1  the checkpoint writer is stopped"), "what is wrong with a run that trains"


WAITS = "JobId=7 JobName=a JobState=PENDING Reason=Resources Restarts=0 ExitCode=0:0 NodeList="


def test_a_run_that_has_not_started_shows_what_its_job_waits_for(tmp_path: Path) -> None:
    """Without a terminal it goes on as long as the job does: here until it is cancelled."""
    run_dir = submitted(tmp_path / "run", 7)
    (tmp_path / "job").write_text(WAITS)
    environ = os.environ | programs(tmp_path, scontrol=f"cat {tmp_path}/job", sinfo="true")
    command = [sys.executable, "-m", "jobs.cli", "watch", str(run_dir)]
    process = subprocess.Popen(command, cwd=CHECKOUT, env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        said = process.stdout.readline()
        assert said.rstrip().endswith("not started  step 0  job 7: waits for nodes to become free")
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    (tmp_path / "job").write_text(WAITS.replace("PENDING", "CANCELLED"))
    ended = patchline("watch", str(run_dir), environ=environ)
    assert (ended.code, "job 7: was cancelled" in ended.output) == (0, True), ended


def test_it_does_not_end_while_slurm_is_silent(tmp_path: Path) -> None:
    """A job may wait, of which a controller that does not answer says nothing."""
    run_dir = submitted(tmp_path / "run", 7)
    environ = os.environ | programs(tmp_path, scontrol=SILENT)
    command = [sys.executable, "-m", "jobs.cli", "watch", str(run_dir)]
    process = subprocess.Popen(command, cwd=CHECKOUT, env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        said = process.stdout.readline()
        assert "  not started  step 0  (scontrol does not answer: " in said
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
    finally:
        process.kill()
        process.wait()


def test_only_what_is_done_ends_without_an_answer(tmp_path: Path) -> None:
    waits = view_of(submitted(tmp_path / "a", 7))
    assert waits
    done = replace(waits, run=replace(waits.run, facts=replace(waits.run.facts, state="done")))
    silent, answered = replace(waits, complaint="away"), replace(waits, status=Status(jobs=(), findings=()))
    assert [is_over(one, None, is_unanswered=True) for one in (silent, done)] == [False, True]
    assert is_over(answered, None, is_unanswered=False)
    assert (silent.state, answered.state) == ("not started", "never started")


def test_a_stage_without_steps(tmp_path: Path) -> None:
    run_dir = make(tmp_path / "run")
    text = (run_dir / "job.yaml").read_text()
    (run_dir / "job.yaml").write_text(text.replace("stage: pretrain", "stage: evaluate"))
    ended = patchline("watch", str(run_dir))
    assert (ended.code, "has no steps to watch; `patchline logs" in " ".join(ended.errors.split())) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "'nowhere' is no run"),
        (["--seconds=0", "x"], "--seconds is '0'; allowed: 1 to 3,600"),
        (["x", "y"], "usage: patchline watch RUN|CHAIN [--seconds N]"),
        (["x", "--secs"], "there is no flag '--secs'"),
    ],
)
def test_mistakes(words: list[str], message: str) -> None:
    ended = patchline("watch", *words)
    assert (ended.code, message in " ".join(ended.errors.split())) == (2, True), ended.errors
