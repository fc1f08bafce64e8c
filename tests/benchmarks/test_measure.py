"""A command is measured with everything that outlives it, and measuring changes nothing in this process."""

import ctypes
import subprocess
import sys

import pytest

from benchmarks.measure import run

_GET_CHILD_SUBREAPER = 37  # from Linux's prctl


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


def test_a_failure_changes_nothing_either() -> None:
    with pytest.raises(RuntimeError, match="ended with 3"):
        run([sys.executable, "-c", "raise SystemExit(3)"])
    assert not is_subreaper()
