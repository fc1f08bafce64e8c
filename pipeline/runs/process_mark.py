"""Which process a start of a run is, so that a command on the same host can tell whether it is still there.

A number alone does not say it: numbers are used again, and a container has its own. With the time at which the process
began, the kernel's boot and the namespace of the numbers, it does.
"""

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from shards.schema.config_values import Range

_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
_STATE, _BEGAN = 0, 19  # fields of /proc/PID/stat behind the name, as in proc(5)
_ENDED = ("Z", "X")
_Count = Annotated[int, Range(0)]


@dataclass(frozen=True, kw_only=True)
class ProcessMark:
    """`kernel`: the boot and the namespace of its number; `began`: ticks since the boot. Empty and 0: not known."""

    host: str = ""
    kernel: str = ""
    pid: _Count = 0
    began: _Count = 0

    def is_there(self) -> bool | None:
        """Whether the process still runs; None if that cannot be told from here."""
        is_known = self.pid and self.began and self.kernel
        if not is_known or (self.host, self.kernel) != (socket.gethostname(), _kernel()):
            return None
        try:
            os.kill(self.pid, 0)
        except PermissionError:  # another user's
            pass
        except (OSError, OverflowError):
            return False
        found = _stat(self.pid)
        if found is None:
            return None
        state, began = found
        return began == self.began and state not in _ENDED


def own_mark() -> ProcessMark:
    """Of this process."""
    found = _stat(os.getpid())
    return ProcessMark(host=socket.gethostname(), kernel=_kernel(), pid=os.getpid(), began=found[1] if found else 0)


def age_of_process() -> float:
    """Seconds since the kernel started this process, to a hundredth; 0 if that cannot be told."""
    found = _stat(os.getpid())
    if found is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - found[1] / os.sysconf("SC_CLK_TCK"))


def _kernel() -> str:
    try:
        return f"{_BOOT.read_text().strip()} {_NAMESPACE.readlink()}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int] | None:
    """The state of a process, a letter, and when it began; None if it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        values = text.rpartition(")")[2].split()
        return values[_STATE], int(values[_BEGAN])
    except (OSError, ValueError, IndexError):
        return None
