"""Starts the ranks of one stage on this machine, each in its own process, and waits for them or kills them."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from jobs import exit_codes
from pipeline.ranks.free_port import free_port

_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_INTERRUPTS = (signal.SIGTERM, signal.SIGINT)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# If ranks end with different codes, the first of these wins; else the code of the rank that failed first.
_CODES_BY_WEIGHT = (
    exit_codes.USER_MISTAKE,
    exit_codes.WILL_NOT_SUCCEED,
    exit_codes.CONTINUE,
    exit_codes.OUR_BUG,
)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The running processes of one stage, in rank order; a context manager that kills them at its end. `failed`: ranks
    that did not end with 0, in the order in which `wait` found them."""

    processes: tuple[subprocess.Popen[bytes], ...]
    failed: list[int] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def poll(self) -> bool:
        """True while any rank is running."""
        return any(process.poll() is None for process in self.processes)

    def kill(self) -> None:
        """SIGKILL to every rank at once, like a power cut or the out-of-memory killer."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def signal(self, number: int) -> None:
        """Sends a signal to every running rank."""
        for process in self.processes:
            process.send_signal(number)

    def wait(self, *, each_time: Callable[[], None] = lambda: None) -> int:
        """Waits for all ranks and returns 0, or the most telling code. Once a rank has failed, the others are killed
        after a grace period. `each_time` is called at every poll; if it raises, the ranks are killed."""
        deadline = float("inf")
        try:
            while self.poll() and time.monotonic() < deadline:
                if self._find_failed() and deadline == float("inf"):
                    deadline = time.monotonic() + _GRACE_SECONDS
                each_time()
                time.sleep(_POLL_SECONDS)
            self._find_failed()
        finally:
            self.kill()
        self._find_failed()
        codes = [process.returncode for process in self.processes]
        found = [code for code in _CODES_BY_WEIGHT if code in codes]
        return int((found or [codes[rank] for rank in self.failed] or [0])[0])

    def _find_failed(self) -> bool:
        found = [rank for rank, process in enumerate(self.processes) if process.poll() and rank not in self.failed]
        # Of those found at once, the killed one is the cause: the others end because of it.
        self.failed.extend(sorted(found, key=lambda rank: self.processes[rank].returncode >= 0))
        return bool(self.failed)


def start_ranks(
    words: list[str], *, num_ranks: int, environ: Mapping[str, str], log_dir: Path, is_quiet: bool = False
) -> Ranks:
    """`patchline WORDS` on `num_ranks` processes. Rank 0 keeps the terminal, unless `is_quiet`; the others write to
    log_dir/rank-N.log.

    Each rank has its own session, so Ctrl-C does not reach it: the caller passes signals on. If the caller is killed,
    the ranks get a TERM, save and end.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    shared = {**environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
    shared["LOCAL_WORLD_SIZE"] = str(num_ranks)
    end_with_this = _end_with(os.getpid())
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            log_file = log_of(log_dir, rank) if rank or is_quiet else None
            with _later_signals():  # when they come, the new process is in the list
                one = _start(words, rank=rank, environ=shared, log_file=log_file, preexec=end_with_this)
                processes.append(one)
    except BaseException:  # an interrupt, or no more processes
        Ranks(processes=tuple(processes)).kill()
        raise
    return Ranks(processes=tuple(processes))


def _start(
    words: list[str], *, rank: int, environ: Mapping[str, str], log_file: Path | None, preexec: Callable[[], None]
) -> subprocess.Popen[bytes]:
    """One rank, in a session of its own. Interrupts are held back."""
    own = {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    command = [sys.executable, "-P", "-m", "jobs.cli", *words]  # -P: the current folder may have a jobs/, too
    with log_file.open("ab") if log_file else nullcontext() as log:
        return subprocess.Popen(
            command,
            env=own,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=preexec,  # noqa: PLW1509 - it takes no lock that another thread may hold
        )


@contextmanager
def _later_signals() -> Iterator[None]:
    """Holds interrupts back while a process is started: half way, its copy of this program would handle them, too. The
    mask is inherited by the new process, but binds this thread alone, so handlers wait as well: a signal that another
    thread has taken would run them here."""
    heard: list[int] = []
    handlers = {number: handler for number in _INTERRUPTS if callable(handler := signal.getsignal(number))}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: heard.append(number))
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for signum in heard:
            signal.raise_signal(signum)


def log_of(log_dir: Path, rank: int) -> Path:
    """The log of a rank that has not the terminal."""
    return log_dir / f"rank-{rank}.log"


def _end_with(parent: int) -> Callable[[], None]:
    """A function for the child process, before it becomes the command: requests a TERM when the parent dies, and lets
    interrupts through, which end it."""
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent is dead already
            os._exit(exit_codes.CRASH)
        for number in _INTERRUPTS:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)

    return ask
