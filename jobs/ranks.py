"""Starts the ranks of one stage on this machine, one process per rank, and waits for them or kills them.

With `--processes N` a command runs as N ranks, and the parent process passes signals on to them.
"""

import ctypes
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Self

from jobs import exit_codes
from jobs.output import make_folder
from pipeline.ranks.host import free_port
from pipeline.shared_settings import RECORD_FILE
from shards.errors import UserError
from shards.files.local_files import read_tail
from shards.output.terminal import message_text

_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_LOOPBACK_SECONDS = 5.0  # how long a connection to this host itself may take
_INTERRUPTS = (signal.SIGTERM, signal.SIGINT)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# The result is the first code in this list that any rank ended with; otherwise it is the code of the rank that failed
# first.
_CODES_BY_WEIGHT = (
    exit_codes.USER_MISTAKE,
    exit_codes.WILL_NOT_SUCCEED,
    exit_codes.CONTINUE,
    exit_codes.OUR_BUG,
)
log = logging.getLogger(__name__)
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_SECOND_INTERRUPT_SECONDS = 2.0  # time for the ranks to end by themselves
_TAIL_LINES, _TAIL_BYTES, _MOST_TAILS = 20, 1 << 16, 2


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The running processes of one stage, in rank order; a context manager that kills them at its end. `failed`: the
    ranks that did not end with 0, in the order in which `wait` found them."""

    processes: tuple[subprocess.Popen[bytes], ...]
    failed: list[int] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def poll(self) -> bool:
        """Whether any rank is running."""
        return any(process.poll() is None for process in self.processes)

    def kill(self) -> None:
        """Kills every rank with SIGKILL, like a power cut or the out-of-memory killer."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def signal(self, number: int) -> None:
        """Sends a signal to every running rank."""
        for process in self.processes:
            process.send_signal(number)

    def wait(self, *, each_time: Callable[[], None] = lambda: None) -> int:
        """Waits for all ranks and returns 0, or the exit code that says most about the failure. Once a rank has failed,
        the others are killed after a grace period. `each_time` is called at every poll; if it raises, the ranks are
        killed."""
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
        # A rank killed by a signal comes first: the others probably ended because of it.
        self.failed.extend(sorted(found, key=lambda rank: self.processes[rank].returncode >= 0))
        return bool(self.failed)


def start_ranks(
    words: list[str], *, num_ranks: int, environ: Mapping[str, str], log_dir: Path, is_quiet: bool = False
) -> Ranks:
    """Starts `patchline WORDS` in `num_ranks` processes. Rank 0 keeps the terminal, unless `is_quiet`; the others write
    to log_dir/rank-N.log.

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
            with _later_signals():  # signals are handled once the new process is in the list
                one = _start(words, rank=rank, environ=shared, log_file=log_file, preexec=end_with_this)
                processes.append(one)
    except BaseException:  # an interrupt, or a process that could not be started
        Ranks(processes=tuple(processes)).kill()
        raise
    return Ranks(processes=tuple(processes))


def _refuse_no_loopback() -> None:
    """Raises UserError if ranks cannot meet at 127.0.0.1, as in a network namespace whose interfaces are down."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=_LOOPBACK_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"the ranks cannot meet at 127.0.0.1: {error.strerror or error}",
            todo="bring the loopback interface up (ip link set lo up), or leave out --processes",
        ) from error


def _start(
    words: list[str], *, rank: int, environ: Mapping[str, str], log_file: Path | None, preexec: Callable[[], None]
) -> subprocess.Popen[bytes]:
    """Starts one rank in its own session. The caller must hold back interrupts."""
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
    """Holds interrupts back while a process is started, because the forked child would also run this program's
    handlers. The new process inherits the signal mask. The mask applies only to this thread, and Python would run a
    handler here for a signal that another thread received, so the handlers are replaced as well."""
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
    """Returns the path of the log of a rank that does not write to the terminal."""
    return log_dir / f"rank-{rank}.log"


def _end_with(parent: int) -> Callable[[], None]:
    """Returns a function that the child process runs before it becomes the command. The function requests a TERM for
    when the parent dies, and restores the default handlers, so that interrupts end the child."""
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


