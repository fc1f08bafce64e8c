"""Ends a rank in which a library holds the interpreter lock forever, so that no thread, not even the heartbeat, runs.

A small separate process waits for bytes from the heartbeat. It runs this file as a script, with the standard library
only, so it takes little time and memory. `faulthandler.dump_traceback_later` would need no process, but it also counts
the time in which the whole run was suspended, and would end all ranks when they continue.

This file can also tell in which call to a file a thread waits. For a thread that waits for a disk or a file server,
even in FUSE, /proc shows the call.
"""

import ctypes
import faulthandler
import os
import platform
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

_DUMP_SIGNAL = signal.SIGRTMAX - 1  # no library is known to use it
_TICK_SECONDS = 0.5
_DUMP_SECONDS = 2.0
_STOPPED = ("T", "t")  # states in /proc/PID/stat: stopped by a signal, or by a debugger
_MOST_WORDS = 500
_MOST_PATH_BYTES = 4096
_AT_FDCWD = -100
# The calls in which a thread may wait for a disk, and their numbers on each processor (linux/unistd.h; -1: none). Their
# arguments begin with a path, with a folder and a path, or with an open file.
_PROCESSORS = ("x86_64", "aarch64")
_OF_PATHS = {
    "open": (2, -1),
    "stat": (4, -1),
    "lstat": (6, -1),
    "rename": (82, -1),
    "mkdir": (83, -1),
    "rmdir": (84, -1),
    "unlink": (87, -1),
}
_IN_FOLDERS = {
    "openat": (257, 56),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "mkdirat": (258, 34),
    "unlinkat": (263, 35),
    "renameat": (264, 38),
    "renameat2": (316, 276),
}
_OF_OPEN_FILES = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "ftruncate": (77, 46),
    "getdents64": (217, 61),
    "preadv": (295, 69),
}
_CALLS: Mapping[str, Sequence[int]] = _OF_PATHS | _IN_FOLDERS | _OF_OPEN_FILES


class LastResort:
    """The separate process, and the pipe to it. After `seconds` without a byte, that process ends this one. Raises
    OSError if it cannot be started; then nothing is left behind."""

    def __init__(self, *, seconds: float, stderr: int) -> None:
        with ExitStack() as undone:
            self._errors = undone.enter_context(os.fdopen(os.dup(stderr), "w"))
            faulthandler.register(_DUMP_SIGNAL, file=self._errors, all_threads=True)
            undone.callback(faulthandler.unregister, _DUMP_SIGNAL)
            read_end, self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            undone.callback(os.close, self._pipe)
            try:
                self._process = _started([str(os.getpid()), str(seconds)], read_end, stderr)
            finally:
                os.close(read_end)
            self._undone = undone.pop_all()

    def feed(self, waits: str = "") -> None:
        """Tells the separate process that Python still runs. `waits`: what the rank waits for, if that is known. If
        Python stops running, the other process reports it."""
        line = f"{waits[:_MOST_WORDS]}\n".encode(errors="backslashreplace")
        with suppress(OSError):  # the pipe is full, or the process was killed, so that there is no last resort
            os.write(self._pipe, line)

    def close(self) -> None:
        """Ends the separate process."""
        self._process.kill()
        self._process.wait()
        self._undone.close()


def _started(words: list[str], feed: int, stderr: int) -> subprocess.Popen[bytes]:
    """Starts the separate process. It inherits a mask that blocks all signals, so that a signal to all processes of a
    job step, such as Slurm's, does not end it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *words],
            stdin=feed,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def watch(pid: int, *, seconds: float, feed: int = 0) -> None:
    """Kills process `pid`, the parent, if nothing arrives on the descriptor `feed` for `seconds`. Returns when the
    parent ends or closes the pipe.

    Time in which either process is stopped does not count.
    """
    left, waits = seconds, ""
    while os.getppid() == pid:
        if select.select([feed], [], [], _TICK_SECONDS)[0]:
            lines = os.read(feed, 1 << 16).decode(errors="replace").splitlines()
            if not lines:
                return
            left, waits = seconds, lines[-1]
        elif _state(pid) not in _STOPPED:
            left -= _TICK_SECONDS
        if left <= 0:
            _end(pid, seconds=seconds, waits=waits)
            return


def _end(pid: int, *, seconds: float, waits: str) -> None:
    calls = "; ".join(dict.fromkeys(file_calls(pid).values()))
    if not waits and (calls or waits_for_disk(pid)):
        waits = "a disk or file server does not answer" + (f" ({calls})" if calls else "")
    with suppress(OSError):
        if waits:
            os.write(2, f"process {pid} waits: {waits}\n".encode(errors="backslashreplace"))
        os.write(2, f"process {pid} has run no Python for {seconds:.0f} s and is ended; its stacks:\n".encode())
    with suppress(ProcessLookupError):
        os.kill(pid, _DUMP_SIGNAL)
        select.select([], [], [], _DUMP_SECONDS)
        os.kill(pid, signal.SIGKILL)


def waits_for_disk(pid: int) -> bool:
    """Returns whether a thread of the process is in uninterruptible sleep."""
    return any(_state(f"{pid}/task/{path.name}") == "D" for path in Path(f"/proc/{pid}/task").glob("*"))


def file_calls(pid: int | str = "self") -> dict[str, str]:
    """Returns the call to a file that each thread of a process is in, such as `openat of /data/index`. Each call has a
    different key, so if a key stays the same, its thread waits. Files in /proc, /dev and /sys do not count.

    The main thread comes first. The result is empty if /proc does not show the calls, as for another user's process, or
    if the numbers of this processor's calls are not known here.
    """
    if platform.machine() not in _PROCESSORS:
        return {}
    names = {numbers[_PROCESSORS.index(platform.machine())]: name for name, numbers in _CALLS.items()}
    found = dict[str, str]()
    for task in sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda task: int(task.name)):
        with suppress(OSError, ValueError):
            line = (task / "syscall").read_text()
            number, *words = line.split()
            if int(number) >= 0 and (name := names.get(int(number))):
                path = _path_in(pid, name, [int(word, 16) for word in words])
                if path.startswith("/") and not path.startswith(("/proc/", "/dev/", "/sys/")):
                    found[f"{task.name} {line}"] = f"{name} of {path}"
    return found


def _path_in(pid: int | str, name: str, arguments: list[int]) -> str:
    """Returns the path of the file that a call is about. Raises OSError if it cannot be found."""
    process = Path(f"/proc/{pid}")
    if name in _OF_OPEN_FILES:
        return str((process / "fd" / str(arguments[0])).readlink())  # such as `socket:[4711]` if it is no file
    with (process / "mem").open("rb", buffering=0) as memory:
        memory.seek(arguments[1 if name in _IN_FOLDERS else 0])
        path = os.fsdecode(memory.read(_MOST_PATH_BYTES).partition(b"\0")[0])
    folder = ctypes.c_int(arguments[0] & 0xFFFFFFFF).value if name in _IN_FOLDERS else _AT_FDCWD
    base = process / "cwd" if folder == _AT_FDCWD else process / "fd" / str(folder)
    return str(base.readlink() / path)


def _state(pid: int | str) -> str:
    """Returns the state of a process: the letter after the name in /proc/PID/stat. Empty if that cannot be read."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return ""


if __name__ == "__main__":
    watch(int(sys.argv[1]), seconds=float(sys.argv[2]))
