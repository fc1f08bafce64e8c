"""Ends a rank in which a library holds the interpreter lock for ever: no thread of it runs Python, its heartbeat
included.

A small process of its own waits for bytes of the heartbeat. `faulthandler.dump_traceback_later` would do without one,
but it also counts the time in which the whole run was suspended, and would end all ranks when they continue.
"""

import faulthandler
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from pipeline.training.watchdog import last_resort_process

_DUMP_SIGNAL = signal.SIGRTMAX - 1  # no library is known to use it


class LastResort:
    """The process beside this one, and the pipe to it. `seconds`: without a byte, after which it ends this process.
    OSError if it cannot be started; then nothing is left behind."""

    def __init__(self, *, seconds: float, stderr: int) -> None:
        with ExitStack() as undone:
            self._errors = undone.enter_context(os.fdopen(os.dup(stderr), "w"))
            faulthandler.register(_DUMP_SIGNAL, file=self._errors, all_threads=True)
            undone.callback(faulthandler.unregister, _DUMP_SIGNAL)
            read_end, self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            undone.callback(os.close, self._pipe)
            try:
                self._process = _started([str(os.getpid()), str(seconds), str(int(_DUMP_SIGNAL))], read_end, stderr)
            finally:
                os.close(read_end)
            self._undone = undone.pop_all()

    def feed(self) -> None:
        """Python runs."""
        with suppress(OSError):  # it is full, or that process was killed: then there is no last resort
            os.write(self._pipe, b".")

    def close(self) -> None:
        """Ends that process."""
        self._process.kill()
        self._process.wait()
        self._undone.close()


def _started(words: list[str], feed: int, stderr: int) -> subprocess.Popen[bytes]:
    """It inherits the mask: a signal to all processes of a job step, such as Slurm's, leaves it alone."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(last_resort_process.__file__)), *words],
            stdin=feed,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
