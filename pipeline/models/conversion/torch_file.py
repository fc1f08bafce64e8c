"""PyTorch's files (torch.save): a state dict of dense tensors, alone or inside the dict of a training script."""

import re
from pathlib import Path

import torch

from pipeline.models.conversion.tensor_file import TensorFile, readable
from pipeline.models.conversion.zip_file import open_zip
from pipeline.models.weights.tensor_checks import refuse_absurd_tensors
from shards.errors import InvalidDataError, UserError
from shards.local_file import open_local_file

_ZIP = b"PK\x03\x04"
_WRAPPERS = ("state_dict", "model")
_ARGUMENTS = "argparse.Namespace"  # in the files of DeiT, MAE and others that share their training script


def open_torch_file(path: Path) -> TensorFile:
    """The tensors in such a file. Raises UserError if it holds other objects, is cut off, or a tensor is not dense."""
    where = str(path)
    _refuse_inflated(path)
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler refuses other objects with several kinds of errors
        raise UserError(_refusal(path, error)) from error
    for wrapper in _WRAPPERS:
        if isinstance(loaded, dict) and isinstance(loaded.get(wrapper), dict):
            loaded = loaded[wrapper]
    if not isinstance(loaded, dict):
        raise UserError(f"{where!r} holds a {type(loaded).__name__}; allowed: a state dict of tensors by name")
    tensors = {name: value for name, value in loaded.items() if isinstance(name, str) and torch.is_tensor(value)}
    for name, tensor in tensors.items():
        _refuse_not_dense(name, tensor, where)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    refuse_absurd_tensors(where, shapes)
    return TensorFile(where=where, shapes=shapes, read=lambda name: tensors[name].detach().float())


def _refuse_inflated(path: Path) -> None:
    """InvalidDataError for members that would be inflated in memory: torch.save stores them as they are."""
    with readable(repr(str(path))), open_local_file(path) as file:
        is_zip = file.read(len(_ZIP)) == _ZIP
    if is_zip:
        try:
            open_zip(path, is_stored=True).close()
        except UserError as error:
            if isinstance(error.__cause__, Exception):
                raise InvalidDataError(_refusal(path, error.__cause__)) from error
            raise


def _refusal(path: Path, error: Exception) -> str:
    """Why torch.load refused: the file holds other objects than tensors, or is incomplete."""
    if isinstance(error, OSError):
        return f"{str(path)!r} cannot be read ({error.strerror}); give a file that this user may read"
    if "nsupported" not in str(error):
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        return f"{str(path)!r} is cut off, or no file of PyTorch's ({reason}); fetch it again"
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    holds = f"it also holds a {found[1]}" if found else type(error).__name__
    refusal = f"{str(path)!r} cannot be read as tensors alone ({holds}); "
    if not found or found[1] != _ARGUMENTS:
        return f"{refusal}reading more would run code from the file; save its state dict, better as safetensors"
    new = str(path.with_suffix(f".tensors{path.suffix}"))
    return (
        f"{refusal}those are a script's arguments. This takes the tensors out and runs no code from the file: "
        f'python -c "import argparse, torch; torch.serialization.add_safe_globals([{_ARGUMENTS}]); '
        f"torch.save(torch.load({str(path)!r}, weights_only=True)['model'], {new!r})\""
    )


def _refuse_not_dense(name: str, tensor: torch.Tensor, where: str) -> None:
    what = f"{name} {list(tensor.shape)} in {where!r}"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise UserError(f"{what} is sparse, quantised or nested; allowed: dense tensors: save it as one")
    if tensor.is_meta:
        raise UserError(f"{what} has no values (it is on the meta device); save the model with its values")
    if tensor.is_complex():
        raise UserError(f"{what} is of type {tensor.dtype}; allowed: real numbers")
    needed, there = _bytes_of(tensor)
    if needed > there:
        raise UserError(f"{what} declares {needed} bytes of {tensor.dtype}, where {there} are; save it contiguously")


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Bytes of its values and of its storage, which has fewer if one value is repeated (an expanded tensor)."""
    return tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
