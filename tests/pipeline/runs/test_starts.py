"""Starts on record, their parts, the cause that each tells of the one before it, and whether its process still runs."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.runs.starts import (
    FILE_NAME,
    START_SPANS,
    Left,
    ProcessMark,
    StartTimes,
    add_start,
    cause_of,
    last_start,
    left_behind,
    own_mark,
    read_start_times,
    read_starts,
)
from tests.rigs.training import FinishedRuns

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("left", "cause"),
    [
        pytest.param(Left(reached=9), "killed or crashed after step 9", id="no heartbeat"),
        pytest.param(Left(reached=9, attempt="0", phase="ended"), "killed or crashed after step 9", id="an older one"),
        pytest.param(Left(attempt="1", phase="saving", step=9), "killed or crashed in step 9 (saving)", id="killed"),
        pytest.param(Left(attempt="1", phase="saving", step=9, is_hung=True), "hung in step 9 (saving)", id="hung"),
        pytest.param(Left(attempt="1", phase="ended", step=8), "stopped with step 8 saved", id="stopped"),
        pytest.param(Left(attempt="1", phase="ended", step=9), "ended by an error in step 9", id="an error"),
        pytest.param(
            Left(attempt="1", phase="ended", step=9, asked_by="SIGTERM", error="no space left"),
            "ended by an error in step 9: no space left",
            id="an error with words",
        ),
        pytest.param(
            Left(attempt="1", phase="ended", step=8, asked_by="SIGINT"),
            "stopped by SIGINT with step 8 saved",
            id="Ctrl-C",
        ),
        pytest.param(
            Left(attempt="1", phase="ended", step=9, asked_by="SIGINT"),
            "stopped by SIGINT in step 9, which was not saved",
            id="a stop whose checkpoint is damaged",
        ),
        pytest.param(
            Left(attempt="1", phase="evaluating", step=9, asked_by="SIGTERM"),
            "ended at once after SIGTERM, in step 9 (evaluating)",
            id="it did not stop in time",
        ),
        pytest.param(Left(attempt="1", phase="starting"), "killed or crashed while starting", id="no step yet"),
        pytest.param(
            Left(attempt="1", phase="ended", step=8, is_done=True), "done with step 8, and extended", id="done"
        ),
    ],
)
def test_causes(left: Left, cause: str) -> None:
    assert cause_of(left, resumed_from=8, attempt_before="1").words == cause


def test_a_stop_by_the_user_is_a_pause_and_one_by_slurm_is_not() -> None:
    found = {}
    for asked_by in ("SIGINT", "SIGHUP", "the file STOP", "SIGTERM", "SIGUSR1", "SIGUSR2", ""):
        left = Left(attempt="1", phase="ended", step=8, asked_by=asked_by)
        found[asked_by] = cause_of(left, resumed_from=8, attempt_before="1").is_pause
    assert [asked_by for asked_by, is_pause in found.items() if is_pause] == ["SIGINT", "SIGHUP", "the file STOP"]
    done = Left(attempt="1", phase="ended", step=8, is_done=True)
    assert cause_of(done, resumed_from=8, attempt_before="1").is_pause


def test_half_a_line_spoils_no_other(tmp_path: Path) -> None:
    left = left_behind(tmp_path)
    assert left == Left()
    assert last_start(tmp_path) is None
    for attempt in ("1", "2"):
        seconds = {"startup": 1.0, "paused": float(attempt), "total": 3.0}
        add_start(tmp_path, attempt=attempt, resumed_from=None, seconds=seconds, topology=(2, 1, "cpu"), left=left)
        with (tmp_path / "starts.jsonl").open("a") as file:
            file.write('{"attempt": "3", "unix')
    assert [start.attempt for start in read_starts(tmp_path)] == ["1", "2"]
    assert (last := last_start(tmp_path))
    assert (last.attempt, last.paused_seconds) == ("2", 2)


def test_a_start_is_on_record_once_with_all_its_parts(tmp_path: Path) -> None:
    parts = StartTimes()
    parts.ends("data")
    for attempt in ("1", "2"):  # the second after a rewind
        parts.step_launched(tmp_path, attempt=attempt)
    (line,) = read_start_times(tmp_path)
    assert (line["attempt"], tuple(line["parts"])) == ("1", START_SPANS)
    assert line["parts"]["imports"] > 0
    assert line["parts"]["load"] == 0


def test_half_a_line_and_other_lines_are_left_out(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(
        '{"attempt": "0"}\n{"attempt": "1", "parts": {"imports": -1}}\n{"attempt": "2", "u'
    )
    StartTimes().step_launched(tmp_path, attempt="3")
    assert [line["attempt"] for line in read_start_times(tmp_path)] == ["3"]


def test_each_start_of_a_run_has_both_lines(finished_runs: FinishedRuns) -> None:
    run_dir = finished_runs.get(1)
    starts, parts = read_starts(run_dir), read_start_times(run_dir)
    assert [start.attempt for start in starts] == [line["attempt"] for line in parts]
    assert starts[0].left == left_behind(run_dir.parent / "none")
    assert sum(parts[0]["parts"].values()) > 0


def test_a_file_of_starts_that_cannot_be_written_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "starts.jsonl").symlink_to("/dev/full")
    StartTimes().step_launched(tmp_path, attempt="1")
    (message,) = caplog.messages
    lacks = "it lacks this: how long this start took"
    assert message.endswith(f"starts.jsonl cannot be written: No space left on device; {lacks}")


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def test_the_age_of_a_process_counts_from_its_start_by_the_kernel() -> None:
    program = "from pipeline.runs.starts import age_of_process; print(age_of_process())"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, cwd=CHECKOUT)
    assert 0 < float(done.stdout) <= time.monotonic() - began + 0.02  # it is a multiple of 0.01


def test_this_process_is_there() -> None:
    mark = own_mark()
    assert (mark.pid, mark.is_there()) == (os.getpid(), True)


def test_a_process_that_ended_is_not_even_if_nobody_waited_for_it(child: "subprocess.Popen[bytes]") -> None:
    text = "from pipeline.runs.starts import own_mark; print(own_mark().began)"
    began = int(subprocess.run([sys.executable, "-c", text], capture_output=True, check=True).stdout)
    assert began > own_mark().began > 0
    ticks = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    mark = replace(own_mark(), pid=child.pid, began=ticks)
    assert mark.is_there() is True
    assert replace(mark, began=ticks - 1).is_there() is False, "its number was used again"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert mark.is_there() is False, "a zombie"
    child.wait()
    assert mark.is_there() is False


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"host": "elsewhere"}, id="another host"),
        pytest.param({"kernel": "another boot"}, id="after a reboot, or in another container"),
        pytest.param({"kernel": ""}, id="no kernel that says so"),
        pytest.param({"began": 0}, id="not recorded"),
        pytest.param({"pid": 0}, id="no number, which would be this whole process group"),
    ],
)
def test_elsewhere_nothing_is_known(changed: dict[str, str | int]) -> None:
    assert replace(own_mark(), **changed).is_there() is None  # type: ignore[arg-type]


def test_a_number_that_no_process_can_have() -> None:
    assert replace(own_mark(), pid=1 << 60).is_there() is False


def test_nothing_recorded() -> None:
    assert ProcessMark().is_there() is None
