"""The checkpoint writer: a process beside each rank that hashes, writes and uploads files while the rank trains.

    python -m pipeline.checkpoints.writer.process COMMANDS ANSWERS BUFFER PARENT

It never outlives its trainer: the kernel kills it when its parent ends, and it ends when its pipe does. It ignores
signals that are meant for the trainer. A thread of low priority writes the rank's file, so that hashing takes only the
processor time that training leaves free. Once the trainer waits for the file, a thread of normal priority continues. A
commit is small, and other ranks wait for it, so its thread has normal priority. The process loads neither torch nor
NumPy. Without a writer, the trainer does the same work itself.
"""

import ctypes
import errno
import logging
import math
import mmap
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from pipeline.checkpoints.rank_file_out import Piece, RankFileBytes, file_name, report_name, write_rank_file
from pipeline.checkpoints.writer_messages import (
    BufferFit,
    CommitOrder,
    Hurry,
    LineSplitter,
    SaveResult,
    Write,
    from_line,
    to_line,
)
from shards.errors import StorageError, UserError
from shards.store import Store, open_store
from shards.ulimits import file_size_todo

Say = Callable[[SaveResult], None]
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_FAULTS = (OSError, UserError, StorageError)
_SIGN_SECONDS = 1.0  # the least time between two reports of progress
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)
_LOWEST = 19  # the niceness of the lowest priority
_NO_SAVE = 1 << 62  # the number of work that belongs to no save; it is above the number of any save
_OVER = object()
_READ_BYTES = 1 << 20


def do_write(order: Write, data: RankFileBytes, say: Say, *, store: Store | None = None) -> Iterator[None]:
    """Writes the rank's file and report, step by step, and says `written`, `failed` or `overtaken`."""
    store = store or open_store(order.url, was_let_in=True)
    try:
        if not store.exists(order.record):  # otherwise, a deleted run directory would be created again
            from pipeline.checkpoints.attempts import gone_message  # noqa: PLC0415 - it loads pydantic

            say(SaveResult(save=order.save, what="overtaken", message=gone_message(f"{store.url}/{order.record}")))
            return
        if order.failed:
            _discard(order, store)
        yield from write_rank_file(
            store, order.folder, data, rank=order.rank, save=order.save, progress=_signs(order.save, say)
        )
    except _FAULTS as error:
        say(SaveResult(save=order.save, what="failed", message=f"rank {order.rank}: {said_of(error, store.url)}"))
        return
    say(SaveResult(save=order.save, what="written"))


def _signs(save: int, say: Say) -> Callable[[], None]:
    """Returns a function that reports the progress of a save, at most once per second even if it is called more often.
    While a trainer evaluates, it reads no answers for minutes, and a writer whose pipe is full would block."""
    said_at = -math.inf

    def sign() -> None:
        nonlocal said_at
        now = time.monotonic()
        if now - said_at >= _SIGN_SECONDS:
            said_at = now
            say(SaveResult(save=save, what="progress"))

    return sign


def _discard(order: Write, store: Store) -> None:
    """Tries to delete what this rank wrote for a save that has failed, and what a killed writer had begun to write.
    Errors are ignored."""
    own = [f"{order.failed}/{name}" for name in (report_name(order.rank), file_name(order.rank))]
    with suppress(*_FAULTS):
        store.discard_unfinished(lambda path: path in own)
    for path in own:
        with suppress(*_FAULTS):
            store.delete(path)


def do_commit(order: CommitOrder, say: Say, *, store: Store | None = None) -> None:
    """Commits the checkpoint and says `committed`, `failed` or `overtaken`. After a commit, deletes old checkpoints and
    says `retired`."""
    # Imported here, since these modules load pydantic and only rank 0 needs them.
    from pipeline.checkpoints.attempts import attempt_from_json  # noqa: PLC0415
    from pipeline.checkpoints.commit import OvertakenError, commit, retire  # noqa: PLC0415

    store = store or open_store(order.url, was_let_in=True)
    try:
        newest = commit(store, order)
    except OvertakenError as error:
        say(SaveResult(save=order.save, what="overtaken", message=str(error)))
        return
    except _FAULTS as error:
        say(SaveResult(save=order.save, what="failed", message=f"manifest: {said_of(error, store.url)}"))
        return
    say(SaveResult(save=order.save, what="committed"))
    try:
        attempt = attempt_from_json(order.attempt.encode())
        retire(store, attempt=attempt, newest=newest, retention=order.retention)
    except _FAULTS as error:
        message = f"old checkpoints could not be deleted, so they stay and take up space: {error}"
        say(SaveResult(save=order.save, what="said", message=message))
    say(SaveResult(save=order.save, what="retired"))


