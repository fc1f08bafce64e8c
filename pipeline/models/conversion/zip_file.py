"""Zip archives of arrays: NumPy's .npz, and the checks that PyTorch's files share with it.

The archive's directory is checked against the file before a member is read. The sizes in the directory are only claims.
The size of the file bounds the compressed sizes, and these bound the uncompressed ones, since deflate expands one byte
to at most 1032 (zlib's technical details). Trained weights hardly shrink at all. For an array, three sizes must agree:
the shape in its header, its size in the directory, and the bytes of the file.
"""

import io
import math
import os
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.models.conversion.tensor_file import TensorFile, readable, whole_numbers_error
from pipeline.models.weights.safetensors import MOST_LENGTH, MOST_TENSORS, refuse_absurd_tensors, refuse_not_finite
from shards.config_values import shown_value
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import open_local_file, replacing

_MOST_FROM_ONE_BYTE = 1032
_MOST_DIRECTORY_BYTES = 16 << 20
_MOST_SHRUNK, _SMALL = 64, 64 << 20  # the values may have 64 times the file's bytes, or 64 MiB if that is more
_SUFFIX = ".npy"
_MOST_HEADER_BYTES = 16 << 10  # the header of one array; NumPy allows 10,000 characters


class _BoundedReads(io.BufferedReader):
    """A file with bounded reads: zipfile reads an archive's whole directory at once, whatever size the file
    declares."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:  # to the end: zipfile reads the part that may hold a comment
            size = os.fstat(self.fileno()).st_size - self.tell()
        if size > _MOST_DIRECTORY_BYTES:
            raise ValueError(f"it declares {size:,} bytes at once; allowed: {_MOST_DIRECTORY_BYTES:,}")
        return super().read(size)


def open_bounded(path: Path) -> io.BufferedReader:
    """Opens the file for `zipfile` to read. Raises the errors of `open_local_file`."""
    return _BoundedReads(open_local_file(path).detach())


def open_zip(path: Path, *, is_stored: bool = False) -> zipfile.ZipFile:
    """Opens the archive and checks its members as far as the directory describes them. `is_stored`: refuse compressed
    members.

    Raises an InvalidDataError that names a member that is impossible.
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


def open_npz_file(path: Path) -> TensorFile:
    """Opens the arrays in an .npz file.

    Raises UserError for an array that is pickled or does not have its declared size. An array that is not numeric is
    refused only when it is read, since flags and texts beside the model's arrays are never read.
    """
    where = str(path)
    with _opened(path) as archive:
        headers = {entry.filename.removesuffix(_SUFFIX): _header(archive, entry, where) for entry in archive.infolist()}
    shapes = {name: shape for name, (shape, _) in headers.items()}
    refuse_absurd_tensors(where, shapes)

    def read(name: str) -> torch.Tensor:
        shape, dtype = headers[name]
        if dtype.kind in "iu":
            raise whole_numbers_error(f"{name} {list(shape)} in {where!r}", dtype)
        if dtype.kind != "f" and dtype.str != "|V2":
            raise UserError(f"{name} {list(shape)} in {where!r} is of type {dtype}; allowed: numbers")
        size = f"{list(shape)} of {dtype}"
        with (
            readable(f"{name} in {where!r}", size=size),
            open_bounded(path) as file,
            zipfile.ZipFile(file) as again,
            again.open(name + _SUFFIX) as member,
        ):
            array = np.lib.format.read_array(member, allow_pickle=False)
            if (array.shape, array.dtype) != (shape, dtype):
                raise ValueError(f"it is {list(array.shape)} of {array.dtype} now: the file has changed")
            return _as_float32(array)

    return TensorFile(where=where, shapes=shapes, read=read)


def _opened(path: Path) -> zipfile.ZipFile:
    try:
        return open_zip(path)
    except UserError as error:
        if isinstance(error.__cause__, zipfile.BadZipFile | EOFError | struct.error):
            cause = error.__cause__
            raise InvalidDataError(f"{str(path)!r} is no .npz file, or is cut off ({cause}); fetch it again") from error
        raise


def write_npz(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Writes an .npz file, completely or not at all, with one tensor in memory at a time. The same tensors give the
    same bytes."""
    if path.is_dir():
        raise UserError(f"--out is {str(path)!r}, a folder; give the .npz file to write")
    with replacing(path) as waiting:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            archive = zipfile.ZipFile(waiting, "w")
        except OSError as error:
            raise UserError(
                f"{str(path)!r} cannot be written: {error.strerror}",
                todo="give another --out, one this user may write to",
            ) from error
        with archive:
            for name, tensor in tensors:
                array = np.ascontiguousarray(refuse_not_finite(tensor, f"{name} for {str(path)!r}").numpy())
                with archive.open(zipfile.ZipInfo(f"{name}{_SUFFIX}"), "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)


def _header(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, where: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Returns the shape and type of one member, without its values."""
    if not entry.filename.endswith(_SUFFIX):
        raise InvalidDataError(
            f"{entry.filename} in {where!r} is no array (its name ends in no {_SUFFIX}); take it out of the file"
        )
    name = entry.filename.removesuffix(_SUFFIX)
    with readable(f"{name} in {where!r}"):
        with archive.open(entry) as member:
            head = _head_of(member)
        version = np.lib.format.read_magic(head)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(head)
        there = entry.file_size - head.tell()
    if dtype.hasobject:
        raise UserError(
            f"{name} in {where!r} is a pickled object, not numbers: reading it would run code from the file; "
            "save it again as arrays of numbers, or leave it out"
        )
    declared = math.prod(shape) * dtype.itemsize
    if declared != there or any(not 0 <= length <= MOST_LENGTH for length in shape):
        raise InvalidDataError(
            f"{name} in {where!r} declares {list(shape)}, {declared} bytes of {dtype}, where there are {there}; the "
            "file is damaged, or made to do damage: fetch it again"
        )
    return shape, dtype


def _head_of(member: IO[bytes]) -> io.BytesIO:
    """Returns the bytes before an array's values. Raises ValueError if the array declares more than
    _MOST_HEADER_BYTES."""
    start = member.read(8)  # the magic bytes and the version
    length = member.read(2 if start[6:7] == b"\x01" else 4)
    declared = int.from_bytes(length, "little")
    if declared > _MOST_HEADER_BYTES:
        raise ValueError(f"its header declares {declared:,} bytes; allowed: {_MOST_HEADER_BYTES:,}")
    return io.BytesIO(start + length + member.read(declared))


def _as_float32(array: NDArray[Any]) -> torch.Tensor:
    """Returns the array as a float32 tensor. NumPy has no bfloat16: JAX writes it as two bytes without a type."""
    if array.dtype.str == "|V2":
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16).float()
    return torch.from_numpy(array.astype(np.float32, order="C", copy=False))
