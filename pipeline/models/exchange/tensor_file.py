"""Files of named tensors, whoever wrote them: safetensors, PyTorch's and NumPy's .npz. Nothing is unpickled.

Shapes come from headers, tensors are read one by one: a file of another model is refused before it is read.
"""

import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from pipeline.models.weights import Shapes, TensorByName
from shards.errors import UserError

SUFFIXES = (".npz", ".safetensors", ".bin", ".pth", ".pt")
_WRAPPERS = ("state_dict", "model")  # what training scripts put around the tensors


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """What is in a file: the shape of every tensor, and a function that reads one of them, float32."""

    where: str
    shapes: Shapes
    read: TensorByName

    def shape(self, name: str, num_dims: int) -> tuple[int, ...]:
        """The shape of a tensor that must be there; UserError where it is not, or has other dimensions."""
        if name not in self.shapes:
            some = ", ".join(sorted(self.shapes)[:5])
            raise UserError(
                f"{self.where!r} has no tensor {name}, which its model needs; it has {len(self.shapes)}: {some}, ...; "
                "give the file of a ViT, a hybrid or a BiT ResNet"
            )
        if len(self.shapes[name]) != num_dims:
            raise UserError(
                f"{name} in {self.where!r} is {list(self.shapes[name])}; it must have {num_dims} dimensions; "
                "give the file of a ViT, a hybrid or a BiT ResNet"
            )
        return self.shapes[name]

    def renamed(self, names: Mapping[str, str]) -> "TensorFile":
        """The same tensors under other names (new name -> the name here); those not named are left out."""
        shapes = {new: self.shapes[old] for new, old in names.items()}
        return TensorFile(where=self.where, shapes=shapes, read=lambda name: self.read(names[name]))


def open_tensor_file(path: Path) -> TensorFile:
    """The tensors in a .npz, .safetensors or PyTorch file. UserError where there is none, or it can not be read."""
    if path.suffix not in SUFFIXES or not path.is_file():
        raise UserError(f"no weights at {str(path)!r}; allowed are files that end in {', '.join(SUFFIXES)}")
    if path.suffix == ".npz":
        return _open_npz(path)
    return _open_safetensors(path) if path.suffix == ".safetensors" else _open_torch(path)


def write_npz(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """An .npz file, whole or absent, one tensor in memory at a time; the same tensors give the same bytes."""
    waiting = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        archive = zipfile.ZipFile(waiting, "w")
    except OSError as error:
        raise UserError(
            f"{str(path)!r} can not be written: {error.strerror}; give another --out, one this user may write to"
        ) from error
    with archive:
        for name, tensor in tensors:
            array = np.ascontiguousarray(tensor.numpy())
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    waiting.replace(path)


def _open_npz(path: Path) -> TensorFile:
    try:
        with zipfile.ZipFile(path) as archive:
            headers = {name.removesuffix(".npy"): _npy_header(archive, name) for name in archive.namelist()}
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise UserError(f"{str(path)!r} is no .npz file, or is cut off ({error}); fetch it again") from error
    for name, (shape, dtype) in headers.items():
        if dtype.hasobject:
            raise UserError(
                f"{name} in {str(path)!r} is a pickled object, not numbers: reading it would run code from the file; "
                "save it again as arrays of numbers, or leave it out"
            )
        if not _is_number(dtype):
            raise UserError(f"{name} {list(shape)} in {str(path)!r} is of type {dtype}; allowed are numbers")

    def read(name: str) -> torch.Tensor:
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return _as_float32(arrays[name])
        except (zipfile.BadZipFile, ValueError, EOFError) as error:
            raise UserError(f"{name} in {str(path)!r} can not be read ({error}); fetch the file again") from error

    return TensorFile(where=str(path), shapes={name: shape for name, (shape, _) in headers.items()}, read=read)


def _npy_header(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    """Shape and type of one member, without its values."""
    with archive.open(name) as member:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(member)
    return shape, dtype


def _is_number(dtype: np.dtype[np.generic]) -> bool:
    return dtype.kind in "fiu" or dtype.str == "|V2"


def _as_float32(array: NDArray[np.generic]) -> torch.Tensor:
    """NumPy has no bfloat16: JAX writes it as two bytes without a meaning."""
    if array.dtype.str == "|V2":
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16).float()
    return torch.from_numpy(array.astype(np.float32, order="C", copy=False))


def _open_safetensors(path: Path) -> TensorFile:
    def read(name: str) -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name).float()
        return tensor

    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{str(path)!r} is no safetensors file, or is cut off ({error}); fetch it again") from error
    return TensorFile(where=str(path), shapes=shapes, read=read)


def _open_torch(path: Path) -> TensorFile:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what is not tensors alone is refused by the unpickler with several errors
        raise UserError(
            f"{str(path)!r} can not be read as tensors alone ({type(error).__name__}); reading more would run code "
            "from the file; save its state dict, better as safetensors"
        ) from error
    for wrapper in _WRAPPERS:
        if isinstance(loaded, dict) and isinstance(loaded.get(wrapper), dict):
            loaded = loaded[wrapper]
    if not isinstance(loaded, dict):
        raise UserError(f"{str(path)!r} holds a {type(loaded).__name__}; allowed is a state dict of tensors by name")
    tensors = {str(name): value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return TensorFile(where=str(path), shapes=shapes, read=lambda name: tensors[name].float())
