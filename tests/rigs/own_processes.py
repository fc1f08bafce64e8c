"""Finds the processes that a run of tests started, wherever they are in the process tree, and ends them by pid.

A process is ours if it descends from this one, or if it was started with this run's marker in its environment. That
also finds orphans adopted by init. Linux's /proc provides both (proc(5)).
"""

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

_PROC = Path("/proc")
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_POLL_SECONDS = 0.01
_GONE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Process:
    """The kernel's facts about one process. Its start time tells it from a later process with the same id."""

    pid: int
    parent: int
    started: int
    is_zombie: bool
    cpu_seconds: float  # CPU-seconds of its own and of the children that it has waited for

    @property
    def identity(self) -> tuple[int, int]:
        """Stays the same while the process lives, and is never reused."""
        return self.pid, self.started


def read_process(pid: int) -> Process | None:
    """The process, or None if it has ended."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may contain anything
    return Process(
        pid=pid,
        parent=int(fields[1]),
        started=int(fields[19]),
        is_zombie=fields[0] in "ZX",
        cpu_seconds=sum(int(ticks) for ticks in fields[11:15]) / _TICKS_A_SECOND,
    )


def is_alive(pid: int) -> bool:
    """False for zombies: those of orphans wait for an init that may take its time."""
    process = read_process(pid)
    return process is not None and not process.is_zombie


class OwnProcesses:
    """The processes of this run of tests from now on. Marks the environment that children inherit."""

    def __init__(self) -> None:
        self._marker = f"PATCHLINE_TESTS_{secrets.token_hex(8)}=1"
        os.environ[self._marker.removesuffix("=1")] = "1"
        self._kept: set[tuple[int, int]] = set()
        self._strangers: set[int] = set()

    def living(self) -> list[Process]:
        """All of ours, parents before children, without zombies and this process."""
        pids = {int(entry.name) for entry in os.scandir(_PROC) if entry.name.isdigit()}
        self._strangers &= pids  # the id of an ended process may be reused, perhaps by one of ours
        processes = [read_process(pid) for pid in pids - self._strangers]
        known = [process for process in processes if process is not None]
        is_root = {process.pid: process.parent == os.getpid() or self._is_marked(process.pid) for process in known}
        ours = _with_descendants(known, lambda process: is_root[process.pid])
        self._strangers |= {process.pid for process in known} - {process.pid for process in ours}
        return [process for process in ours if not process.is_zombie]

    def keep(self, processes: Iterable[Process]) -> None:
        """Keeps servers that several tests share: they and their children are not ended."""
        self._kept |= {process.identity for process in processes}

    def end(self) -> list[Process]:
        """Kills all processes that are not kept, and returns them once they have ended."""
        ended: list[Process] = []
        deadline = time.monotonic() + _GONE_SECONDS
        while rest := self._not_kept():
            for process in rest:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            ended += [process for process in rest if process not in ended]
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {[process.pid for process in rest]} do not end on SIGKILL")
            time.sleep(_POLL_SECONDS)
        return ended

    def _not_kept(self) -> list[Process]:
        living, forks = self.living(), _server_of_forks()
        kept = _with_descendants(living, lambda process: process.identity in self._kept and process.pid != forks)
        spared = {process.pid for process in kept} | {forks, _tracker_of_resources()}
        return [process for process in living if process.pid not in spared]

    def _is_marked(self, pid: int) -> bool:
        try:
            return self._marker.encode() in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:
            return False


def _with_descendants(processes: list[Process], is_root: Callable[[Process], bool]) -> list[Process]:
    """The roots and all their descendants, parents before children."""
    children: dict[int, list[Process]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    found: dict[int, Process] = {}
    waiting = [process for process in processes if is_root(process)]
    while waiting:
        process = waiting.pop(0)
        if process.pid not in found and process.pid != os.getpid():
            found[process.pid] = process
            waiting += children.get(process.pid, [])
    return list(found.values())


def _server_of_forks() -> int | None:
    """multiprocessing's fork server, which every test shares; its children belong to the tests."""
    pid: int | None = getattr(forkserver, "_forkserver")._forkserver_pid  # noqa: B009
    return pid


def _tracker_of_resources() -> int | None:
    """multiprocessing's resource tracker, shared too."""
    pid: int | None = getattr(resource_tracker, "_resource_tracker")._pid  # noqa: B009
    return pid
