"""Runs one command and measures wall time, CPU-seconds and peak memory of all its processes from outside."""

import ctypes
import os
import platform
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.1
_SET_CHILD_SUBREAPER = 36  # from Linux's prctl


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Memory is the sum of proportional set sizes, so that pages shared by processes count once. `peak_own_bytes`
    leaves out mapped files (programs, and data that a loader maps): the system may drop and read these again."""

    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int
    peak_own_bytes: int
    largest_process_bytes: int


def run(
    command: Sequence[str], *, environment: dict[str, str] | None = None, poll_seconds: float = POLL_SECONDS
) -> Measured:
    """Runs a command to its end; RuntimeError with its error output if it fails. No other child may be running.

    Polling the memory of a process of half a gigabyte takes about 5 ms of CPU.
    """
    # Processes that briefly outlive the command (such as the server that forked its workers) become children of
    # this process, so that all their CPU time is counted.
    others = _children()
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        began, before = time.monotonic(), os.times()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        peak = _Peak(process.pid, poll_seconds=poll_seconds)
        with peak:
            output, _ = process.communicate()
        wall = time.monotonic() - began
        _wait_for_orphans(others)
        after = os.times()
    finally:  # otherwise it would adopt the orphans of everything that it starts later
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{output.decode()[-4000:]}")
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return Measured(
        wall_seconds=wall,
        cpu_seconds=cpu,
        peak_bytes=peak.total,
        peak_own_bytes=peak.own,
        largest_process_bytes=peak.largest,
    )


def _wait_for_orphans(others: set[int]) -> None:
    """Waits for all children of this process except `others`."""
    while left := _children() - others:
        for pid in left:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> set[int]:
    """Ids of this process's children."""
    lines = [line for file in Path("/proc/self/task").glob("*/children") for line in _lines(str(file))]
    return {int(child) for child in " ".join(lines).split()}


def machine() -> dict[str, object]:
    """The machine on which the benchmark ran."""
    cpus = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {"cpu": cpus[0] if cpus else "", "cores": os.cpu_count(), "python": platform.python_version()}


class _Peak:
    """Polls the memory of a process and all its descendants."""

    def __init__(self, pid: int, *, poll_seconds: float) -> None:
        self.total = self.own = self.largest = 0
        self._poll_seconds = poll_seconds
        self._pid, self._done = pid, threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._done.wait(self._poll_seconds):
            found = [_pss(pid) for pid in _tree(self._pid)]
            sizes = [size for size, _ in found]
            self.total, self.largest = max(self.total, sum(sizes)), max(self.largest, *sizes)
            self.own = max(self.own, sum(size - mapped for size, mapped in found))


def _tree(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        with suppress(FileNotFoundError, ProcessLookupError):  # it ends meanwhile
            for children in Path(f"/proc/{parent}/task").glob("*/children"):
                found += [int(child) for child in "".join(_lines(str(children))).split()]
    return found


def _pss(pid: int) -> tuple[int, int]:
    """Bytes of a process's proportional set, and how many of them are mapped files; zeros if it has ended."""
    rows = (line.split() for line in _lines(f"/proc/{pid}/smaps_rollup"))
    found = {row[0]: int(row[1]) << 10 for row in rows if row[0] in ("Pss:", "Pss_File:")}
    return found.get("Pss:", 0), found.get("Pss_File:", 0)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
