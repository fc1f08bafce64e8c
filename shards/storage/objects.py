"""The interface of all stores, whether a folder or an S3 bucket, and the counters of their reads."""

import io
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

from shards.errors import PrintableError
from shards.output.terminal import printable_name
from shards.storage.fork_lock import ForkLock

MOST_OBJECT_BYTES = 1 << 30  # objects with more are not read whole; callers may set a smaller limit


@dataclass(frozen=True, kw_only=True)
class TrafficCounts:
    """Sums over the reads since the counters were created. `seconds` is the time of all reads; concurrent reads add
    up."""

    requests: int = 0  # reads that have ended; retries, hedges and stopped reads of a bucket are not counted
    bytes: int = 0  # the bytes that these reads returned; wasted bytes are not counted
    seconds: float = 0.0
    retries: int = 0  # requests repeated for any reason, including broken bodies
    broken_bodies: int = 0
    throttled: int = 0  # answers with status 429 or 503
    hedges: int = 0  # second requests for slow reads
    hedges_won: int = 0
    wasted_bytes: int = 0  # bytes of requests that came too late: another request had delivered them

    def __sub__(self, earlier: "TrafficCounts") -> "TrafficCounts":
        before = asdict(earlier)
        return TrafficCounts(**{name: value - before[name] for name, value in asdict(self).items()})


class Traffic:
    """The counters of a store in this process, or of one of its readers (`Store.with_traffic`). Any thread may add to
    them."""

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._listeners: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._sums: dict[str, Any] = asdict(TrafficCounts())

    def __reduce__(self) -> tuple[type["Traffic"], tuple[()]]:
        return type(self), ()

    def add(self, more: TrafficCounts) -> None:
        """Adds to every count. Calls the listeners if the storage has asked for fewer requests."""
        with self._lock:
            for name, value in vars(more).items():
                self._sums[name] += value
        for listener in self._listeners if more.throttled else ():
            if told := listener():
                told()

    def on_throttle(self, listener: Callable[[], None]) -> None:
        """Calls the method `listener` whenever the storage asks for fewer requests, as long as the method's object
        lives."""
        living = [known for known in self._listeners if known()]
        self._listeners = [*living, weakref.WeakMethod(listener)]

    def counts(self) -> TrafficCounts:
        """Returns the sums so far."""
        with self._lock:
            return TrafficCounts(**self._sums)


class MissingObjectError(PrintableError):
    """There is no object at this path of this store."""

    def __init__(self, path: str, *, url: str = "") -> None:
        super().__init__(f"no object {path!r} in {printable_name(url) or 'the store'}")
        self.path, self.url = path, url

    def __reduce__(self) -> tuple[type["MissingObjectError"], tuple[str]]:
        # Processes of a pool return their errors pickled, and a keyword-only argument would be lost.
        return type(self), (self.path,)


def any_path(path: str) -> bool:  # noqa: ARG001
    """Returns True for every path."""
    return True


class Readable(Protocol):
    """The part of a store that reading a dataset needs."""

    @property
    def url(self) -> str: ...

    def read(self, path: str) -> bytes:
        """Reads the whole object. Raises MissingObjectError, and InvalidDataError for more than MOST_OBJECT_BYTES."""
        ...

    def read_range(self, path: str, first: int, end: int) -> bytes:
        """Reads exactly the bytes first..end-1. Raises MissingObjectError, and EOFError if the object is shorter."""
        ...


