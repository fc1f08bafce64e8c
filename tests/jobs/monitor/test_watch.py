"""`patchline watch` of runs and chains, with Slurm's programs as scripts: what it draws, whatever is in the folder, on
terminals of every size."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len

from jobs.chains.state import add_job, add_line, state_folder
from jobs.chains.status import ChainStatus, StepStatus, status_of_chain
from jobs.monitor.status import Status
from jobs.monitor.watch import (
    View,
    answer_of,
    chain_line,
    drawn,
    is_over,
    line_of,
    run_of,
    sparkline,
    table_lines,
    view_of,
)
from pipeline.runs.facts import RunFacts
from shards.errors import Finding
from tests.jobs.chains.test_status import JOB, chain, slurm  # noqa: F401 - chain is a fixture
from tests.jobs.cluster.test_slurm import SILENT, programs
from tests.jobs.monitor.test_status import submitted
from tests.jobs.reports.test_ls import CHECKOUT, make
from tests.rigs.processes import patchline

LEAVES, ENTERS, ENDS = "q or Ctrl-C leaves", "\x1b[?1049h", "\x1b[?1049l"
WAITS = "JobId=7 JobName=a JobState=PENDING Reason=Resources Restarts=0 SubmitTime=1000 ExitCode=0:0 NodeList="
STATUS = Status(
    jobs=(),
    findings=(
        Finding(found="job 12, start 2: runs for 00:10:00 of 01:00:00 on n[1-64]"),
        Finding(found="node n7 is drained: bad disk", todo="scontrol update NodeName=n7 State=resume"),
    ),
)
QUEUE = ("2 RUNNING train.e1.r0", "3 PENDING gate.train.e1.r0")


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


@pytest.fixture
def view(tmp_path: Path) -> View:
    run_dir = make(tmp_path / "run", step=100)
    lines = [
        {"step": step, "loss": 3 / step, "step_seconds": 0.5, "images_per_second": 256.0, "perf/mfu": 0.41}
        for step in range(1, 121)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "metrics.jsonl").write_text(f'{text}{{"step": 1')
    (run_dir / "submit").mkdir()
    (run_dir / "submit" / "x-12.out").write_text("".join(f"0: line {number}\x1b[2J\n" for number in range(50)))
    found = view_of(run_dir, status=STATUS)
    assert found
    return replace(found, seconds_left=90.0)


def test_the_slowest_ranks_are_named(tmp_path: Path) -> None:
    run_dir = make(tmp_path / "run", step=100)
    beat = {"rank": 3, "host": "n2\x1b[2J", "pid": 1, "attempt": "0001-abc", "phase": "saving", "step": 1, "batch": 0}
    (run_dir / "heartbeats").mkdir(exist_ok=True)
    path = run_dir / "heartbeats" / "rank-00003.json"
    path.write_text(json.dumps({**beat, "seconds": 0.0, "limit_seconds": 9.0, "unix_time": time.time()}))
    names = {"own_step": 0.42, "own_step_rank": 3, "own_step_median": 0.3, "data_wait": 0.05, "data_wait_rank": 5}
    line = {"step": 7, "time/step": 0.5, "time/communication": 0.1, **{f"ranks/{key}": names[key] for key in names}}
    (run_dir / "metrics.jsonl").write_text(f'{json.dumps(line)}\n{{"step": 8, "loss": 1}}\n{{"step": 9, "ranks/own_st')
    view = view_of(run_dir)
    assert view
    shown = " ".join(" ".join(texts(view, 80, 24)).split())
    assert "ranks: communication 20%, slowest rank 3 on host n2\\x1b[2J: 420 ms a step (1.4 x median)," in shown
    assert "longest data wait 50 ms: rank 5" in shown


def texts(view: View, columns: int, rows: int) -> list[str]:
    return [line.plain for line in drawn(view, columns=columns, rows=rows)]


def test_a_screen_of_80_columns(view: View) -> None:
    lines = texts(view, 80, 24)
    assert lines[0].startswith("run  digits_smoke  ")
    assert lines[0].endswith(time.strftime("%H:%M:%S", time.localtime(view.now)))
    assert lines[1].endswith(" step 120/300  40.0%  1:30 left")
    assert lines[2] == "loss 0.025   256 images/s   41% MFU   goodput 50%   saved step 100"
    assert lines[3].startswith("loss  ")
    assert lines[3].endswith("▁")
    assert [line for line in lines if line.startswith(("job", "node", "> "))] == [
        "job 12, start 2: runs for 00:10:00 of 01:00:00 on n[1-64]",
        "node n7 is drained: bad disk",
        "> scontrol update NodeName=n7 State=resume",
    ]
    assert lines[-1] == "q or Ctrl-C leaves; the run continues"
    assert lines[-2] == "0: line 49\\x1b[2J"


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
@pytest.mark.parametrize("rows", [1, 2, 5, 10, 24, 60])
def test_it_fits(view: View, columns: int, rows: int) -> None:
    lines = texts(view, columns, rows)
    assert len(lines) <= max(rows, 2)
    assert max(cell_len(line) for line in lines) <= columns


def test_an_old_answer_and_a_complaint_are_said(view: View) -> None:
    late = replace(view, status_age=100.0, complaint="scontrol has not answered for 120 s; try again when Slurm does")
    lines = texts(late, 80, 24)
    assert "Slurm, 1:40 ago" in lines
    assert "scontrol has not answered for 120 s; try again when Slurm does" in lines
    silent = replace(late, status=None)
    assert not any(line.startswith("Slurm") for line in texts(silent, 80, 24))
    idle = replace(view, status=Status(jobs=(), findings=()))
    assert "no job of this run waits or runs" in texts(idle, 80, 24)


def test_a_run_of_which_little_is_known(tmp_path: Path) -> None:
    found = view_of(make(tmp_path / "run"))
    assert found
    assert found.run.facts.state == "never started"
    assert " step 0/300  0.0%" in texts(found, 80, 24)[1]
    facts: RunFacts = replace(found.run.facts, loss=float("nan"), accuracy=0.5, images_per_second=float("nan"))
    odd = replace(found, run=replace(found.run, facts=facts, num_steps=None), losses=(1.0, float("1e300"), -1e300))
    assert texts(odd, 80, 24)[1] == "no step yet"


@pytest.mark.parametrize(
    ("values", "bars"), [([1.0, 2.0, 3.0], "▁▅█"), ([2.0, 2.0], "▁▁"), ([5.0], "▁"), ([0.0, 8.0, 4.0, 0.0], "▁█▅▁")]
)
def test_sparkline(values: list[float], bars: str) -> None:
    assert sparkline(values) == bars


def test_the_last_finding_of_the_guard_is_an_alarm(tmp_path: Path) -> None:
    run_dir = make(tmp_path / "run", step=100)
    lines = [{"step": step, "kind": "non_finite", "action": "no update\x1b[2J"} for step in (7, 90)]
    (run_dir / "guard.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{")
    found = view_of(run_dir)
    assert found
    assert r"guard: step 90: non finite; it did: no update\x1b[2J" in texts(found, 80, 24)


def test_the_table_and_the_run_that_runs(chain: Path) -> None:  # noqa: F811
    environ = slurm(chain, *QUEUE)
    found = answer_of(chain, os.environ | environ)
    assert found.chain
    assert found.status
    assert (found.run_dir, found.status.jobs[0].job) == (chain / "train", "2"), "between two tries, its job runs"
    assert not found.chain.is_over
    assert chain_line(found.chain) == "1/3 steps complete  train running"
    idle = answer_of(chain, None)
    assert (idle.run_dir, idle.status) == (None, None), "without Slurm, nothing says that it runs"
    metrics = chain / "train" / "metrics.jsonl"
    os.utime(metrics)
    assert answer_of(chain, None).run_dir == chain / "train"


def test_of_several_runs_the_one_that_was_seen_last(chain: Path) -> None:  # noqa: F811
    plan = state_folder(str(chain)) / "plan.json"
    text = json.loads(plan.read_text())
    text["units"][1]["words"] = [["finetune", "r", f"--run-dir=train/{number}"] for number in range(3)]
    plan.write_text(json.dumps(text))
    now = time.time()
    for number, age in enumerate((20, 5, 4000)):
        run_dir = make(chain / "train" / str(number), step=10)
        for name in ("metrics.jsonl", "ledger.jsonl"):
            os.utime(run_dir / name, (now - age, now - age))
    assert run_of(status_of_chain(chain, None)) == chain / "train" / "1"


def test_a_long_table_leaves_out_what_is_complete(chain: Path) -> None:  # noqa: F811
    status = status_of_chain(chain, None)
    step: StepStatus = status.steps[0]
    many: ChainStatus = replace(status, steps=(*(replace(step, name=f"s{n}") for n in range(20)), *status.steps[1:]))
    assert len(table_lines(many, columns=300, most=40)) == 23
    short = table_lines(many, columns=300, most=12)
    assert [line.split()[0] for line in short] == ["chain", "train", "report"]
    waiting = replace(many, steps=tuple(replace(one, state="waits for its turn") for one in many.steps))
    lines = table_lines(waiting, columns=300, most=5)
    assert (len(lines), lines[-1].strip()) == (5, "... 19 more lines in `patchline status`")


def test_without_a_terminal_it_ends_with_the_chain(chain: Path) -> None:  # noqa: F811
    state = state_folder(str(chain))
    environ = slurm(chain)
    (state / "gave-up").write_text("no\n")
    ended = patchline("watch", str(chain), environ=environ)
    assert (ended.code, ended.errors) == (0, "")
    assert ended.output.rstrip().endswith("1/3 steps complete  gave-up")


@pytest.mark.parametrize(("runs", "wanted"), [(True, "log:"), (False, "the chain continues")])
def test_on_a_terminal(chain: Path, runs: bool, wanted: str) -> None:  # noqa: F811
    """The table is above; below it is the run, if one runs."""
    if not runs:
        add_line(state_folder(str(chain)), began=True)
        add_job(state_folder(str(chain)), replace(JOB, unit="pack.shards", job=9))
    log = chain / "chain" / "jobs" / "train-2.out"
    log.parent.mkdir()
    log.write_text("0: step 100\n")
    outside, inside = pty.openpty()
    termios.tcsetwinsize(inside, (30, 100))
    environ = os.environ | slurm(chain, *(QUEUE if runs else ["9 PENDING pack.shards.e2.r0"])) | {"TERM": "xterm"}
    command = [sys.executable, "-m", "jobs.cli", "watch", str(chain), "--seconds=1"]
    process = subprocess.Popen(
        command, cwd=CHECKOUT, env=environ, stdin=inside, stdout=inside, stderr=inside, start_new_session=True
    )
    said = read_until(outside, wanted)
    assert re.search(r"chain(\x1b\[0m)? +", said), "its name is on a line of its own if the path is long"
    assert str(chain)[:40] in said
    assert ("100/300" in said) is runs
    os.write(outside, b"q")
    read_until(outside, ENDS)
    assert process.wait(120) == 0
    os.close(outside)
    os.close(inside)
