"""`patchline ls`: real runs in every state, damaged ones beside them, and a thousand at once. Its table fits every
width, and no name can leave its line."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.cli import main
from jobs.origin import Nearest
from jobs.recipes.pretrain import digits_smoke
from jobs.record import write_record
from jobs.reports.ls import Run, in_order, run_table
from jobs.settings.runs import SortColumn
from pipeline.runs.facts import RunFacts
from tests.rigs.kills import step_at_least, wait_until
from tests.rigs.processes import patchline
from tests.rigs.training import STEPS, FinishedRuns, pretrain_words, start

CHECKOUT = Path(__file__).resolve().parents[3]
NOW = 1e9


def listed(folder: Path, *words: str) -> dict[str, dict[str, Any]]:
    ended = patchline("ls", str(folder), "--json", *words)
    assert (ended.code, ended.errors) == (0, "")
    lines = [json.loads(line) for line in ended.output.splitlines()]
    return {line["run"]: line for line in lines}


def make(run_dir: Path, *, step: int = 0, loss: float = 1.0) -> Path:
    write_record(run_dir, stage="pretrain", job=digits_smoke())
    if step:
        (run_dir / "metrics.jsonl").write_text(json.dumps({"step": step, "loss": loss}) + "\n")
        seconds = {"compute": 1.0, "paused": 0.0, "total": 2.0}
        (run_dir / "ledger.jsonl").write_text(json.dumps({"step": step, "seconds": seconds}) + "\n")
        for name in ("metrics.jsonl", "ledger.jsonl"):
            os.utime(run_dir / name, (1e9 + step, 1e9 + step))
    return run_dir


def heartbeat_of(run_dir: Path) -> Path:
    return run_dir / "heartbeats" / "rank-00000.json"


def heartbeat_is_there(run_dir: Path) -> bool:
    return heartbeat_of(run_dir).exists()


@pytest.mark.long
def test_a_run_is_running_then_killed_or_stopped_then_done(
    digits_url: str, tmp_path: Path, finished_runs: FinishedRuns
) -> None:
    run_dir = tmp_path / "runs" / "one"
    words = pretrain_words(digits_url, run_dir, "--steps", "4000", "--checkpoint.every-steps", "3")
    ranks = start(words, num_ranks=1, log_dir=tmp_path)
    try:
        assert wait_until(ranks, step_at_least(1), run_dir)
        assert listed(run_dir.parent)["one"]["state"] == "running"
    finally:
        ranks.kill()
    shutil.rmtree(run_dir / "heartbeats", ignore_errors=True)  # a slow start may be long enough for one
    found = listed(run_dir.parent)["one"]
    assert (found["state"], found["recipe"]) == ("failed", "digits_smoke")
    assert "its process is gone, before its first heartbeat; " in found["reasons"][0]
    words += ["--hang.step-seconds", "20"]  # a heartbeat a second
    ranks = start(words, num_ranks=1, log_dir=tmp_path)
    try:
        assert wait_until(ranks, step_at_least(3), run_dir)
        assert wait_until(ranks, heartbeat_is_there, run_dir)
        found = listed(run_dir.parent)["one"]
        assert (found["state"], found["steps"], found["reasons"]) == ("running", 4000, [])
        assert (found["stage"], found["model"]) == ("pretrain", "vit")
    finally:
        ranks.kill()
    found = listed(run_dir.parent)["one"]
    assert (found["state"], "its process is gone" in found["reasons"][0]) == ("failed", True)
    ranks = start(words, num_ranks=1, log_dir=tmp_path)
    try:
        assert wait_until(ranks, step_at_least(found["step"] + 3), run_dir)
        ranks.processes[0].send_signal(signal.SIGTERM)
        assert ranks.wait() == 75
    finally:
        ranks.kill()
    found = listed(run_dir)["one"]
    assert (found["state"], found["reasons"]) == ("stopped", [])
    assert 0 < found["goodput"] < 1
    assert found["images_per_second"] > 0
    shutil.copytree(finished_runs.get(2, "--engine.zero-stage", "1"), run_dir.parent / "two")
    found = listed(run_dir.parent)["two"]
    assert (found["state"], found["step"], found["reasons"]) == ("done", STEPS, [])


@pytest.mark.slow
def test_a_run_that_ends_by_an_error_has_failed(finished_runs: FinishedRuns) -> None:
    found = listed(finished_runs.diverged())["run"]
    assert found["state"] == "failed"
    assert "ended in step" in found["reasons"][0]


def test_damaged_runs_are_rows_with_reasons(tmp_path: Path) -> None:
    make(tmp_path / "good", step=300)
    make(tmp_path / "never")
    (make(tmp_path / "cut", step=5) / "job.yaml").write_text("stage: pretrain\njob: {a: [")
    (make(tmp_path / "gone", step=6) / "job.yaml").unlink()
    (make(tmp_path / "half", step=7) / "metrics.jsonl").write_text('{"step": 7, "lo')
    os.mkfifo(make(tmp_path / "pipe") / "metrics.jsonl")
    make(tmp_path / "a" / "b" / "deep\x1b[2J\n", step=8)
    write_record(tmp_path / "packed", stage="pack", job=digits_smoke())
    (tmp_path / "circle").symlink_to(tmp_path)
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    found = listed(tmp_path)
    assert set(found) == {"good", "never", "cut", "gone", "half", "pipe", "a/b/deep\x1b[2J\n"}
    assert found["good"]["reasons"] == []
    assert (found["never"]["state"], found["never"]["step"]) == ("never started", None)
    for name, reason in (
        ("cut", "job.yaml is damaged: it is not YAML: line"),
        ("gone", "job.yaml is missing"),
        ("half", "metrics.jsonl has no usable line"),
        ("pipe", "metrics.jsonl is damaged"),
    ):
        assert any(reason in one for one in found[name]["reasons"]), found[name]
    ended = patchline("ls", str(tmp_path))
    assert (ended.code, ended.errors, "\x1b" in ended.output) == (0, "", False)
    assert r"a/b/deep\x1b[2J\n" in ended.output
    assert len(listed(tmp_path / "good")) == 1, "a run itself"


def test_a_folder_that_may_not_be_read_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make(tmp_path / "run", step=3)
    real = os.scandir

    def refused(path: Any) -> Any:
        if str(path) == str(run_dir):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert main(["ls", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "run"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        pytest.param(
            ("nowhere",), 2, "cannot list 'nowhere': No such file or directory; give a folder", id="no folder"
        ),
        pytest.param(("file",), 2, "cannot list 'file': Not a directory", id="a file"),
        pytest.param((".",), 0, "no run in ., down to 3 levels: a run's folder has a job.yaml", id="no run"),
        pytest.param((".", "--sort", "speed"), 2, "--sort is 'speed'; allowed: run or recipe or state", id="no column"),
        pytest.param((), 2, "DIR is missing", id="nothing"),
    ],
)
def test_mistakes(
    words: tuple[str, ...], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    ended = patchline("ls", *words)
    assert ended.code == code
    assert message in " ".join(ended.errors.split())
    assert ended.output == ""


def one(path: str, *, loss: float | None, step: int | None) -> Run:
    nothing: dict[str, Any] = dict.fromkeys(("accuracy", "images_per_second", "goodput", "last_seen"))
    facts = RunFacts(state="running", step=step, loss=loss, reasons=(), **nothing)
    return Run(path=path, stage="", recipe=None, model="", num_steps=None, facts=facts, reasons=())


@pytest.mark.parametrize(
    ("by", "reverse", "order"),
    [
        ("loss", False, "bcad"),
        ("loss", True, "cbad"),
        ("step", False, "cabd"),
        ("run", False, "abcd"),
        ("run", True, "dcba"),
        ("goodput", False, "abcd"),
    ],
)
def test_the_best_first_and_unknown_values_last(by: SortColumn, reverse: bool, order: str) -> None:
    runs = [one("c", loss=0.3, step=9), one("a", loss=float("nan"), step=5)]
    runs += [one("d", loss=None, step=None), one("b", loss=0.2, step=1)]
    assert "".join(run.path for run in in_order(runs, by=by, reverse=reverse)) == order


@pytest.mark.parametrize(("num_runs", "seconds"), [(300, 4), pytest.param(1000, 5, marks=pytest.mark.long)])
def test_a_thousand_runs_take_about_a_second(tmp_path: Path, num_runs: int, seconds: float) -> None:
    """Of CPU time, with room for a busy machine: nothing is read whole, and no record is parsed as a job."""
    first = make(tmp_path / "runs" / "0000", step=300)
    with (first / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"step": {number}, "loss": 1.0}}\n' for number in range(10_000))
    for number in range(1, num_runs):
        folder = tmp_path / "runs" / f"{number:04d}"
        folder.mkdir()
        for name in ("job.yaml", "metrics.jsonl", "ledger.jsonl"):
            os.link(first / name, folder / name)
    before = os.times()
    command = [sys.executable, "-m", "jobs.cli", "ls", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=CHECKOUT, timeout=60)
    after = os.times()
    assert len(done.stdout.splitlines()) > num_runs
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert 0 < spent < seconds, f"{spent:.1f} s"


def facts(**values: object) -> RunFacts:
    known = {"state": "running", "step": 1200, "loss": 0.5, "accuracy": 0.9, "images_per_second": 1234.5}
    more = {"goodput": 0.87, "last_seen": NOW - 3, "reasons": ()}
    return RunFacts(**{**known, **more, **values})  # type: ignore[arg-type]


def row(run: str = "a", *reasons: str, recipe: str = "digits_smoke", **values: object) -> Run:
    origin = Nearest(recipe=recipe, num_changed=2)
    return Run(path=run, stage="", recipe=origin, model="", num_steps=4000, facts=facts(**values), reasons=reasons)


def test_a_line_per_run() -> None:
    rows = [row("lr-1e-3"), row("lr-3e-4", "step 8 is saved", state="failed", loss=math.nan, accuracy=None)]
    assert run_table(rows, now=NOW, columns=120).splitlines() == [
        "run      recipe           state           step    loss  accuracy  images/s  goodput     seen",
        "lr-1e-3  digits_smoke +2  running  1,200/4,000  0.5000     0.900     1,234      87%  3 s ago",
        "lr-3e-4  digits_smoke +2  failed   1,200/4,000     nan         -     1,234      87%  3 s ago",
        "    step 8 is saved",
    ]


def test_what_is_not_known() -> None:
    nothing: dict[str, Any] = dict.fromkeys(("step", "loss", "accuracy", "images_per_second", "goodput", "last_seen"))
    line = run_table([row(state="never started", **nothing)], now=NOW, columns=120).splitlines()[1]
    assert "  never started  " in line
    assert line.endswith("0/4,000     -         -         -        -     -")


@pytest.mark.parametrize("columns", [60, 80, 100, 160])
def test_no_line_is_longer_than_the_terminal(columns: int) -> None:
    long = row("sweep/" + "x" * 200, "y" * 500, recipe="vit_b16_i21k_augreg_medium1", state="never started")
    lines = run_table([long, row()], now=NOW, columns=columns).splitlines()
    assert len(lines) == 6, "a long reason has three lines"
    assert max(map(len, lines)) <= columns
    assert ("goodput" in lines[0]) == (columns >= 100)
    assert lines[1].startswith("sweep")


def test_names_cannot_act() -> None:
    text = run_table([row("a\x1b[2J\nb", "c\nd\x1b")], now=NOW, columns=120)
    assert "\x1b" not in text
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize(
    ("seconds", "shown"), [(-5, "0 s ago"), (59, "59 s ago"), (61, "1 min ago"), (7300, "2 h ago"), (1e6, "11 d ago")]
)
def test_times(seconds: float, shown: str) -> None:
    assert run_table([row(last_seen=NOW - seconds)], now=NOW, columns=120).rstrip().endswith(f"  {shown}")