class Store(Protocol):
    """Objects at relative paths below one root. An object that is being written is either whole or absent."""

    @property
    def url(self) -> str: ...

    @property
    def traffic(self) -> Traffic:
        """The counters of the reads in this process."""
        ...

    def fresh(self) -> "Store":
        """Returns a store of the same objects that opens a new connection for each read. It is used for the second
        request of a slow read."""
        ...

    def with_traffic(self, traffic: Traffic) -> "Store":
        """Returns a store of the same objects over the same connections, whose reads are counted in `traffic` alone."""
        ...

    def read(self, path: str, *, most_bytes: int = MOST_OBJECT_BYTES, stop: threading.Event | None = None) -> bytes:
        """Reads the whole object.

        Raises MissingObjectError, InvalidDataError if the object has more than `most_bytes` or is not a regular file,
        and ReadStoppedError at the next byte or timeout once `stop` is set. For a folder, `stop` is checked only
        between retries after a disk error, because reading a file takes little time.
        """
        ...

    def read_range(self, path: str, first: int, end: int, *, stop: threading.Event | None = None) -> bytes:
        """Reads exactly the bytes first..end-1. Raises the errors of `read`, and EOFError if the object is shorter."""
        ...

    def read_into(
        self, path: str, first: int, end: int, take: Callable[[int], memoryview], *, stop: threading.Event | None = None
    ) -> memoryview:
        """Does the same as `read_range`, but reads into the memory that `take(num_bytes)` returns. At least one byte
        must be requested."""
        ...

    def open_read(self, path: str) -> AbstractContextManager[BinaryIO]:
        """Opens the object as a stream, which needs little memory even for a large object. Raises MissingObjectError.

        `read(n)` returns n bytes, or fewer at the end. The stream cannot seek; `tarfile` reads it with mode "r|".
        """
        ...

    def local_path(self, path: str) -> Path | None:
        """Returns the path of the object's file, for mapping into memory, or None if the store has no files."""
        ...

    def size(self, path: str) -> int:
        """Returns the number of bytes of the object. Raises MissingObjectError."""
        ...

    def exists(self, path: str) -> bool: ...

    def list(self, prefix: str = "") -> Iterator[str]:
        """Yields the paths of all objects below the folder `prefix`, relative to the store's root, sorted by their
        UTF-8 bytes.

        Keys of a bucket that are not plain paths ("a//b", "a/../b", "folder/") are listed as they are; reading them is
        refused. Only one page of a bucket, or the names of one folder, is in memory at a time.
        """
        ...

    def list_sizes(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Yields the same paths as `list`, each with the object's number of bytes."""
        ...

    def write(self, path: str, data: bytes) -> None: ...

    def create(self, path: str) -> AbstractContextManager[BinaryIO]:
        """Yields a file to write to. The object appears, whole, when the block ends without an error."""
        ...

    def upload(self, path: str, file: BinaryIO, *, progress: Callable[[], None]) -> None:
        """Writes an object from a seekable file, without copying the file first. `progress` is called from time to
        time, in any thread."""
        ...

    def delete(self, path: str) -> None:
        """Removes the object if it exists."""
        ...

    def discard_unfinished(self, is_ours: Callable[[str], bool] = any_path) -> None:
        """Removes what interrupted writes have left below this root, for the paths that `is_ours` accepts.

        Call it only while nobody else writes such objects below this root.
        """
        ...


def folder_prefix(folder: str) -> str:
    """Returns the prefix of all paths below a folder: "" for the root, `FOLDER/` for others. Raises ValueError for a
    path that `checked_path` refuses."""
    name = folder.strip("/")
    return f"{checked_path(name)}/" if name else ""


def checked_path(path: str) -> str:
    """Returns `path` itself. Raises ValueError if it could lead out of the store or has a second spelling."""
    parts = path.split("/")
    if "" in parts[1:-1] and not path.startswith("/"):
        part = f"the one between the two slashes after {path.partition('//')[0]!r}"
        what = f"object path {path!r} is not a plain relative path: it has an empty part, {part}"
        raise ValueError(f"{what}; copy it to a name without //")
    if not path or path.startswith("/") or any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise ValueError(f"object path {path!r} is not a plain relative path: use NAME or FOLDER/NAME, no ..")
    return str(PurePosixPath(path))


def too_large(name: str, most_bytes: int) -> str:
    """Returns the message for an object that has more bytes than its reader allows."""
    return f"{name} is larger than {most_bytes:,} bytes, the most that are read of such a file"


class StoreFile(io.RawIOBase):
    """An object as a seekable file, for readers that need few of its bytes (Parquet row groups). Nothing is cached.

    Parquet readers must set `use_threads=False`: if an Arrow thread releases a Python file while the interpreter exits,
    the process is aborted (SIGABRT), even though all its work is done.
    """

    def __init__(self, store: Store, path: str) -> None:
        super().__init__()
        self._store, self._path = store, path
        self._size, self._position = store.size(path), 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """Returns the position of the next byte to be read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves to another byte of the object, and returns its offset."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = min(max(base + offset, 0), self._size)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Reads up to `size` bytes, or all that are left if `size` is negative or None."""
        left = self._size - self._position
        count = left if size is None or size < 0 else min(size, left)
        data = self._store.read_range(self._path, self._position, self._position + count) if count else b""
        self._position += count
        return data
