"""A folder as a store: files are whole by a rename and durable by fsync."""

import errno
import io
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Self, TypeVar

from shards.errors import InvalidDataError, StorageError, UserError
from shards.storage.folder_walk import FolderWalk
from shards.storage.local_read import CountedFile, Result, read_again, read_exactly, read_exactly_into, read_whole
from shards.storage.objects import (
    MOST_OBJECT_BYTES,
    MissingObjectError,
    any_path,
    checked_path,
    folder_prefix,
)
from shards.storage.traffic import Traffic, TrafficCounts

Read = TypeVar("Read", bytes, memoryview)
STREAM_BYTES = 256 << 10
TEMPORARY_PREFIX = ".tmp-"
_TEMPORARY = re.compile(re.escape(TEMPORARY_PREFIX) + r"(.+)\.[0-9a-f]{16}", re.DOTALL)  # as `create` names them
_OPEN_TRIES = 5
# A retry fixes none of these. A full or failing disk (ENOSPC, EDQUOT, EIO) is not among them.
_MISTAKES = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL),
)
_WRONG_NAMES = (errno.ENAMETOOLONG, errno.ELOOP)


@dataclass(frozen=True)
class LocalStore:
    """Objects are files below the folder `url`, which the first write makes."""

    url: str
    traffic: Traffic = field(default_factory=Traffic, compare=False, repr=False)

    def fresh(self) -> "LocalStore":
        """This folder: files have no connections."""
        return self

    def with_traffic(self, traffic: Traffic) -> Self:
        """This folder, with other counters."""
        return replace(self, traffic=traffic)

    def read(self, path: str, *, most_bytes: int = MOST_OBJECT_BYTES, stop: threading.Event | None = None) -> bytes:
        """The whole file. InvalidDataError if it has more than `most_bytes`."""
        name = f"{self.url}/{path}"
        return self._read(path, lambda file: read_whole(file.fileno(), name=name, most_bytes=most_bytes), stop)

    def read_range(self, path: str, first: int, end: int, *, stop: threading.Event | None = None) -> bytes:
        """Bytes first..end-1; EOFError if the file is shorter."""
        return self._of_full_length(
            path, first, end, self._read(path, lambda file: read_exactly(file.fileno(), first, end), stop)
        )

    def read_into(
        self, path: str, first: int, end: int, take: Callable[[int], memoryview], *, stop: threading.Event | None = None
    ) -> memoryview:
        """Bytes first..end-1, into the memory that `take` returns; EOFError if the file is shorter."""
        view = take(end - first)
        read = self._read(path, lambda file: read_exactly_into(view, file.fileno(), first), stop)
        return self._of_full_length(path, first, end, read)

    def _of_full_length(self, path: str, first: int, end: int, data: Read) -> Read:
        if len(data) != end - first:
            raise EOFError(f"{self.url}/{path}: bytes {first}..{end - 1} asked, it ends at {first + len(data)}")
        return data

    def open_read(self, path: str) -> BinaryIO:
        """The file, open for reading."""
        return io.BufferedReader(self._again(path, lambda: self._open(path, self.traffic), None), STREAM_BYTES)

    def local_path(self, path: str) -> Path:
        """The file's path, whether it is there or not."""
        return self._file(path)

    def size(self, path: str) -> int:
        """Bytes of the file."""
        file = self._file(path)
        if not file.is_file():
            raise MissingObjectError(path, url=self.url)
        return file.stat().st_size

    def exists(self, path: str) -> bool:
        """Whether the file is there."""
        return self._file(path).is_file()

    def list(self, prefix: str = "") -> Iterator[str]:
        """All files below `prefix`; unfinished writes are not objects. Links are followed, but not in circles."""
        return _walk(os.fsencode(self._folder(prefix)) + b"/", folder_prefix(prefix), FolderWalk())

    def list_sizes(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """All files below `prefix` with their sizes, without those removed meanwhile."""
        root = Path(self.url)
        for path in self.list(prefix):
            try:
                yield path, (root / path).stat().st_size
            except FileNotFoundError:
                continue

    def write(self, path: str, data: bytes) -> None:
        """Write `data` under a temporary name and rename it."""
        with self.create(path) as file:
            file.write(data)

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        """Yields a temporary file in the same folder; it is synced and renamed if the block ends without an error."""
        target = self._file(path)
        temporary = target.with_name(f"{TEMPORARY_PREFIX}{target.name}.{secrets.token_hex(8)}")
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
                error.filename = str(target)  # a full disk does not say which file
            raise
        _sync_folder(target.parent)

    def upload(self, path: str, file: BinaryIO, *, progress: Callable[[], None]) -> None:
        """Copies the file, as `create` would be given its bytes."""
        with self.create(path) as target:
            while piece := file.read(STREAM_BYTES):
                target.write(piece)
                progress()

    def delete(self, path: str) -> None:
        """Removes the file if it is there, and folders that are empty then: S3 has no empty folders either."""
        file = self._file(path)
        file.unlink(missing_ok=True)
        for folder in file.parents[: len(Path(path).parts) - 1]:
            try:
                folder.rmdir()
            except OSError:  # not empty, or gone already
                return

    def discard_unfinished(self, is_ours: Callable[[str], bool] = any_path) -> None:
        """Removes the temporary files of killed writers."""
        for file in temporary_files(Path(self.url)):
            found = _TEMPORARY.fullmatch(file.name)
            if found and is_ours(file.with_name(found[1]).relative_to(self.url).as_posix()):
                file.unlink(missing_ok=True)

    def _read(self, path: str, read: Callable[[io.FileIO], Read], stop: threading.Event | None) -> Read:
        """The result of `read` for the open file; the read is counted."""
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
        return read_again(f"{self.url}/{path}", read, traffic=self.traffic, stop=stop)

    def _folder(self, prefix: str) -> Path:
        return Path(self.url, folder_prefix(prefix))

    def _file(self, path: str) -> Path:
        return Path(self.url) / checked_path(path.rstrip("/"))


def _open_new(temporary: Path, target: Path) -> BinaryIO:
    """The temporary file, its folder made; again if another process's `delete` removed the folder in between."""
    for number in range(_OPEN_TRIES):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            return temporary.open("xb")
        except OSError as error:
            if isinstance(error, FileNotFoundError) and number < _OPEN_TRIES - 1:
                continue
            if error.errno not in _MISTAKES:
                raise
            message = f"cannot write {target}: {error.strerror}; use a folder that this user may write to"
            raise UserError(message) from error
    raise AssertionError("unreachable: the last try returns or raises")


def _rename(temporary: Path, target: Path) -> None:
    try:
        temporary.replace(target)
    except FileNotFoundError as error:
        what = f"{target} was not written: its temporary file or its folder was removed meanwhile"
        raise StorageError(f"{what}; let only one command write there at a time") from error


def _walk(folder: bytes, root: str, walk: FolderWalk) -> Iterator[str]:
    try:
        with walk.inside(folder) as is_new:
            for raw_name in _sorted_names(folder) if is_new else ():
                name = os.fsdecode(raw_name)
                if name.endswith("/"):
                    yield from _walk(folder + raw_name, root + name, walk)
                else:
                    yield root + name
    except (FileNotFoundError, NotADirectoryError):  # it is not there, or has been removed meanwhile
        return


def temporary_files(folder: Path) -> Iterator[Path]:
    """What writers have not finished, below the folder; links are not followed. A folder that is removed meanwhile has
    none: Path.rglob of Python 3.11 fails on it."""
    for inside, _, names in os.walk(folder):
        yield from (Path(inside, name) for name in names if name.startswith(TEMPORARY_PREFIX))


def _sorted_names(folder: bytes) -> list[bytes]:
    """The names of a folder's files and folders; those of folders end with a slash.

    A folder sorts as "name/", so that "a-b" comes before "a/b" as in S3. They are bytes because names that are not
    UTF-8 sort differently as strings, and because millions of names take half the memory.
    """
    with os.scandir(folder) as found:
        names = [item.name + ending for item in found if (ending := _ending(item)) is not None]
    names.sort()
    return names


def _ending(item: os.DirEntry[bytes]) -> bytes | None:
    """A slash for a folder, nothing for a file, None for anything else (devices, broken links)."""
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
