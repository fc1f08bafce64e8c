"""A command is measured with everything that outlives it, on an idle machine or a busy one; nothing is left behind."""

import ctypes
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.measure import run
from benchmarks.threads import BUSY, SETTINGS, busy, table

_GET_CHILD_SUBREAPER = 37  # from Linux's prctl
DEADLINE_SECONDS = 60.0


def is_subreaper() -> bool:
    found = ctypes.c_int(-1)
    assert ctypes.CDLL(None).prctl(_GET_CHILD_SUBREAPER, ctypes.byref(found), 0, 0, 0) == 0
    return bool(found.value)


def test_orphans_are_counted_other_children_are_not_waited_for_and_later_orphans_are_nobodys() -> None:
    burn = "import time; end = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    leave = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {burn!r}])"
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        found = run([sys.executable, "-c", leave])
        assert other.poll() is None
    finally:
        other.communicate(b"\n")
    assert found.cpu_seconds > 0.5
    assert not is_subreaper()


def test_processes_that_end_while_their_memory_is_read_are_skipped() -> None:
    failed = list[BaseException | None]()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading, "excepthook", lambda hook: failed.append(hook.exc_value))
        run(["bash", "-c", "for i in {1..60}; do for k in {1..8}; do true & done; wait; done"], poll_seconds=0.0)
    assert not failed


def test_mapped_files_count_in_the_peak_but_not_in_the_own_memory(tmp_path: Path) -> None:
    mapped, own = 40_000_000, 20_000_000
    file = tmp_path / "file"
    file.write_bytes(b"x" * mapped)
    code = f"""
import mmap, time
file = open({str(file)!r}, "rb")
view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
total, held = sum(view[place] for place in range(0, {mapped}, 4096)), bytearray(b"x" * {own})
time.sleep(0.5)
"""
    found = run([sys.executable, "-c", code])
    assert own < found.peak_own_bytes < own + mapped / 2
    assert found.peak_bytes > found.peak_own_bytes + mapped


def test_a_failure_changes_nothing_either() -> None:
    with pytest.raises(RuntimeError, match="ended with 3"):
        run([sys.executable, "-c", "raise SystemExit(3)"])
    assert not is_subreaper()


def test_the_busy_processes_end_with_the_measurement() -> None:
    with busy(2) as burners:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not all("while True" in Path(f"/proc/{pid}/cmdline").read_text() for pid in burners):
            assert time.monotonic() < deadline, "they do not begin"
    assert [pid for pid in burners if Path(f"/proc/{pid}").exists()] == []


def test_the_table_has_a_row_a_setting() -> None:
    found = {f"{where}: {setting}": [1.0, 2.0, 3.0] for where in BUSY for setting in SETTINGS}
    lines = table(found).splitlines()
    assert len(lines) == 2 + len(SETTINGS)
    assert lines[2] == "| spinning (libgomp's own) | 2 (1 to 3) | 2 (1 to 3) |"
