"""A folder as a store, and the functions that read its files.

A file is written under a temporary name, synced and renamed, so that it is either whole or absent. Reads are retried
after disk errors that may pass. A walk through folders ends even if links form a circle.
"""

import errno
import io
import logging
import os
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self, TypeVar

from shards.errors import PASSING_FAULTS, InvalidDataError, StorageError, UserError
from shards.output.terminal import printable_name
from shards.storage.objects import (
    MOST_OBJECT_BYTES,
    MissingObjectError,
    Traffic,
    TrafficCounts,
    any_path,
    checked_path,
    folder_prefix,
    too_large,
)
from shards.storage.retries import ReadStoppedError, RequestRetries, RetryBudget, RetryConfig, Silence

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

log = logging.getLogger(__name__)
MOST_DEPTH = 100  # how deep folders may be nested
MOST_WAYS = 16  # how many times links may lead to one folder: several classes may share its images
Identity = tuple[int, int]  # device and inode
Result = TypeVar("Result")
RETRIES = RetryConfig()
Read = TypeVar("Read", bytes, memoryview)
STREAM_BYTES = 256 << 10
TEMPORARY_PREFIX = ".tmp-"
_TEMPORARY = re.compile(re.escape(TEMPORARY_PREFIX) + r"(.+)\.[0-9a-f]{16}", re.DOTALL)  # as `create` names them
_OPEN_TRIES = 5
# Errors that no retry fixes. A full or failing disk (ENOSPC, EDQUOT, EIO) is not among them.
_MISTAKES = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL),
)
_WRONG_NAMES = (errno.ENAMETOOLONG, errno.ELOOP)


class FolderWalk:
    """The folders that a walk is in, and how many times links have led the walk to each folder.

    The counts are needed because links multiply: 40 folders, each with two links to the next one, would be listed as a
    trillion folders.
    """

    def __init__(self) -> None:
        self._inside: list[Identity] = []
        self._num_links = 0  # how many of the folders in `_inside` are links
        self._ways: Counter[Identity] = Counter()

    @contextmanager
    def inside(self, folder: bytes) -> Iterator[bool]:
        """Enters `folder` for the length of the block. Yields False if the folder must be left out, and logs the
        reason.

        Raises UserError if folders are nested deeper than MOST_DEPTH, and OSError if there is no such folder.
        """
        if len(self._inside) > MOST_DEPTH:
            what = f"{_shown(folder)} is nested more than {MOST_DEPTH} folders deep"
            raise UserError(what, allowed=str(MOST_DEPTH), todo="move it up, or remove the link that leads there")
        status = _again_at(folder, lambda: os.lstat(folder.rstrip(b"/") or b"/"))
        if is_link := stat.S_ISLNK(status.st_mode):
            # Names are bytes, since they need not be UTF-8.
            status = _again_at(folder, lambda: os.stat(folder))  # noqa: PTH116
        identity = status.st_dev, status.st_ino
        if reason := self._refusal(identity, is_below_link=is_link or self._num_links > 0):
            log.warning("%s %s; it is not followed", _shown(folder), reason)
            yield False
            return
        self._inside.append(identity)
        self._num_links += is_link
        try:
            yield True
        finally:
            self._inside.pop()
            self._num_links -= is_link

    def _refusal(self, identity: Identity, *, is_below_link: bool) -> str:
        if identity in self._inside:
            return "leads back to a folder that contains it"
        if not is_below_link:
            return ""
        self._ways[identity] += 1
        is_too_often = self._ways[identity] > MOST_WAYS
        return f"is a folder to which links have led {MOST_WAYS} times already" if is_too_often else ""


def _shown(folder: bytes) -> str:
    return printable_name(os.fsdecode(folder))


