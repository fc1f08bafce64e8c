"""A stored object as a seekable file, for readers that want few of its bytes (Parquet row groups).

A Parquet reader of it must be told `use_threads=False`: a thread of Arrow's that lets go of a Python file while the
interpreter ends takes the process down with it (SIGABRT, after all work is done).
"""

import io

from shards.storage.objects import Store


class StoreFile(io.RawIOBase):
    """Reads by range; nothing is kept."""

    def __init__(self, store: Store, path: str) -> None:
        super().__init__()
        self._store, self._path = store, path
        self._size, self._position = store.size(path), 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The next byte to be read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a byte of the object."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = min(max(base + offset, 0), self._size)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Up to `size` bytes, all that is left where it is negative."""
        left = self._size - self._position
        count = left if size is None or size < 0 else min(size, left)
        data = self._store.read_range(self._path, self._position, self._position + count) if count else b""
        self._position += count
        return data