def must_start(processes: int, environ: Mapping[str, str]) -> bool:
    """Whether this process must start the ranks. If not, it is the only rank or one of several. Raises UserError if
    torchrun or srun has started a number of ranks other than `processes`."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        starter, size = "torchrun", environ["WORLD_SIZE"]
    elif "SLURM_PROCID" in environ and environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        starter, size = "srun", environ["SLURM_STEP_NUM_TASKS"]
    else:
        return processes > 1
    if processes > 1 and size != str(processes):
        raise UserError(
            f"--processes is {processes}, but {starter} has started {size} ranks, of which this is one; leave out "
            f"--processes, or start patchline without {starter}"
        )
    return False


def run_ranks(words: list[str], *, num_ranks: int, environ: Mapping[str, str], run_dir: str) -> int:
    """Runs `patchline WORDS` on `num_ranks` ranks to its end and returns the run's exit code."""
    _refuse_no_loopback()
    with _log_dir(run_dir) as log_dir, _heard() as heard:
        sizes = [_size(log_of(log_dir, rank)) for rank in range(num_ranks)]
        ranks = start_ranks(words, num_ranks=num_ranks, environ=environ, log_dir=log_dir)
        code = ranks.wait(each_time=_PassingOn(ranks, heard).pass_on)
        for line in _last_words(ranks, log_dir, sizes):
            sys.stderr.write(message_text(line) + "\n")
    if code == exit_codes.USER_MISTAKE and run_dir:
        _leave_nothing(Path(run_dir))
    return code if code >= 0 else 128 - code


class _PassingOn:
    """Passes incoming signals on to the ranks."""

    def __init__(self, ranks: Ranks, heard: deque[int]) -> None:
        self._ranks, self._heard = ranks, heard
        self._num_interrupts, self._kill_at = 0, float("inf")

    def pass_on(self) -> None:
        """Passes on the signals since the last call. Ranks that outlive the second Ctrl-C are killed."""
        while self._heard:
            number = self._heard.popleft()
            self._num_interrupts += number == signal.SIGINT
            if number == signal.SIGINT and self._num_interrupts == 2:
                self._kill_at = time.monotonic() + _SECOND_INTERRUPT_SECONDS
            self._ranks.signal(number)
        if time.monotonic() > self._kill_at:
            self._ranks.kill()


@contextmanager
def _heard() -> Iterator[deque[int]]:
    """Collects the signals that arrive while this is open."""
    heard: deque[int] = deque()

    def hear(number: int, _frame: FrameType | None) -> None:
        heard.append(number)

    before = {number: signal.getsignal(number) for number in _PASSED_ON}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, hear)
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _log_dir(run_dir: str) -> Iterator[Path]:
    """Makes RUN/logs, or a temporary folder if the command has no run directory."""
    if not run_dir:
        with tempfile.TemporaryDirectory(prefix="patchline-") as folder:
            yield Path(folder)
        return
    run = Path(run_dir)
    try:
        make_folder(run)
        (run / "logs").mkdir(exist_ok=True)
    except OSError as error:
        what = f"cannot make {run}: {error.strerror}"
        raise UserError(what, todo="give --run-dir a folder that this user may write to") from error
    yield run / "logs"


def _leave_nothing(run: Path) -> None:
    """Removes the logs, and an empty run directory, of a command that was refused before the run began."""
    if not (run / RECORD_FILE).exists():
        shutil.rmtree(run / "logs")
        if not any(run.iterdir()):
            run.rmdir()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _last_words(ranks: Ranks, log_dir: Path, sizes: list[int]) -> Iterator[str]:
    """Yields the last lines of the first `_MOST_TAILS` ranks that failed. Leaves out rank 0, whose lines are on the
    terminal, ranks that report the same mistake as rank 0, and ranks that stopped to be continued or were
    interrupted."""
    codes = [process.returncode for process in ranks.processes]
    for rank in ranks.failed[:_MOST_TAILS]:
        is_said = codes[rank] == codes[0] == exit_codes.USER_MISTAKE
        if rank == 0 or is_said or codes[rank] in (exit_codes.CONTINUE, exit_codes.INTERRUPTED):
            continue
        path = log_of(log_dir, rank)
        tail = read_tail(path, most_bytes=_TAIL_BYTES)
        new = tail.data[max(0, sizes[rank] - (tail.num_bytes - len(tail.data))) :] if tail else b""
        lines = new.decode(errors="replace").splitlines()[-_TAIL_LINES:]
        how = f"was killed by {signal.Signals(-codes[rank]).name}" if codes[rank] < 0 else f"ended with {codes[rank]}"
        yield f"rank {rank} {how}" + (f"; the last lines of {path}:" if lines else "; it wrote nothing")
        yield from (f"  {line}" for line in lines)


def tell_torchrun(path: Path) -> None:
    """Writes the message that torchrun shows when a rank has stopped so that the run can be continued. Torchrun takes
    such a stop for a failure. If the message cannot be written, the exit code still says it."""
    says = "no failure: stopped with a committed checkpoint (exit code 75); run the same command to continue"
    content = {"message": says, "extraInfo": {"timestamp": str(int(time.time()))}}
    try:
        path.write_text(json.dumps({"message": content}))
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        log.warning("TORCHELASTIC_ERROR_FILE cannot be written: %s", error)
