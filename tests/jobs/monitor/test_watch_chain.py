"""`patchline watch` of a chain, with Slurm's programs as scripts."""

import json
import os
import pty
import re
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.chains.state import add_job, add_line, state_folder
from jobs.chains.status import ChainStatus, StepStatus, status_of_chain
from jobs.monitor.watch import answer_of, chain_line, run_of, table_lines
from tests.jobs.chains.test_status import JOB, chain, slurm  # noqa: F401 - chain is a fixture
from tests.jobs.monitor.test_watch import ENDS, read_until
from tests.jobs.reports.test_ls import CHECKOUT, make
from tests.rigs.processes import patchline

QUEUE = ("2 RUNNING train.e1.r0", "3 PENDING gate.train.e1.r0")


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


@pytest.mark.parametrize(("runs", "wanted"), [(True, "log:"), (False, "the chain goes on")])
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
