"""A whole tar for checks with random access, mapped and not in memory; a temporary copy if it is remote."""

import mmap
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from shards.storage.local_read import open_regular
from shards.storage.temporary import temporary_file
from shards.store import Store

PIECE_BYTES = 8 << 20
Tar = bytes | mmap.mmap


@contextmanager
def mapped_tar(store: Store, path: str) -> Iterator[Tar]:
    """The bytes of a tar, read-only, for as long as the block lasts. Raises MissingObjectError, and
    InvalidDataError for what is no regular file."""
    if (local := store.local_path(path)) is not None:
        store.size(path)  # tells a missing file from other faults
        with open(local, "rb", opener=open_regular) as file:
            yield from _mapped(file)
        return
    with temporary_file() as copy, store.open_read(path) as remote:
        shutil.copyfileobj(remote, copy, PIECE_BYTES)
        copy.flush()
        yield from _mapped(copy)


def _mapped(file: BinaryIO) -> Iterator[Tar]:
    if not file.seek(0, 2):
        yield b""  # an empty file cannot be mapped
        return
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as tar:
        yield tar
