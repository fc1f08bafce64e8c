"""Temporary files in TMPDIR. If its disk is full, the error names the folder."""

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from shards.errors import StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def temporary_file() -> Iterator[BinaryIO]:
    """Yields an unnamed file, open for writing and reading. Raises StorageError if its disk is full."""
    with _room(), tempfile.TemporaryFile() as file:
        yield cast("BinaryIO", file)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[str]:
    """Yields the path of a folder, which is removed with its contents. Raises StorageError if its disk is full."""
    with _room(), tempfile.TemporaryDirectory(prefix=prefix) as folder:
        yield folder


@contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.filename is None:  # raised by tempfile: every folder is full
            what = str(error.strerror)
        elif error.errno in _FULL and (error.filename is None or _is_temporary(error.filename)):
            what = f"no space left in {tempfile.gettempdir()}, the folder for temporary files"
        else:
            raise
        raise StorageError(f"{what}; make room there, or set TMPDIR to another folder") from error


def _is_temporary(name: object) -> bool:
    return isinstance(name, str) and name.startswith(tempfile.gettempdir())