def read_again(
    what: str,
    read: Callable[[], Result],
    *,
    traffic: Traffic,
    stop: threading.Event | None,
    silence: Silence | None = None,
) -> Result:
    """Returns what `read()` returns. Calls it again while it fails with an error that may pass. `silence`: that of all
    reads of a store, which give up together; None: this read's own.

    Raises the error, with `what` as its path if it has none, once the deadline has passed, and ReadStoppedError once
    `stop` is set. Logs a warning after a minute.
    """
    retries = None
    while True:
        try:
            found = read()
        except OSError as error:
            if error.errno not in PASSING_FAULTS:
                raise
            if retries is None:
                budget = RetryBudget(RETRIES, silence)
                budget.has_answered = True  # retry until the deadline: a wrong path raises other errors
                retries = RequestRetries(what, budget, pause=stop.wait if stop else time.sleep)
            try:
                retries.again_after_failure(error.strerror or str(error), is_answer=False)
            except StorageError as given_up:
                log.warning("%s", given_up)
                error.filename = error.filename or what  # errors of reads have no path
                raise error from None
            log.info("reading %s failed: %s", what, error)
            traffic.add(TrafficCounts(retries=1))
        else:
            if silence:
                silence.received()
            return found
        if stop and stop.is_set():
            raise ReadStoppedError(0)


def _again_at(folder: bytes, look: Callable[[], Result]) -> Result:
    return read_again(os.fsdecode(folder), look, traffic=Traffic(), stop=None)


def read_exactly(descriptor: int, first: int, end: int) -> bytes:
    """Reads bytes first..end-1, or fewer at the file's end. One pread returns at most 2 GiB, and a network file system
    may return less."""
    pieces = [os.pread(descriptor, end - first, first)]
    position = first + len(pieces[0])
    while pieces[-1] and position < end:
        pieces.append(os.pread(descriptor, end - position, position))
        position += len(pieces[-1])
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def read_exactly_into(view: memoryview, descriptor: int, first: int) -> memoryview:
    """Fills `view` with the bytes from `first` on, and returns the filled part: all of it, unless the file ends
    earlier."""
    num_bytes = 0
    while num_bytes < len(view) and (count := os.preadv(descriptor, [view[num_bytes:]], first + num_bytes)):
        num_bytes += count
    return view[:num_bytes]


def read_whole(descriptor: int, *, name: str, most_bytes: int) -> bytes:
    """Reads a file to its end, even if the file is growing or does not report its size. Raises InvalidDataError if it
    has more than `most_bytes`."""
    num_bytes = os.fstat(descriptor).st_size
    data = b"" if num_bytes > most_bytes else read_exactly(descriptor, 0, num_bytes + 1)
    if len(data) > num_bytes:
        data += read_exactly(descriptor, len(data), most_bytes + 1)
    if max(num_bytes, len(data)) > most_bytes:
        raise InvalidDataError(too_large(name, most_bytes))
    return data


def open_regular(name: str, flags: int) -> int:
    """Opens a regular file, following links. It can be the `opener` of `open`.

    Raises IsADirectoryError for a folder, and InvalidDataError for a pipe, a socket or a device: a pipe could block
    forever, and a device may have no end.
    """
    what, todo = f"{name} is not a regular file", "give a file, not a pipe or a device"
    try:
        descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise InvalidDataError(what, todo=todo) from None
        raise
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        os.close(descriptor)
        raise
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    raise InvalidDataError(what, todo=todo)


class CountedFile(io.FileIO):
    """A file open for reading. When it is closed, it is counted as one read in `traffic`."""

    def __init__(self, file: Path, traffic: Traffic | None = None) -> None:
        self._traffic: Traffic | None = None  # nothing is counted if the file cannot be opened
        super().__init__(file, opener=open_regular)
        self._traffic, self._num_bytes, self._seconds = traffic, 0, 0.0

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        """Reads into `buffer`, and counts the bytes and the time."""
        began = time.perf_counter()
        count = super().readinto(buffer) or 0
        self._add(count, began)
        return count

    def readall(self) -> bytes:
        """Reads to the end of the file, and counts the bytes and the time."""
        began = time.perf_counter()
        data = super().readall()
        self._add(len(data), began)
        return data

    def close(self) -> None:
        """Closes the file, and adds the read to `traffic`."""
        super().close()
        traffic, self._traffic = self._traffic, None
        if traffic:
            traffic.add(TrafficCounts(requests=1, bytes=self._num_bytes, seconds=self._seconds))

    def _add(self, count: int, began: float) -> None:
        self._num_bytes += count
        self._seconds += time.perf_counter() - began


