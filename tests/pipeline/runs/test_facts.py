"""What is read of a run's folder, and its state; anything may be damaged, and nothing of it is an error."""

import json
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.runs.facts import (
    SIGNS_OF_A_RUN,
    STATES,
    LastBeat,
    LastStart,
    RunFacts,
    Signs,
    read_facts,
    state_of,
)
from pipeline.shared_settings import METRICS_FILE
from pipeline.training.reporting.ledger import FILE_NAME as LEDGER
from pipeline.training.watchdog.heartbeat_files import Phase, Place

LINE = {"step": 12, "loss": 0.5, "images_per_second": 100.0}
SECONDS = {"compute": 8.0, "paused": 5.0, "total": 15.0}
COMPUTING, ENDED, STARTING = Phase.COMPUTING, Phase.ENDED, Phase.STARTING


def make(run_dir: Path, *, phase: str = "ended", step: int = 12) -> Path:
    (run_dir / "heartbeats").mkdir(parents=True)
    scored = {"step": 4, "loss": 0.9, "test_accuracy": 0.75, "test_loss": 1.0}
    (run_dir / METRICS_FILE).write_text(f"{json.dumps(scored)}\n{json.dumps(LINE)}\n")
    saved = {"step": 12, "attempt": "0001-00000000", "unix_time": 1.0, "seconds": SECONDS}
    (run_dir / LEDGER).write_text(f"{json.dumps(saved)}\n")
    beat = {"rank": 0, "host": "elsewhere", "pid": 1, "attempt": "0001-00000000", "phase": phase, "step": step}
    more = {"batch": 0, "seconds": 0.0, "limit_seconds": 600.0, "unix_time": time.time()}
    (run_dir / "heartbeats" / "rank-00000.json").write_text(json.dumps(beat | more))
    return run_dir


def read(run_dir: Path, *, now: float | None = None) -> RunFacts:
    return read_facts(run_dir, num_steps=16, is_scored=True, now=now)


def test_the_facts_of_a_whole_run(tmp_path: Path) -> None:
    found = read(make(tmp_path / "run"))
    assert (found.state, found.step, found.loss, found.accuracy) == ("stopped", 12, 0.5, 0.75)
    assert (found.images_per_second, found.goodput, found.reasons) == (100.0, 0.8, ())
    assert found.last_seen == pytest.approx(time.time(), abs=60)


def test_a_beat_grows_old(tmp_path: Path) -> None:
    run_dir = make(tmp_path / "run", phase="forward and backward")
    assert read(run_dir).state == "running"
    assert read(run_dir, now=time.time() + 120).state == "failed"
    (run_dir / "heartbeats" / "hanging").write_text("0001-00000000")
    assert "hung in step 12" in read(run_dir).reasons[0]


def test_what_keeps_a_running_run_from_saving_is_a_reason(tmp_path: Path) -> None:
    path = make(tmp_path / "run", phase="forward and backward") / "heartbeats" / "rank-00000.json"
    told = json.loads(path.read_text()) | {"trouble": "the writer is stopped", "todo": "continue it"}
    path.write_text(json.dumps(told))
    assert read(tmp_path / "run").reasons == ("the writer is stopped; continue it",)


@pytest.mark.parametrize(("seconds", "is_copy"), [(0, False), (30, False), (86_400, True), (-86_400, True)])
def test_a_copy_was_last_seen_when_its_run_was(tmp_path: Path, seconds: int, is_copy: bool) -> None:
    """`cp -r` gives every file the time of the copy, which is no time of the run."""
    run_dir = make(tmp_path / "run")
    path = run_dir / "heartbeats" / "rank-00000.json"
    written = path.stat().st_mtime
    path.write_text(json.dumps(json.loads(path.read_text()) | {"unix_time": written - seconds}))
    assert read(run_dir).last_seen == pytest.approx(written - seconds if is_copy else written, abs=20)


@pytest.mark.parametrize(
    ("attempt", "is_of_the_start"),
    [
        pytest.param("0002-0000000a", True, id="the start's own"),
        pytest.param("0003-0000000b", True, id="of a rewind in the same start, which is no start"),
        pytest.param("0001-0000000c", False, id="of an earlier start"),
        pytest.param("0002-0000000d", False, id="of another run"),
        pytest.param("x", False, id="no attempt"),
    ],
)
def test_the_beat_is_that_of_the_last_start(tmp_path: Path, attempt: str, is_of_the_start: bool) -> None:
    run_dir = make(tmp_path / "run")
    path = run_dir / "heartbeats" / "rank-00000.json"
    told = json.loads(path.read_text()) | {"attempt": attempt, "step": 14, "error": "no room"}
    path.write_text(json.dumps(told))
    left = {"reached": 0, "attempt": "", "phase": "", "step": 0, "is_hung": False}
    start = {"attempt": "0002-0000000a", "unix_time": 1.0, "startup_seconds": 1.0, "total_seconds": 1.0}
    start |= {"resumed_from": None, "num_ranks": 1, "zero_stage": 1, "device": "cpu", "left": left}
    (run_dir / "starts.jsonl").write_text(json.dumps(start) + "\n")
    assert any("ended in step 14" in one for one in read(run_dir).reasons) == is_of_the_start