def said_of(error: Exception, url: str) -> str:
    """Returns an error in a save as text for the log. If the disk is full or the file too large, the text says what to
    do."""
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        where = error.filename or url
        return f"{error.strerror} at {where}; make room there (a smaller --checkpoint.keep-newest needs less)"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return f"{error.strerror} at {error.filename or url}; {file_size_todo()}"
    return str(error)


class SharedBuffer:
    """The trainer's copy of its state in memory that both processes share: the rank file, byte by byte."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None
        self.pieces: tuple[Piece, ...] = ()

    def fit(self, order: BufferFit) -> Iterator[None]:
        """Maps the memory again, since its size or content has changed. It is a generator with a single step."""
        self._map = mmap.mmap(self._descriptor, order.num_bytes, prot=mmap.PROT_READ)
        self.pieces = order.pieces
        yield

    def parts(self) -> Iterable[memoryview]:
        """Returns all bytes. Raises OSError if no buffer was announced."""
        if self._map is None:
            raise OSError("no buffer was announced before the first save")
        return [memoryview(self._map)]

    def file(self) -> BinaryIO:
        """Opens the same bytes as a file, which has its own offset."""
        return Path(f"/proc/self/fd/{self._descriptor}").open("rb")


class Worker:
    """A thread that does one task after another. An unexpected error ends the process, which the trainer notices."""

    def __init__(self, *, niceness: int = 0) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._niceness = niceness
        threading.Thread(target=self._work, daemon=True).start()

    def do(self, task: Callable[[], None]) -> None:
        """Queues a task; the thread does it after all earlier ones."""
        self._tasks.put(task)

    def _work(self) -> None:
        if self._niceness:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        while True:
            task = self._tasks.get()
            try:
                task()
            except BaseException:
                traceback.print_exc()
                os._exit(1)


class Relay:
    """Takes the steps of a save's work in a thread with the lowest priority. Once the trainer waits for that save, a
    thread of normal priority takes the remaining steps, since a thread cannot raise its own priority again."""

    def __init__(self) -> None:
        self._low, self._normal = Worker(niceness=_LOWEST), Worker()
        self._hurried = 0  # the newest save that the trainer waits for

    def do(self, save: int, steps: Callable[[], Iterator[None]]) -> None:
        """Queues the steps of a save; they are taken after all earlier ones."""
        self._low.do(lambda: self._take(save, steps()))

    def hurry(self, save: int) -> None:
        """Notes that the trainer waits for this save."""
        self._hurried = save

    def _take(self, save: int, steps: Iterator[None]) -> None:
        is_over = False
        while not is_over and self._hurried < save:
            is_over = next(steps, _OVER) is _OVER
        if not is_over:
            rest_is_done = threading.Event()
            self._normal.do(lambda: _take_all(steps, rest_is_done))
            rest_is_done.wait()


def _take_all(steps: Iterator[None], is_done: threading.Event) -> None:
    for _ in steps:
        pass
    is_done.set()


class _Said(logging.Handler):
    """Sends warnings to the trainer, which logs them."""

    def __init__(self, say: Callable[[SaveResult], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Sends one record as a message."""
        self._say(SaveResult(save=0, what="said", message=record.getMessage()))


def serve(commands: int, answers: int, buffer: int) -> None:
    """Does what the trainer asks, until its pipe ends."""
    lock = threading.Lock()

    def say(answer: SaveResult) -> None:
        with lock:
            line = memoryview(to_line(answer))
            while line:
                line = line[os.write(answers, line) :]

    logging.getLogger().addHandler(_Said(say))
    shared, lines = SharedBuffer(buffer), LineSplitter()
    writes, commits = Relay(), Worker()
    while data := os.read(commands, _READ_BYTES):
        for line in lines.take(data):
            order = from_line(line)
            if isinstance(order, BufferFit):
                writes.do(_NO_SAVE, partial(shared.fit, order))
            elif isinstance(order, Write):
                writes.do(order.save, partial(do_write, order, shared, say))
            elif isinstance(order, Hurry):
                writes.hurry(order.save)
            elif isinstance(order, CommitOrder):
                commits.do(partial(do_commit, order, say))


def end_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends, whatever ends it. Exits at once if the parent has
    already ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def main(words: list[str]) -> None:
    """Serves one trainer, and ends when it does."""
    commands, answers, buffer, parent = map(int, words)
    end_with(parent)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        serve(commands, answers, buffer)
    os._exit(0)  # without waiting for a thread's work, which nobody would commit


if __name__ == "__main__":
    main(sys.argv[1:])
