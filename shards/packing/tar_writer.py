"""A plain USTAR archive, hashed while it is written. No times, users or modes of the machine are in it.

Headers are made from a template, in a twentieth of tarfile's time and with the same bytes in every version of Python.
"""

import hashlib
from typing import BinaryIO

from shards.sources.tar_members import BLOCK_BYTES

MOST_NAME_BYTES = 100
MOST_MEMBER_BYTES = 8**11 - 1

# Smaller pieces are buffered, so that a sample costs one or two writes and not nine.
_HELD_BYTES = 1 << 15

# A header is NAME, this, the size, this, the checksum, this (POSIX.1-1988, ustar).
_MODE_UID_GID = b"0000644\0" + b"0000000\0" * 2
_TIME = b"\0" + b"00000000000\0"
_TYPE_MAGIC = (b"\0 0" + bytes(MOST_NAME_BYTES) + b"ustar\x0000").ljust(
    BLOCK_BYTES - MOST_NAME_BYTES - len(_MODE_UID_GID) - 11 - len(_TIME) - 6, b"\0"
)
# The checksum counts its own eight bytes as spaces; of these the last two bytes are in _TYPE_MAGIC, as NUL and space.
_FIXED_SUM = sum(_MODE_UID_GID) + sum(_TIME) + sum(_TYPE_MAGIC) + 7 * ord(" ")


class TarWriter:
    """Appends members to `file` from its start; `num_bytes` and `sha256()` cover everything added."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._held = bytearray()
        self.num_bytes = 0

    def add(self, name: str, data: bytes) -> int:
        """Append one file; returns the offset of its first data byte in the archive."""
        self._held += header(name, len(data))
        offset = self.num_bytes + BLOCK_BYTES
        if len(data) < _HELD_BYTES:
            self._held += data
        else:
            self._write_held()
            self._write(data)
        num_padding = -len(data) % BLOCK_BYTES
        self._held += bytes(num_padding)
        self.num_bytes = offset + len(data) + num_padding
        if len(self._held) >= _HELD_BYTES:
            self._write_held()
        return offset

    def finish(self) -> None:
        """Write the end-of-archive marker, two empty blocks, and everything still buffered."""
        self._held += bytes(2 * BLOCK_BYTES)
        self.num_bytes += 2 * BLOCK_BYTES
        self._write_held()

    def sha256(self) -> str:
        """The sha256 of the bytes added so far."""
        self._write_held()
        return self._hash.hexdigest()

    def _write_held(self) -> None:
        self._write(bytes(self._held))
        self._held.clear()

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)


def header(name: str, num_bytes: int) -> bytes:
    """The header block of a file; ValueError if it does not fit into a plain ustar header."""
    encoded = name.encode()
    if len(encoded) > MOST_NAME_BYTES or not 0 <= num_bytes <= MOST_MEMBER_BYTES:
        sizes = f"name of {len(encoded)} bytes (at most {MOST_NAME_BYTES}), {num_bytes} bytes (to {MOST_MEMBER_BYTES})"
        raise ValueError(f"tar member {name!r} does not fit into a ustar header: {sizes}")
    size = b"%011o" % num_bytes
    checksum = b"%06o" % (_FIXED_SUM + sum(encoded) + sum(size))
    return b"".join((encoded.ljust(MOST_NAME_BYTES, b"\0"), _MODE_UID_GID, size, _TIME, checksum, _TYPE_MAGIC))
