"""The process that ends a rank in which Python does not run any more: see last_resort.py.

It is started as a file, with the standard library only, so that it takes neither time nor memory.
"""

import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

_TICK_SECONDS = 0.5
_DUMP_SECONDS = 2.0
_STOPPED = ("T", "t")  # by a signal, or by a debugger


def watch(pid: int, *, seconds: float, dump_signal: int, feed: int = 0) -> None:
    """Kills process `pid`, its parent, if nothing arrives on the descriptor `feed` for `seconds` of this process's own
    time. Returns when the parent ends.

    Time in which either process is stopped does not count.
    """
    left = seconds
    while os.getppid() == pid:
        if select.select([feed], [], [], _TICK_SECONDS)[0]:
            if not os.read(feed, 4096):
                return
            left = seconds
        elif _state(pid) not in _STOPPED:
            left -= _TICK_SECONDS
        if left <= 0:
            _end(pid, seconds=seconds, dump_signal=dump_signal)
            return


def _end(pid: int, *, seconds: float, dump_signal: int) -> None:
    with suppress(OSError):
        os.write(2, f"process {pid} has run no Python for {seconds:.0f} s and is ended; its stacks:\n".encode())
    with suppress(ProcessLookupError):
        os.kill(pid, dump_signal)
        select.select([], [], [], _DUMP_SECONDS)
        os.kill(pid, signal.SIGKILL)


def _state(pid: int) -> str:
    """The letter of /proc/PID/stat, after the name in parentheses; empty if it cannot be read."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return ""


if __name__ == "__main__":
    watch(int(sys.argv[1]), seconds=float(sys.argv[2]), dump_signal=int(sys.argv[3]))
