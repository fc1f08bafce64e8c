"""The trainer's side of its checkpoint writer (process.py): starts the writer and exchanges messages with it. It waits
for an answer only if told for how many seconds.
"""

import fcntl
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.checkpoints.writer_messages import (
    BufferFit,
    Command,
    CommitOrder,
    Hurry,
    LineSplitter,
    SaveResult,
    Write,
    from_line,
    to_line,
)
from shards.errors import StorageError

log = logging.getLogger(__name__)
MOST_SILENT_SECONDS = 600.0  # a writer that shows no progress for this long counts as hung
_READ_BYTES = 1 << 16
_STOPPED = ("T", "t")  # states in /proc/PID/stat: stopped by a signal, or by a debugger
_LAST_SECONDS = 5.0  # how long to wait for a writer to end after its pipe has ended
_PIPE_BYTES = 1 << 20
# Slurm sends these signals to every process of a step. The writer must not get one before it ignores them.
_NOT_FOR_WRITERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Writer:
    """One rank's writer process, and the shared memory (`buffer`, a descriptor) from which it writes.

    Close it when done; that kills the process, whatever it is doing. Only one thread may use it, but any thread may
    read `pid` and `stopped_pid`.
    """

    def __init__(self, *, most_silent_seconds: float = MOST_SILENT_SECONDS) -> None:
        self.buffer = os.memfd_create("checkpoint", os.MFD_CLOEXEC)
        self._most_silent = most_silent_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._fit: BufferFit | None = None
        self._hurried = 0  # the newest save that the writer was told to hurry for
        self._said = ""  # the last message for the log, which is not repeated after every save
        self._waiting: dict[int, str] = {}  # the saves for which an answer is due, and what was last asked
        self._start()

    @property
    def pid(self) -> int:
        """The process id; 0 if there is none."""
        process = self._process  # a copy, since other threads ask, too
        return process.pid if process else 0

    @property
    def stopped_pid(self) -> int:
        """The process id if the process is stopped, for example by SIGSTOP; else 0."""
        pid = self.pid
        with suppress(OSError, IndexError):
            if Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in _STOPPED:
                return pid
        return 0

    @property
    def is_busy(self) -> bool:
        """Whether an answer is due."""
        return bool(self._waiting)

    def fit(self, order: BufferFit) -> None:
        """Tells the writer what is in the buffer from now on."""
        self._fit = order
        if self._process:
            self._send(order)

    def write(self, order: Write) -> None:
        """Asks the writer to write the buffer. A writer that has died is replaced first. Raises StorageError if no
        writer can be started."""
        self._ask(order, "write")

    def commit(self, order: CommitOrder) -> None:
        """Asks the writer to commit. Like `write`, replaces a dead writer and raises StorageError."""
        self._ask(order, "commit")

    def answers(self, *, seconds: float = 0.0) -> list[SaveResult]:
        """Returns the answers since the last call; waits up to `seconds` for the first. If the writer has died or was
        silent for too long, the answers say that its saves have failed (or, if only old checkpoints were left to
        delete, are retired)."""
        found: list[SaveResult] = []
        if seconds:
            self._hurry()
        deadline = time.monotonic() + seconds
        while self._process and not found:
            left = max(0.0, deadline - time.monotonic())
            if not self._exchange(left, found) or (not left and not found):
                break
        return found

    def close(self) -> None:
        """Ends the process at once and frees the buffer."""
        self._end()
        self._waiting = {}
        if self.buffer >= 0:
            os.close(self.buffer)
            self.buffer = -1

    def _ask(self, order: Write | CommitOrder, what: str) -> None:
        if self._process and not self._waiting and self._process.poll() is not None:
            log.warning("the checkpoint writer (process %d) has ended; a new one is started", self.pid)
            self._end()
        if self._process is None:
            self._start()
            if self._fit:
                self._send(self._fit)
        self._waiting[order.save] = what
        self._heard = time.monotonic()
        self._send(order)

    def _hurry(self) -> None:
        """Tells the writer, once per save, that the trainer waits for a write."""
        writes = [save for save, asked in self._waiting.items() if asked == "write"]
        if writes and max(writes) > self._hurried and self._process:
            self._hurried = max(writes)
            self._send(Hurry(save=self._hurried))

    def _send(self, order: Command) -> None:
        self._unsent.append(memoryview(to_line(order)))
        self._push()

    def _push(self) -> None:
        """Writes as much as the pipe takes now. If the writer has ended, the next read notices it."""
        with suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                line = self._unsent[0]
                line = line[os.write(self._commands, line) :]
                if line:
                    self._unsent[0] = line
                else:
                    self._unsent.popleft()

    def _exchange(self, seconds: float, found: list[SaveResult]) -> bool:
        """Sends and receives once. Returns False if the process is gone."""
        self._push()
        poll = select.poll()  # select(2) does not support descriptors above 1023
        poll.register(self._answers, select.POLLIN)
        if self._unsent:
            poll.register(self._commands, select.POLLOUT)
        ready = [descriptor for descriptor, _ in poll.poll(min(seconds, 1.0) * 1000)]
        if self._answers not in ready:
            silent = time.monotonic() - self._heard
            if self._waiting and silent > self._most_silent:
                how = ", stopped as by SIGSTOP," if self.stopped_pid else ""
                what = f"the checkpoint writer (process {self.pid}) did nothing for {silent:.0f} s{how} and was ended"
                self._lost(what, found)
            return self._process is not None
        data = os.read(self._answers, _READ_BYTES)
        if not data:
            self._lost("", found)
            return False
        self._heard = time.monotonic()
        try:
            for line in self._lines.take(data):
                self._take(from_line(line), found)
        except ValueError as error:
            self._lost(f"the checkpoint writer answered nonsense: {error}", found)
        return self._process is not None

    def _take(self, answer: object, found: list[SaveResult]) -> None:
        if not isinstance(answer, SaveResult):
            raise ValueError(f"a {type(answer).__name__}; allowed: a SaveResult")
        if answer.what == "said":
            if answer.message != self._said:
                log.warning("%s", answer.message)
            self._said = answer.message
        elif answer.what != "progress":
            if answer.what == "committed":
                self._waiting[answer.save] = "retire"
            else:
                self._waiting.pop(answer.save, None)
            found.append(answer)

    def _lost(self, why: str, found: list[SaveResult]) -> None:
        """Ends the process, or notes that it has ended. Adds an answer for each save to `found`: failed, or retired if
        only old checkpoints were left to delete."""
        pid, code = self.pid, self._end(is_over=not why)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        message = why or f"the checkpoint writer (process {pid}) {how}"
        for save, asked in self._waiting.items():
            found.append(SaveResult(save=save, what="retired" if asked == "retire" else "failed", message=message))
        self._waiting = {}

    def _start(self) -> None:
        """Starts the process. Raises StorageError if the system cannot start another one."""
        try:
            commands, self._commands, self._answers, answers = _two_pipes()
        except OSError as error:
            raise StorageError(f"the checkpoint writer does not start: {error}") from error
        self._lines, self._heard = LineSplitter(), time.monotonic()
        self._unsent: deque[memoryview] = deque()
        for end in (self._commands, self._answers):
            os.set_blocking(end, False)
        with suppress(OSError):  # the user's limit may be lower; smaller pipes work, too
            fcntl.fcntl(self._commands, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        ends = (commands, answers, self.buffer)
        words = [sys.executable, "-P", "-m", "pipeline.checkpoints.writer.process", *map(str, (*ends, os.getpid()))]
        try:
            with _signals_held_back():
                # In its own process group, the writer does not get a terminal's Ctrl-C. It stays in the trainer's
                # session: the kernel divides the processor between sessions first, so in another session the low
                # priority would have no effect on training.
                self._process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=ends, process_group=0
                )
        except OSError as error:
            os.close(self._commands)
            os.close(self._answers)
            raise StorageError(f"the checkpoint writer does not start: {error}") from error
        finally:
            os.close(commands)
            os.close(answers)

    def _end(self, *, is_over: bool = False) -> int:
        """Ends the process, and returns its exit code. `is_over`: whether it is ending by itself."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_SECONDS if is_over else 0)
        if process.poll() is None:
            process.kill()
        os.close(self._commands)
        os.close(self._answers)
        return process.wait()


def _two_pipes() -> tuple[int, int, int, int]:
    """Returns the read and write ends of two pipes. Raises OSError if there are no descriptors left."""
    first = os.pipe()
    try:
        return *first, *os.pipe()
    except OSError:
        for end in first:
            os.close(end)
        raise


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Blocks the signals in _NOT_FOR_WRITERS inside the `with` block. A process started there begins with the signals
    blocked; this process receives them afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_WRITERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
