"""Reading files: whole, counted, and repeated after faults that may pass."""

import errno
import io
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shards.errors import InvalidDataError, StorageError
from shards.storage.objects import too_large
from shards.storage.retries import ReadStoppedError, RequestRetries, RetryBudget, RetryConfig
from shards.storage.traffic import Traffic, TrafficCounts

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

log = logging.getLogger(__name__)
Result = TypeVar("Result")
RETRIES = RetryConfig()
_PASSING = (errno.EIO, errno.ESTALE)  # ESTALE: a network file system whose server was away


def read_again(what: str, read: Callable[[], Result], *, traffic: Traffic, stop: threading.Event | None) -> Result:
    """`read()`, repeated while its fault may pass; raises that fault once the deadline is over.

    ReadStoppedError once `stop` is set.
    """
    retries = None
    while True:
        try:
            return read()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            retries = retries or _retries(what, stop)
            try:
                retries.again_after_failure(str(error), is_answer=False)
            except StorageError as given_up:
                log.warning("%s", given_up)
                raise error from None
            log.info("reading %s failed: %s", what, error)
            traffic.add(TrafficCounts(retries=1))
        if stop and stop.is_set():
            raise ReadStoppedError(0)


def _retries(what: str, stop: threading.Event | None) -> RequestRetries:
    budget = RetryBudget(RETRIES)
    budget.has_answered = True  # a wrong path raises other errors
    return RequestRetries(what, budget, pause=stop.wait if stop else time.sleep)


def read_exactly(descriptor: int, first: int, end: int) -> bytes:
    """Bytes first..end-1, fewer only at the file's end. One pread returns at most 2 GiB, and may return less on a
    network file system."""
    pieces = [os.pread(descriptor, end - first, first)]
    position = first + len(pieces[0])
    while pieces[-1] and position < end:
        pieces.append(os.pread(descriptor, end - position, position))
        position += len(pieces[-1])
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def read_exactly_into(view: memoryview, descriptor: int, first: int) -> memoryview:
    """As many bytes as the memory has from `first` on, fewer only at the file's end."""
    num_bytes = 0
    while num_bytes < len(view) and (count := os.preadv(descriptor, [view[num_bytes:]], first + num_bytes)):
        num_bytes += count
    return view[:num_bytes]


def read_whole(descriptor: int, *, name: str, most_bytes: int) -> bytes:
    """The file up to its end, which may grow or not say its size. InvalidDataError if it has more than `most_bytes`."""
    num_bytes = os.fstat(descriptor).st_size
    data = b"" if num_bytes > most_bytes else read_exactly(descriptor, 0, num_bytes + 1)
    if len(data) > num_bytes:
        data += read_exactly(descriptor, len(data), most_bytes + 1)
    if max(num_bytes, len(data)) > most_bytes:
        raise InvalidDataError(too_large(name, most_bytes))
    return data


def open_regular(name: str, flags: int) -> int:
    """An opener for `open`: the descriptor of a regular file, whatever links lead to it.

    Raises InvalidDataError for a pipe, a socket or a device: a pipe could block for ever, a device never end.
    """
    what = f"{name} is not a regular file; give a file, not a pipe or a device"
    try:
        descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise InvalidDataError(what) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    raise InvalidDataError(what)


class CountedFile(io.FileIO):
    """A file open for reading; `traffic` counts it as one read when it is closed."""

    def __init__(self, file: Path, traffic: Traffic | None = None) -> None:
        self._traffic: Traffic | None = None  # nothing is counted if the file cannot be opened
        super().__init__(file, opener=open_regular)
        self._traffic, self._num_bytes, self._seconds = traffic, 0, 0.0

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        """Does what FileIO's method does."""
        began = time.perf_counter()
        count = super().readinto(buffer) or 0
        self._add(count, began)
        return count

    def readall(self) -> bytes:
        """Does what FileIO's method does."""
        began = time.perf_counter()
        data = super().readall()
        self._add(len(data), began)
        return data

    def close(self) -> None:
        """Does what FileIO's method does."""
        super().close()
        traffic, self._traffic = self._traffic, None
        if traffic:
            traffic.add(TrafficCounts(requests=1, bytes=self._num_bytes, seconds=self._seconds))

    def _add(self, count: int, began: float) -> None:
        self._num_bytes += count
        self._seconds += time.perf_counter() - began