def test_a_score_may_stand_far_back(tmp_path: Path) -> None:
    run_dir = make(tmp_path / "run")
    with (run_dir / METRICS_FILE).open("a") as file:
        file.writelines(f"{json.dumps({**LINE, 'step': 13 + number})}\n" for number in range(2000))
    assert (run_dir / METRICS_FILE).stat().st_size > 1 << 16
    assert read(run_dir).accuracy == 0.75
    assert read_facts(run_dir, num_steps=16, is_scored=False).accuracy is None, "nobody evaluates it"


def test_a_loss_may_be_nan(tmp_path: Path) -> None:
    run_dir = make(tmp_path / "run")
    (run_dir / METRICS_FILE).write_text('{"step": 12, "loss": NaN, "images_per_second": "fast"}\n')
    found = read(run_dir)
    assert found.loss is not None
    assert math.isnan(found.loss)
    assert found.images_per_second is None


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "metrics of zeros": (METRICS_FILE, lambda path: path.write_bytes(bytes(999)), "metrics.jsonl has no usable line"),
    "metrics are a folder": (METRICS_FILE, folder_instead, "metrics.jsonl cannot be read: Is a directory"),
    "metrics are a pipe": (METRICS_FILE, pipe_instead, "metrics.jsonl is damaged"),
    "half a ledger": (LEDGER, lambda path: path.write_bytes(path.read_bytes()[:40]), "ledger.jsonl has no usable line"),
    "a ledger of lists": (LEDGER, lambda path: path.write_text("[[[[\n"), "ledger.jsonl has no usable line"),
    "half a beat": (
        "heartbeats/rank-00000.json",
        lambda path: path.write_bytes(path.read_bytes()[:40]),
        "heartbeats/rank-00000.json is damaged",
    ),
    "a beat of another kind": (
        "heartbeats/rank-00000.json",
        lambda path: path.write_text(path.read_text().replace("ended", "asleep")),
        "heartbeats/rank-00000.json is damaged: 'asleep'",
    ),
    "a large beat": ("heartbeats/rank-00000.json", lambda path: path.write_bytes(bytes(9999)), "larger than 4,096"),
    "an empty DONE": ("DONE", lambda path: path.write_text(""), "DONE is damaged"),
    "a DONE without a step": ("DONE", lambda path: path.write_text("{}"), "DONE is damaged: it names no step"),
    "a DONE that was changed": ("DONE", lambda path: path.write_text('{"step": 1, "digest": "x"}'), "DONE is damaged"),
    "a DONE without weights": ("DONE", lambda path: path.write_text('{"step": 16}'), "model.safetensors is not"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_a_reason_and_the_rest_is_read(tmp_path: Path, kind: str) -> None:
    name, damage, reason = DAMAGE[kind]
    run_dir = make(tmp_path / "run")
    damage(run_dir / name)
    found = read(run_dir)
    assert any(reason in one for one in found.reasons), found.reasons
    is_damaged = f"{name} is damaged" in reason or "cannot be read" in reason or "larger than" in reason
    assert [one.seen for one in found.damaged] == ([name] if is_damaged else [])
    assert found.state != "done"
    assert found.step == 12, "of the metrics or the ledger"


@pytest.mark.parametrize("missing", SIGNS_OF_A_RUN)
def test_a_missing_file_is_no_damage(tmp_path: Path, missing: str) -> None:
    run_dir = make(tmp_path / "run")
    path = run_dir / missing
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    assert not any("damaged" in one or "cannot" in one for one in read(run_dir).reasons)


def test_an_empty_folder() -> None:
    found = read(Path("/nowhere/at/all"))
    assert (found.state, found.step, found.last_seen, found.reasons) == ("never started", None, None, ())


def beat(
    phase: Phase, *, step: int = 9, age: float = 3.0, is_gone: bool = False, is_hanging: bool = False, error: str = ""
) -> LastBeat:
    place = Place(phase=phase, step=step)
    return LastBeat(place=place, age_seconds=age, is_gone=is_gone, is_hanging=is_hanging, error=error)


def start(is_there: bool | None, *, age: float = 5.0) -> LastStart:
    return LastStart(attempt="1", host="node7", age_seconds=age, is_there=is_there)


@pytest.mark.parametrize(
    ("signs", "state", "reason"),
    [
        pytest.param(Signs(num_steps=16), "never started", "", id="only a record"),
        pytest.param(Signs(), "never started", "", id="nothing at all"),
        pytest.param(Signs(has_attempts=True), "failed", "ended before its first step", id="killed as it started"),
        pytest.param(Signs(num_steps=16, done_step=16), "done", "", id="done"),
        pytest.param(Signs(done_step=16), "done", "", id="done, and its record is damaged"),
        pytest.param(
            Signs(num_steps=32, done_step=16, saved_step=16, beat=beat(COMPUTING)), "running", "", id="extended"
        ),
        pytest.param(
            Signs(num_steps=32, done_step=16, saved_step=20, beat=beat(ENDED, step=20)), "stopped", "", id="and stopped"
        ),
        pytest.param(Signs(num_steps=16, saved_step=8, beat=beat(COMPUTING)), "running", "", id="in a step"),
        pytest.param(Signs(beat=beat(STARTING, step=0)), "running", "", id="starting"),
        pytest.param(Signs(saved_step=9, beat=beat(ENDED)), "stopped", "", id="saved the step that it ended with"),
        pytest.param(
            Signs(saved_step=8, beat=beat(ENDED)), "failed", "ended in step 9; step 8 is saved", id="an error"
        ),
        pytest.param(
            Signs(saved_step=8, beat=beat(ENDED, step=0)),
            "failed",
            "ended before its first step; step 8 is saved",
            id="an error as it resumed",
        ),
        pytest.param(Signs(beat=beat(ENDED)), "failed", "nothing is saved", id="an error before the first save"),
        pytest.param(
            Signs(beat=beat(COMPUTING, age=90)), "failed", "no heartbeat for 1 min 30 s, last in step 9", id="silent"
        ),
        pytest.param(Signs(beat=beat(COMPUTING, age=30)), "running", "", id="not silent for long"),
        pytest.param(
            Signs(beat=beat(COMPUTING, age=30, is_gone=True)), "failed", "its process is gone", id="killed on this host"
        ),
        pytest.param(Signs(beat=beat(COMPUTING, age=5, is_gone=True)), "running", "", id="a container beside this one"),
        pytest.param(Signs(beat=beat(COMPUTING, is_hanging=True)), "failed", "hung in step 9", id="hung"),
        pytest.param(Signs(told_step=9, quiet_seconds=10), "running", "", id="without heartbeats, or before the first"),
        pytest.param(Signs(start=start(True)), "running", "", id="on this host, before its first heartbeat"),
        pytest.param(Signs(start=start(True), quiet_seconds=999, told_step=1), "running", "", id="without heartbeats"),
        pytest.param(
            Signs(start=start(True), beat=beat(COMPUTING, age=90)), "running", "perhaps suspended", id="suspended"
        ),
        pytest.param(
            Signs(start=start(True), beat=beat(COMPUTING, is_hanging=True)), "failed", "hung in step 9", id="hung here"
        ),
        pytest.param(
            Signs(start=start(False), told_step=3, quiet_seconds=1),
            "failed",
            "its process is gone, before its first heartbeat; nothing is saved",
            id="killed before its first heartbeat",
        ),
        pytest.param(
            Signs(start=start(False), beat=beat(COMPUTING)), "failed", "gone, last in step 9", id="killed a moment ago"
        ),
        pytest.param(
            Signs(start=start(False), beat=beat(ENDED), saved_step=9, quiet_seconds=1), "stopped", "", id="stopped here"
        ),
        pytest.param(
            Signs(start=start(False), beat=beat(ENDED, error="no room"), saved_step=8),
            "failed",
            "ended in step 9; step 8 is saved: no room",
            id="an error with words",
        ),
        pytest.param(
            Signs(start=start(False), told_step=9, saved_step=9, quiet_seconds=1),
            "stopped",
            "",
            id="without heartbeats",
        ),
        pytest.param(Signs(start=start(None), told_step=3, quiet_seconds=9), "running", "", id="elsewhere, just begun"),
        pytest.param(
            Signs(start=start(None, age=100), told_step=3, quiet_seconds=70),
            "running",
            "started on node7 1 min 40 s ago, without a heartbeat",
            id="elsewhere, what is known",
        ),
        pytest.param(
            Signs(start=start(None, age=999), told_step=3, quiet_seconds=900),
            "failed",
            "ended in step 3",
            id="and later",
        ),
        pytest.param(
            Signs(saved_step=9, told_step=12, quiet_seconds=1, beat=beat(ENDED, age=60)), "running", "", id="resumed"
        ),
        pytest.param(
            Signs(saved_step=9, told_step=9, quiet_seconds=4, beat=beat(ENDED, age=3)), "stopped", "", id="just ended"
        ),
        pytest.param(
            Signs(told_step=9, saved_step=8, quiet_seconds=999),
            "failed",
            "ended in step 9; step 8 is saved",
            id="without heartbeats, and quiet",
        ),
        pytest.param(Signs(told_step=8, saved_step=8, quiet_seconds=999), "stopped", "", id="quiet, and saved"),
    ],
)
def test_states(signs: Signs, state: str, reason: str) -> None:
    found, why, has_vanished = state_of(signs)
    assert found == state
    assert reason in why
    assert bool(why) == bool(reason), why
    assert has_vanished == (state == "failed" and ("gone" in why or "no heartbeat" in why))
    assert found in STATES
