"""Whether the process of a start is still there, asked of real processes."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.runs.starts import ProcessMark, own_mark

CHECKOUT = Path(__file__).resolve().parents[3]


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
