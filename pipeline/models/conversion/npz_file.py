"""NumPy's .npz: a zip of arrays. Its headers are checked against the file before any array is read.

Three sizes must agree: the shape in an array's header, its size in the zip's directory, and the bytes of the file.
"""

import io
import math
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.models.conversion.tensor_file import TensorFile, readable, whole_numbers_error
from pipeline.models.conversion.zip_file import open_bounded, open_zip
from pipeline.models.weights.tensor_checks import MOST_LENGTH, refuse_absurd_tensors, refuse_not_finite
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import replacing

_SUFFIX = ".npy"
_MOST_HEADER_BYTES = 16 << 10  # of one array; NumPy allows 10,000 characters


def open_npz_file(path: Path) -> TensorFile:
    """The arrays in an .npz file. Raises UserError with the array whose size is not the declared one, or that is
    pickled; and, when it is read, an array that is not numeric. A flag or a text beside the model is never read."""
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
    """An .npz file, whole or absent, one tensor in memory at a time; the same tensors give the same bytes."""
    if path.is_dir():
        raise UserError(f"--out is {str(path)!r}, a folder; give the .npz file to write")
    with replacing(path) as waiting:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            archive = zipfile.ZipFile(waiting, "w")
        except OSError as error:
            raise UserError(
                f"{str(path)!r} cannot be written: {error.strerror}; give another --out, one this user may write to"
            ) from error
        with archive:
            for name, tensor in tensors:
                array = np.ascontiguousarray(refuse_not_finite(tensor, f"{name} for {str(path)!r}").numpy())
                with archive.open(zipfile.ZipInfo(f"{name}{_SUFFIX}"), "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)


def _header(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, where: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of one member, without its values."""
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
    """The bytes before an array's values. ValueError if it declares more than NumPy allows."""
    start = member.read(8)  # the magic bytes and the version
    length = member.read(2 if start[6:7] == b"\x01" else 4)
    declared = int.from_bytes(length, "little")
    if declared > _MOST_HEADER_BYTES:
        raise ValueError(f"its header declares {declared:,} bytes; allowed: {_MOST_HEADER_BYTES:,}")
    return io.BytesIO(start + length + member.read(declared))


def _as_float32(array: NDArray[Any]) -> torch.Tensor:
    """NumPy has no bfloat16: JAX writes it as two bytes without a type."""
    if array.dtype.str == "|V2":
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16).float()
    return torch.from_numpy(array.astype(np.float32, order="C", copy=False))
