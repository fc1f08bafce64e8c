"""A plain USTAR archive, hashed while it is written. No times, users or modes of the machine are in it."""

import hashlib
import tarfile
from typing import BinaryIO

BLOCK_BYTES = 512


class TarWriter:
    """Appends members to `file` from its start; `num_bytes` and `sha256()` are of all that was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.num_bytes = 0

    def add(self, name: str, data: bytes) -> int:
        """Append one file; the offset of its first data byte in the archive."""
        member = tarfile.TarInfo(name)
        member.size = len(data)
        member.mode = 0o644
        self._write(member.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict"))
        offset = self.num_bytes
        self._write(data)
        self._write(bytes(-len(data) % BLOCK_BYTES))
        return offset

    def finish(self) -> None:
        """Write the end-of-archive marker: two empty blocks."""
        self._write(bytes(2 * BLOCK_BYTES))

    def sha256(self) -> str:
        """Of the bytes written so far."""
        return self._hash.hexdigest()

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.num_bytes += len(data)