@dataclass(frozen=True)
class LocalStore:
    """A store whose objects are files below the folder `url`. The first write creates the folder."""

    url: str
    traffic: Traffic = field(default_factory=Traffic, compare=False, repr=False)
    silence: Silence = field(default_factory=Silence, compare=False, repr=False)

    def fresh(self) -> "LocalStore":
        """Returns this store itself, because files have no connections."""
        return self

    def with_traffic(self, traffic: Traffic) -> Self:
        """Returns a store of the same folder with other counters."""
        return replace(self, traffic=traffic)

    def read(self, path: str, *, most_bytes: int = MOST_OBJECT_BYTES, stop: threading.Event | None = None) -> bytes:
        """Reads the whole file. Raises InvalidDataError if it has more than `most_bytes`."""
        name = f"{self.url}/{path}"
        return self._read(path, lambda file: read_whole(file.fileno(), name=name, most_bytes=most_bytes), stop)

    def read_range(self, path: str, first: int, end: int, *, stop: threading.Event | None = None) -> bytes:
        """Reads bytes first..end-1. Raises EOFError if the file is shorter."""
        return self._of_full_length(
            path, first, end, self._read(path, lambda file: read_exactly(file.fileno(), first, end), stop)
        )

    def read_into(
        self, path: str, first: int, end: int, take: Callable[[int], memoryview], *, stop: threading.Event | None = None
    ) -> memoryview:
        """Reads bytes first..end-1 into the memory that `take` returns. Raises EOFError if the file is shorter."""
        view = take(end - first)
        read = self._read(path, lambda file: read_exactly_into(view, file.fileno(), first), stop)
        return self._of_full_length(path, first, end, read)

    def _of_full_length(self, path: str, first: int, end: int, data: Read) -> Read:
        if len(data) != end - first:
            raise EOFError(f"{self.url}/{path}: bytes {first}..{end - 1} asked, it ends at {first + len(data)}")
        return data

    def open_read(self, path: str) -> BinaryIO:
        """Opens the file for reading."""
        return io.BufferedReader(self._again(path, lambda: self._open(path, self.traffic), None), STREAM_BYTES)

    def local_path(self, path: str) -> Path:
        """Returns the file's path, even if there is no such file."""
        return self._file(path)

    def size(self, path: str) -> int:
        """Returns the number of bytes of the file."""
        file = self._file(path)
        if not self.exists(path):
            raise MissingObjectError(path, url=self.url)
        return self._again(path, lambda: file.stat().st_size, None)

    def exists(self, path: str) -> bool:
        """Returns whether the file exists."""
        return self._again(path, self._file(path).is_file, None)

    def list(self, prefix: str = "") -> Iterator[str]:
        """Yields all files below `prefix`, without unfinished writes. Links are followed, but not in circles."""
        return _walk(os.fsencode(self._folder(prefix)) + b"/", folder_prefix(prefix), FolderWalk())

    def list_sizes(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Yields all files below `prefix` with their sizes, leaving out files that are removed during the listing."""
        root = Path(self.url)
        for path in self.list(prefix):
            try:
                yield path, self._again(path, (root / path).stat, None).st_size
            except FileNotFoundError:
                continue

    def write(self, path: str, data: bytes) -> None:
        """Writes `data` under a temporary name and renames the file."""
        with self.create(path) as file:
            file.write(data)

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        """Yields a temporary file in the same folder; it is synced and renamed if the block ends without an error."""
        target = self._file(path)
        temporary = target.with_name(f"{TEMPORARY_PREFIX}{target.name}.{os.urandom(8).hex()}")
        file = _open_new(temporary, target)
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            _rename(temporary, target)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(target)  # the error of a full disk does not name the file
            raise
        _sync_folder(target.parent)

    def upload(self, path: str, file: BinaryIO, *, progress: Callable[[], None]) -> None:
        """Copies the file to the object, in the same way as `create`."""
        with self.create(path) as target:
            while piece := file.read(STREAM_BYTES):
                target.write(piece)
                progress()

    def delete(self, path: str) -> None:
        """Removes the file if it exists, and the folders that this leaves empty, because S3 has no empty folders
        either."""
        file = self._file(path)
        file.unlink(missing_ok=True)
        for folder in file.parents[: len(Path(path).parts) - 1]:
            try:
                folder.rmdir()
            except OSError:  # not empty, or gone already
                return

    def discard_unfinished(self, is_ours: Callable[[str], bool] = any_path) -> None:
        """Removes the temporary files that killed writers have left."""
        for file in temporary_files(Path(self.url)):
            found = _TEMPORARY.fullmatch(file.name)
            if found and is_ours(file.with_name(found[1]).relative_to(self.url).as_posix()):
                file.unlink(missing_ok=True)

    def _read(self, path: str, read: Callable[[io.FileIO], Read], stop: threading.Event | None) -> Read:
        """Returns the result of `read` for the open file, and counts the read."""
        began, num_bytes = time.perf_counter(), 0

        def opened_and_read() -> Read:
            with self._open(path) as file:
                return read(file)

        try:
            data = self._again(path, opened_and_read, stop)
            num_bytes = len(data)
        finally:
            self.traffic.add(TrafficCounts(requests=1, bytes=num_bytes, seconds=time.perf_counter() - began))
        return data

    def _open(self, path: str, traffic: Traffic | None = None) -> CountedFile:
        try:
            return CountedFile(self._file(path), traffic)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise MissingObjectError(path, url=self.url) from None
        except OSError as error:
            if error.errno not in _WRONG_NAMES:
                raise
            raise InvalidDataError(f"{self.url}/{path} cannot be opened: {error.strerror}") from error

    def _again(self, path: str, read: Callable[[], Result], stop: threading.Event | None) -> Result:
        return read_again(f"{self.url}/{path}", read, traffic=self.traffic, stop=stop, silence=self.silence)

    def _folder(self, prefix: str) -> Path:
        return Path(self.url, folder_prefix(prefix))

    def _file(self, path: str) -> Path:
        return Path(self.url) / checked_path(path.rstrip("/"))


def _open_new(temporary: Path, target: Path) -> BinaryIO:
    """Creates the folder and opens the temporary file in it. Tries again if the `delete` of another process removes the
    folder in between."""
    for number in range(_OPEN_TRIES):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            return temporary.open("xb")
        except OSError as error:
            if isinstance(error, FileNotFoundError) and number < _OPEN_TRIES - 1:
                continue
            if error.errno not in _MISTAKES:
                raise
            what = f"cannot write {target}: {error.strerror}"
            raise UserError(what, todo="use a folder that this user may write to") from error
    raise AssertionError("unreachable: the last try returns or raises")


def _rename(temporary: Path, target: Path) -> None:
    try:
        temporary.replace(target)
    except FileNotFoundError as error:
        what = f"{target} was not written: its temporary file or its folder was removed meanwhile"
        raise StorageError(what, todo="let only one command write there at a time") from error


def _walk(folder: bytes, root: str, walk: FolderWalk) -> Iterator[str]:
    try:
        with walk.inside(folder) as is_new:
            for raw_name in _again_at(folder, lambda: _sorted_names(folder)) if is_new else ():
                name = os.fsdecode(raw_name)
                if name.endswith("/"):
                    yield from _walk(folder + raw_name, root + name, walk)
                else:
                    yield root + name
    except (FileNotFoundError, NotADirectoryError):  # the folder does not exist, or has just been removed
        return


def temporary_files(folder: Path) -> Iterator[Path]:
    """Yields the files below the folder that writers have not finished. Links are not followed. Folders that are
    removed during the walk are skipped; Path.rglob of Python 3.11 would fail on them."""
    for inside, _, names in os.walk(folder):
        yield from (Path(inside, name) for name in names if name.startswith(TEMPORARY_PREFIX))


def _sorted_names(folder: bytes) -> list[bytes]:
    """Returns the names of a folder's files and folders; those of folders end with a slash.

    A folder sorts as "name/", so that "a-b" comes before "a/b" as in S3. Names are bytes because names that are not
    UTF-8 sort differently as strings, and because millions of bytes objects take half the memory.
    """
    with os.scandir(folder) as found:
        names = [item.name + ending for item in found if (ending := _ending(item)) is not None]
    names.sort()
    return names


def _ending(item: os.DirEntry[bytes]) -> bytes | None:
    """Returns a slash for a folder, b"" for a file, and None for unfinished writes and anything else (devices, broken
    links)."""
    if item.name.startswith(TEMPORARY_PREFIX.encode()):
        return None
    try:
        return b"/" if item.is_dir() else b"" if item.is_file() else None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
