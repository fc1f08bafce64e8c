"""Ends a rank in which a library holds the interpreter lock forever, so that no thread, not even the heartbeat, runs.

A small separate process waits for bytes from the heartbeat. It runs this file as a script, with the standard library
only, so it takes little time and memory. `faulthandler.dump_traceback_later` would need no process, but it also counts
the time in which the whole run was suspended, and would end all ranks when they continue.
"""

import faulthandler
import os
import select
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

_DUMP_SIGNAL = signal.SIGRTMAX - 1  # no library is known to use it
_TICK_SECONDS = 0.5
_DUMP_SECONDS = 2.0
_STOPPED = ("T", "t")  # states in /proc/PID/stat: stopped by a signal, or by a debugger


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

    def feed(self) -> None:
        """Tells the separate process that Python still runs."""
        with suppress(OSError):  # the pipe is full, or the process was killed, so that there is no last resort
            os.write(self._pipe, b".")

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
    parent ends.

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
            _end(pid, seconds=seconds)
            return


def _end(pid: int, *, seconds: float) -> None:
    with suppress(OSError):
        if waits_for_disk(pid):
            os.write(2, f"a thread of process {pid} waits for a disk or file server that does not answer\n".encode())
        os.write(2, f"process {pid} has run no Python for {seconds:.0f} s and is ended; its stacks:\n".encode())
    with suppress(ProcessLookupError):
        os.kill(pid, _DUMP_SIGNAL)
        select.select([], [], [], _DUMP_SECONDS)
        os.kill(pid, signal.SIGKILL)


def waits_for_disk(pid: int) -> bool:
    """Returns whether a thread of the process is in uninterruptible sleep."""
    return any(_state(f"{pid}/task/{path.name}") == "D" for path in Path(f"/proc/{pid}/task").glob("*"))


def _state(pid: int | str) -> str:
    """Returns the state of a process: the letter after the name in /proc/PID/stat. Empty if that cannot be read."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return ""


if __name__ == "__main__":
    watch(int(sys.argv[1]), seconds=float(sys.argv[2]))
