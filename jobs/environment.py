"""Makes a command independent of the state of its standard streams, and makes PyTorch's threads sleep while they wait.

Streams may be closed, full, without a reader, or not in UTF-8. A lost log is no reason to stop: if standard error
cannot be written, the command continues. Standard output is the result of `show`, `predict` and others, so these
commands end if it cannot be written (jobs/exit_codes.py).

Threads sleep while they wait for each other, unless the user chose otherwise. By default the threads of libgomp, which
comes with PyTorch's wheels, spin until there is work again. If other programs need the cores too, spinning threads
block the very threads that they wait for, and a run with as many threads as cores drops to two thirds of its speed or
less. On an idle machine, sleeping threads make a run a tenth slower. The results are bit-identical.
"""

import io
import os
import sys
from collections.abc import MutableMapping
from typing import Any

_POLICY = "OMP_WAIT_POLICY"
_WAITING = (_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # the first two are libgomp's, the third is Intel OpenMP's
_UTF8 = "PYTHONUTF8"
_NAMES = ("stdin", "stdout", "stderr")
_MODES = ("r", "w", "w")


def wait_quietly(environ: MutableMapping[str, str]) -> None:
    """Sets OMP_WAIT_POLICY to PASSIVE for this process and its children, unless the user has set one of `_WAITING`.

    Call this before torch is imported: libgomp reads the variable at that time.
    """
    if not any(environ.get(name) for name in _WAITING):
        environ[_POLICY] = "PASSIVE"


def use_utf8(environ: MutableMapping[str, str]) -> None:
    """Starts this command again in Python's UTF-8 mode (PEP 540) unless the locale's encoding is UTF-8.

    Names in datasets are UTF-8, and so are our files. In the locales C and POSIX, Python uses UTF-8 mode by itself,
    unless PYTHONUTF8=0. Output keeps the terminal's encoding; characters that this encoding lacks are escaped.
    """
    if sys.flags.utf8_mode or sys.getfilesystemencoding() == "utf-8":
        return
    environ[_UTF8] = "1"  # for child processes, too
    if sys.stdout is not None:
        environ.setdefault("PYTHONIOENCODING", f"{sys.stdout.encoding}:backslashreplace")
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606 - the same command


def prepare_streams() -> None:
    """Opens closed streams on /dev/null, so that no other file gets descriptor 0, 1 or 2. Writes to standard error
    never fail afterwards."""
    for number, (name, mode) in enumerate(zip(_NAMES, _MODES, strict=True)):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)  # open takes the lowest free number, this one
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # no error for a character that the terminal lacks
    if isinstance(sys.stderr, io.TextIOWrapper):
        log = io.BufferedWriter(_Log(2, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(log, sys.stderr.encoding, errors="backslashreplace", line_buffering=True)


class _Log(io.FileIO):
    """A file that drops data which it cannot write."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:  # no reader, a full disk, or a closed terminal
            return memoryview(data).nbytes
