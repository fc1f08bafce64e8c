"""A folder as a store: whole files by rename, durable by fsync."""

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
from typing import BinaryIO, Self

from shards.errors import UserError
from shards.storage.local_read import CountedFile, Result, read_again, read_exactly
from shards.storage.objects import MissingObjectError, any_path, checked_path, folder_prefix
from shards.storage.traffic import Traffic, TrafficCounts

STREAM_BYTES = 256 << 10
TEMPORARY_PREFIX = ".tmp-"
_TEMPORARY = re.compile(re.escape(TEMPORARY_PREFIX) + r"(.+)\.[0-9a-f]{16}", re.DOTALL)  # as `create` names them
_OPEN_TRIES = 5
# Trying again mends none of these. A full disk or one that fails (ENOSPC, EDQUOT, EIO) is not among them.
_MISTAKES = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL),
)


@dataclass(frozen=True)
class LocalStore:
    """Objects are files below the folder `url`, which is made on the first write."""

    url: str
    traffic: Traffic = field(default_factory=Traffic, compare=False, repr=False)
    stop: threading.Event | None = field(default=None, compare=False, repr=False)

    def fresh(self) -> "LocalStore":
        """This folder: files have no connections."""
        return self

    def with_traffic(self, traffic: Traffic) -> Self:
        """This folder, with other counters."""
        return replace(self, traffic=traffic)

    def stopped_by(self, event: threading.Event) -> Self:
        """This folder, whose reads stop waiting for a disk that fails once `event` is set."""
        return replace(self, stop=event)

    def read(self, path: str) -> bytes:
        """The whole file."""
        return self._read(path, lambda file: file.readall())

    def read_range(self, path: str, first: int, end: int) -> bytes:
        """Bytes first..end-1; EOFError where the file is shorter."""
        data = self._read(path, lambda file: read_exactly(file.fileno(), first, end))
        if len(data) != end - first:
            raise EOFError(f"{self.url}/{path}: bytes {first}..{end - 1} asked, it ends at {first + len(data)}")
        return data

    def open_read(self, path: str) -> BinaryIO:
        """The file, open for reading."""
        return io.BufferedReader(self._again(path, lambda: self._open(path, self.traffic)), STREAM_BYTES)

    def local_path(self, path: str) -> Path:
        """Where the file lies, or would lie."""
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
        """All files below `prefix`; unfinished writes are not objects."""
        return _walk(self._folder(prefix), folder_prefix(prefix))

    def list_sizes(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """All files below `prefix` with their sizes; one that is removed meanwhile is left out."""
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
        """Yield a temporary file of the same folder; synced and renamed when the block ends well."""
        target = self._file(path)
        temporary = target.with_name(f"{TEMPORARY_PREFIX}{target.name}.{secrets.token_hex(8)}")
        file = _open_new(temporary, target)
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(target)  # a full disk does not say which file
            raise
        _sync_folder(target.parent)

    def delete(self, path: str) -> None:
        """Remove the file if it is there, and the folders that it leaves empty: S3 has no empty folders either."""
        file = self._file(path)
        file.unlink(missing_ok=True)
        for folder in file.parents[: len(Path(path).parts) - 1]:
            try:
                folder.rmdir()
            except OSError:  # not empty, or gone already
                return

    def discard_unfinished(self, is_ours: Callable[[str], bool] = any_path) -> None:
        """Remove temporary files that killed writers left."""
        for file in Path(self.url).rglob(f"{TEMPORARY_PREFIX}*"):
            found = _TEMPORARY.fullmatch(file.name)
            if found and is_ours(file.with_name(found[1]).relative_to(self.url).as_posix()):
                file.unlink(missing_ok=True)

    def _read(self, path: str, read: Callable[[io.FileIO], bytes]) -> bytes:
        """What `read` gives for the open file, counted."""
        began, data = time.perf_counter(), b""

        def opened_and_read() -> bytes:
            with self._open(path) as file:
                return read(file)

        try:
            data = self._again(path, opened_and_read)
        finally:
            self.traffic.add(TrafficCounts(requests=1, bytes=len(data), seconds=time.perf_counter() - began))
        return data

    def _open(self, path: str, traffic: Traffic | None = None) -> CountedFile:
        try:
            return CountedFile(self._file(path), traffic)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise MissingObjectError(path, url=self.url) from None

    def _again(self, path: str, read: Callable[[], Result]) -> Result:
        return read_again(f"{self.url}/{path}", read, traffic=self.traffic, stop=self.stop)

    def _folder(self, prefix: str) -> Path:
        return Path(self.url, folder_prefix(prefix))

    def _file(self, path: str) -> Path:
        return Path(self.url) / checked_path(path.rstrip("/"))


def _open_new(temporary: Path, target: Path) -> BinaryIO:
    """The temporary file, its folder made; once more where another process's `delete` took the folder in between."""
    for attempt in range(_OPEN_TRIES):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            return temporary.open("xb")
        except OSError as error:
            if isinstance(error, FileNotFoundError) and attempt < _OPEN_TRIES - 1:
                continue
            if error.errno not in _MISTAKES:
                raise
            message = f"cannot write {target}: {error.strerror}; use a folder that this user may write to"
            raise UserError(message) from error
    raise AssertionError("unreachable: the last try returns or raises")


def _walk(folder: Path, root: str) -> Iterator[str]:
    for raw_name in _sorted_names(folder):
        name = os.fsdecode(raw_name)
        if name.endswith("/"):
            yield from _walk(folder / name, root + name)
        else:
            yield root + name


def _sorted_names(folder: Path) -> list[bytes]:
    """The names of a folder's files and, with a slash behind each, of its folders.

    A folder sorts as "name/", so that "a-b" comes before "a/b" as it does in S3. Bytes, because a name that is not
    UTF-8 sorts elsewhere as a string, and because millions of them take half the memory.
    """
    try:
        with os.scandir(os.fsencode(folder)) as found:
            names = [item.name + ending for item in found if (ending := _ending(item)) is not None]
    except (FileNotFoundError, NotADirectoryError):
        return []
    names.sort()
    return names


def _ending(item: os.DirEntry[bytes]) -> bytes | None:
    """A slash for a folder, nothing for a file; None for what is no object: devices, and links that lead nowhere."""
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
