"""A folder as a store: whole files by rename, durable by fsync."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shards.errors import UserError
from shards.objects import MissingObjectError, checked_path

TEMPORARY_PREFIX = ".tmp-"
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

    def read(self, path: str) -> bytes:
        """The whole file."""
        try:
            return self._file(path).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise MissingObjectError(path, url=self.url) from None

    def read_range(self, path: str, first: int, end: int) -> bytes:
        """Bytes first..end-1; EOFError where the file is shorter."""
        try:
            with self._file(path).open("rb", buffering=0) as file:
                data = _read_exactly(file.fileno(), first, end)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise MissingObjectError(path, url=self.url) from None
        if len(data) != end - first:
            raise EOFError(f"{self.url}/{path}: bytes {first}..{end - 1} asked, it ends at {first + len(data)}")
        return data

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
        """All files below `prefix`, sorted as S3 sorts keys; unfinished writes are not objects."""
        folder = self._file(prefix) if prefix.strip("/") else Path(self.url)
        root = prefix.strip("/") + "/" if prefix.strip("/") else ""
        return _walk(folder, root)

    def write(self, path: str, data: bytes) -> None:
        """Write `data` under a temporary name and rename it."""
        with self.create(path) as file:
            file.write(data)

    def write_file(self, path: str, local_file: Path) -> None:
        """Copy a file in."""
        with self.create(path) as target, local_file.open("rb") as source:
            shutil.copyfileobj(source, target, 1 << 20)

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
        except BaseException:
            temporary.unlink(missing_ok=True)
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

    def discard_unfinished(self) -> None:
        """Remove temporary files that killed writers left."""
        for file in Path(self.url).rglob(f"{TEMPORARY_PREFIX}*"):
            file.unlink(missing_ok=True)

    def child(self, prefix: str) -> "LocalStore":
        """The store whose root is the folder `prefix` of this one."""
        return LocalStore(str(self._file(prefix.strip("/"))))

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


def _read_exactly(descriptor: int, first: int, end: int) -> bytes:
    # One pread gives at most 2 GiB, and may give less on network file systems.
    pieces = [os.pread(descriptor, end - first, first)]
    position = first + len(pieces[0])
    while pieces[-1] and position < end:
        pieces.append(os.pread(descriptor, end - position, position))
        position += len(pieces[-1])
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _walk(folder: Path, root: str) -> Iterator[str]:
    try:
        with os.scandir(folder) as found:
            entries = [(item.name, item.is_dir()) for item in found]
    except (FileNotFoundError, NotADirectoryError):
        return
    # A folder sorts as "name/", so that "a-b" comes before "a/b" as it does in S3.
    for name, is_folder in sorted(entries, key=lambda item: item[0] + "/" * item[1]):
        if name.startswith(TEMPORARY_PREFIX):
            continue
        if is_folder:
            yield from _walk(folder / name, f"{root}{name}/")
        else:
            yield root + name


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
