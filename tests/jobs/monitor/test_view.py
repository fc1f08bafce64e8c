"""What `patchline watch` draws, whatever stands in the folder, on terminals of every size."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len

from jobs.monitor.status import Status
from jobs.monitor.watch import View, drawn, sparkline, view_of
from pipeline.runs.facts import RunFacts
from shards.errors import Finding
from tests.jobs.reports.test_ls import make

STATUS = Status(
    jobs=(),
    findings=(
        Finding(found="job 12, start 2: runs for 00:10:00 of 01:00:00 on n[1-64]"),
        Finding(found="node n7 is drained: bad disk", todo="scontrol update NodeName=n7 State=resume"),
    ),
)


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
    assert lines[-1] == "q or Ctrl-C leaves; the run goes on"
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
