"""The checkpoint writers of running ranks, found as the kernel knows them."""

import os
from pathlib import Path

from tests.rigs.own_processes import is_alive, read_process


def writers_of(parent: int) -> list[int]:
    """The process ids of this process's writers."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        process = read_process(int(entry.name))
        if process and process.parent == parent and is_alive(process.pid) and _is_writer(process.pid):
            found.append(process.pid)
    return found


def _is_writer(pid: int) -> bool:
    try:
        return b"pipeline.checkpoints.writer.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
