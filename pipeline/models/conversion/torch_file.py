"""PyTorch's files (torch.save): a state dict of dense tensors, alone or inside the dict of a training script."""

import argparse
import pathlib
import re
from pathlib import Path
from typing import Any

import torch

from pipeline.models.conversion.config import Take
from pipeline.models.conversion.tensor_file import TensorFile, readable
from pipeline.models.conversion.zip_file import open_zip
from pipeline.models.weights.tensor_checks import refuse_absurd_tensors
from shards.errors import InvalidDataError, UserError
from shards.local_file import open_local_file

_ZIP = b"PK\x03\x04"
_RAW = ("state_dict", "model", "model_state_dict", "module", "net", "network", "student")
_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema", "teacher")
# The arguments in the files of timm, DeiT, MAE and others. Both types only hold values.
_HARMLESS: list[Any] = [argparse.Namespace, pathlib.PosixPath]


def open_torch_file(path: Path, *, take: Take | None = None) -> TensorFile:
    """The tensors in such a file; `take`: which ones, if it holds the raw and the averaged weights. Raises UserError
    if it holds both and nobody chose, if it holds other objects, is cut off, or a tensor is not dense."""
    where = str(path)
    _refuse_inflated(path)
    try:
        with torch.serialization.safe_globals(_HARMLESS):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler refuses other objects with several kinds of errors
        raise UserError(_refusal(path, error)) from error
    loaded = _unwrapped(loaded, where, take=take)
    if not isinstance(loaded, dict):
        raise UserError(f"{where!r} holds a {type(loaded).__name__}; allowed: a state dict of tensors by name")
    tensors = {name: value for name, value in loaded.items() if isinstance(name, str) and torch.is_tensor(value)}
    for name, tensor in tensors.items():
        _refuse_not_dense(name, tensor, where)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    refuse_absurd_tensors(where, shapes)
    return TensorFile(where=where, shapes=shapes, read=lambda name: tensors[name].detach().float())


def _unwrapped(loaded: object, where: str, *, take: Take | None) -> object:
    """The state dict inside the dict of a training script."""
    for _ in range(2):  # DataParallel's may be one deeper
        if not isinstance(loaded, dict) or any(torch.is_tensor(value) for value in loaded.values()):
            return loaded
        raw = [name for name in _RAW if isinstance(loaded.get(name), dict) and loaded[name]]
        mean = [name for name in _AVERAGED if isinstance(loaded.get(name), dict) and loaded[name]]
        if raw and mean and take is None:
            raise UserError(
                f"{where!r} holds the raw weights ({raw[0]}) and their average over training ({mean[0]}); give "
                "--take raw or --take averaged"
            )
        if take and not (mean if take == "averaged" else raw):
            what = "averaged weights" if take == "averaged" else "raw weights"
            raise UserError(f"{where!r} holds no {what}; it has {', '.join(map(str, loaded))[:200]}; leave out --take")
        found = mean if take == "averaged" or not raw else raw
        if not found:
            return loaded
        loaded = loaded[found[0]]
    return loaded


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
    return f"{refusal}reading more would run code from the file; save its state dict, better as safetensors"


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
