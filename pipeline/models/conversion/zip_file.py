"""The zip archives that NumPy and PyTorch write: their directory is checked against the file before a member is read.

Sizes in the directory are claims. The bytes of the file bound the compressed ones, and those bound the others, since
deflate expands one byte to at most 1032 (zlib's technical details); trained weights hardly shrink at all.
"""

import io
import os
import zipfile
from pathlib import Path

from pipeline.models.conversion.tensor_file import readable
from pipeline.models.weights.tensor_checks import MOST_TENSORS
from shards.errors import InvalidDataError
from shards.files.local_files import open_local_file
from shards.schema.config_values import shown_value

_MOST_FROM_ONE_BYTE = 1032
_MOST_DIRECTORY_BYTES = 16 << 20
_MOST_SHRUNK, _SMALL = 64, 64 << 20  # all members together: times the file's bytes, and for small files as many bytes
_ENCRYPTED = 1  # in flag_bits


class _BoundedReads(io.BufferedReader):
    """A file whose reads are bounded: zipfile reads a directory whole, of whatever size the file declares."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:  # up to the end, of the part that may hold a comment
            size = os.fstat(self.fileno()).st_size - self.tell()
        if size > _MOST_DIRECTORY_BYTES:
            raise ValueError(f"it declares {size:,} bytes at once; allowed: {_MOST_DIRECTORY_BYTES:,}")
        return super().read(size)


def open_bounded(path: Path) -> io.BufferedReader:
    """The file, for `zipfile` to read. Raises as `open_local_file`."""
    return _BoundedReads(open_local_file(path).detach())


def open_zip(path: Path, *, is_stored: bool = False) -> zipfile.ZipFile:
    """The archive, whose members are sound as far as the directory says. `is_stored`: none may be compressed.

    Raises InvalidDataError with the member that cannot be.
    """
    where = str(path)
    with readable(repr(where)):
        file = open_bounded(path)
        try:
            archive = zipfile.ZipFile(file)
            _refuse_impossible(archive, where=where, num_bytes=os.fstat(file.fileno()).st_size, is_stored=is_stored)
        except BaseException:
            file.close()
            raise
    return archive


def _refuse_impossible(archive: zipfile.ZipFile, *, where: str, num_bytes: int, is_stored: bool) -> None:
    entries = archive.infolist()
    if len(entries) > MOST_TENSORS:
        raise InvalidDataError(f"{where!r} has {len(entries):,} members; allowed: {MOST_TENSORS:,}; fetch it again")
    for entry in entries:
        name = f"{entry.filename if entry.filename.isprintable() else shown_value(entry.filename)} in {where!r}"
        allowed = (zipfile.ZIP_STORED,) if is_stored else (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        if entry.compress_type not in allowed:
            library, calls = ("PyTorch", "torch.save") if is_stored else ("NumPy", "np.savez and np.savez_compressed")
            raise InvalidDataError(f"{name} is compressed in a way that {library} does not write; allowed: {calls}")
        if entry.file_size > num_bytes * _MOST_FROM_ONE_BYTE or entry.compress_size > num_bytes:
            raise InvalidDataError(
                f"{name} declares {entry.file_size} bytes out of {entry.compress_size}, the whole file has "
                f"{num_bytes}; fetch it again"
            )
    packed, unpacked = sum(entry.compress_size for entry in entries), sum(entry.file_size for entry in entries)
    if packed > num_bytes:
        raise InvalidDataError(
            f"{where!r} declares {packed} bytes of members, it has {num_bytes}; fetch the file again"
        )
    if unpacked > max(_SMALL, num_bytes * (1 if is_stored else _MOST_SHRUNK)):
        raise InvalidDataError(
            f"{where!r} declares {unpacked:,} bytes of values, out of {num_bytes:,}; weights do not shrink so far: the "
            "file is damaged, or made to do damage: fetch it again"
        )
    if len({entry.filename for entry in entries}) != len(entries):
        raise InvalidDataError(f"{where!r} has two members of one name; fetch the file again")
