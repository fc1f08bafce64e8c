"""NumPy's .npz: a zip of arrays. Its headers are checked against the file before any array is read.

Three sizes must agree: the shape in an array's header, its size in the zip's directory, and the bytes of the file. The
last bounds the others, since deflate expands one byte to at most 1032 (zlib's technical details).
"""

import math
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.models.conversion.tensor_file import TensorFile, readable
from shards.errors import UserError

_SUFFIX = ".npy"
_MOST_FROM_ONE_BYTE = 1032
_LONGEST = 2**31  # of one dimension; an array without values could declare any length


def open_npz_file(path: Path) -> TensorFile:
    """The arrays in an .npz file. Raises UserError with the array whose size is not the declared one, or that is
    pickled; and, when it is read, an array that is not numeric. A flag or a text beside the model is never read."""
    where = str(path)
    try:
        with readable(repr(where)):
            archive = zipfile.ZipFile(path)
    except UserError as error:
        if isinstance(error.__cause__, OSError):
            raise
        raise UserError(f"{where!r} is no .npz file, or is cut off ({error.__cause__}); fetch it again") from error
    with archive:
        num_bytes = path.stat().st_size
        for entry in archive.infolist():
            _refuse_impossible(entry, where=where, num_bytes=num_bytes)
        packed = sum(entry.compress_size for entry in archive.infolist())
        if packed > num_bytes:
            raise UserError(f"{where!r} declares {packed} bytes of members, it has {num_bytes}; fetch the file again")
        if len(set(archive.namelist())) != len(archive.namelist()):
            raise UserError(f"{where!r} has two members of one name; fetch the file again")
        headers = {entry.filename.removesuffix(_SUFFIX): _header(archive, entry, where) for entry in archive.infolist()}

    def read(name: str) -> torch.Tensor:
        shape, dtype = headers[name]
        if dtype.kind not in "fiu" and dtype.str != "|V2":
            raise UserError(f"{name} {list(shape)} in {where!r} is of type {dtype}; allowed: numbers")
        size = f"{list(shape)} of {dtype}"
        with (
            readable(f"{name} in {where!r}", size=size),
            zipfile.ZipFile(path) as again,
            again.open(name + _SUFFIX) as member,
        ):
            return _as_float32(np.lib.format.read_array(member, allow_pickle=False))

    return TensorFile(where=where, shapes={name: shape for name, (shape, _) in headers.items()}, read=read)


def write_npz(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """An .npz file, whole or absent, one tensor in memory at a time; the same tensors give the same bytes."""
    waiting = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        archive = zipfile.ZipFile(waiting, "w")
    except OSError as error:
        raise UserError(
            f"{str(path)!r} cannot be written: {error.strerror}; give another --out, one this user may write to"
        ) from error
    with archive:
        for name, tensor in tensors:
            array = np.ascontiguousarray(tensor.numpy())
            with archive.open(zipfile.ZipInfo(f"{name}{_SUFFIX}"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    waiting.replace(path)


def _refuse_impossible(entry: zipfile.ZipInfo, *, where: str, num_bytes: int) -> None:
    """UserError for a member that is not an array, or declares more bytes than the file has."""
    if not entry.filename.endswith(_SUFFIX):
        raise UserError(
            f"{entry.filename} in {where!r} is no array (its name ends in no {_SUFFIX}); take it out of the file"
        )
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UserError(
            f"{entry.filename} in {where!r} is compressed in a way that NumPy does not write; allowed: np.savez and "
            "np.savez_compressed"
        )
    if entry.file_size > num_bytes * _MOST_FROM_ONE_BYTE or entry.compress_size > num_bytes:
        raise UserError(
            f"{entry.filename} in {where!r} declares {entry.file_size} bytes out of {entry.compress_size}, the whole "
            f"file has {num_bytes}; fetch it again"
        )


def _header(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, where: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of one member, without its values."""
    name = entry.filename.removesuffix(_SUFFIX)
    with readable(f"{name} in {where!r}"), archive.open(entry) as member:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(member)
        there = entry.file_size - member.tell()
    if dtype.hasobject:
        raise UserError(
            f"{name} in {where!r} is a pickled object, not numbers: reading it would run code from the file; "
            "save it again as arrays of numbers, or leave it out"
        )
    declared = math.prod(shape) * dtype.itemsize
    if declared != there or any(not 0 <= length <= _LONGEST for length in shape):
        raise UserError(
            f"{name} in {where!r} declares {list(shape)}, {declared} bytes of {dtype}, where there are {there}; the "
            "file is damaged, or made to do damage: fetch it again"
        )
    return shape, dtype


def _as_float32(array: NDArray[Any]) -> torch.Tensor:
    """NumPy has no bfloat16: JAX writes it as two bytes without a type."""
    if array.dtype.str == "|V2":
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16).float()
    return torch.from_numpy(array.astype(np.float32, order="C", copy=False))
