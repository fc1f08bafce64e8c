"""Opens a file of named tensors by its suffix: safetensors (one file, or several with an index), PyTorch's or .npz.

A PyTorch file (torch.save) holds a state dict of dense tensors, alone or inside the dict of a training script. It is
read with torch's restricted unpickler, which refuses all objects but tensors, plain values and a training script's
arguments.
"""

import argparse
import pathlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.models.conversion.config import Take
from pipeline.models.conversion.tensor_file import (
    FlagNeededError,
    TensorFile,
    bare_name,
    json_object,
    readable,
    whole_numbers_error,
)
from pipeline.models.conversion.zip_file import open_npz_file, open_zip
from pipeline.models.weights.safetensors import MOST_TENSORS, open_safetensors, refuse_absurd_tensors
from shards.config_values import shown_value
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import open_local_file

_ZIP = b"PK\x03\x04"
_USUAL = ("state_dict", "model", "model_state_dict", "module", "net", "network", "student")
_AVERAGED = frozenset(("ema", "swa", "avg", "average", "averaged", "averages", "teacher", "shadow", "polyak"))
# Words in the names of optimisers, losses and the like, which may hold tensors, too.
_OTHERS = frozenset(("optim", "optimizer", "optimizers", "scheduler", "scaler", "loss", "criterion", "rng", "queue"))
_COUNTER = "n_averaged"  # a tensor of torch's AveragedModel
_ARGUMENTS, _MODEL = ("args", "hyper_parameters", "config", "cfg"), "arch"
_MOST_DEPTH = 3
_WORDS = re.compile(r"[^a-z]+")
# Types of the arguments in files of timm, DeiT, MAE and others. Both only hold values.
_HARMLESS: list[Any] = [argparse.Namespace, pathlib.PosixPath]
SUFFIXES = (".npz", ".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".pth.tar")
# The first tensor of timm's ViTs. The text before this name is a training script's name for the model.
_FIRST = ".patch_embed.proj.weight"


def open_tensor_file(path: Path, *, take: Take | None = None) -> TensorFile:
    """Opens a file of tensors, without the prefixes that training scripts add to their names.

    `take`: which weights to take from a PyTorch file that holds the raw and the averaged ones. Raises UserError if the
    file is missing or cannot be read.
    """
    if not path.name.endswith(SUFFIXES) or not path.is_file():
        raise UserError(f"no weights at {str(path)!r}; allowed: files that end in {', '.join(SUFFIXES)}")
    if take and path.suffix in (".npz", ".safetensors"):
        raise UserError(f"{str(path)!r} holds one set of weights and does not say which; leave out --take")
    if path.suffix == ".npz":
        return open_npz_file(path)
    if path.suffix == ".safetensors":
        return without_prefixes(open_safetensors_file(path))
    return without_prefixes(open_torch_file(path, take=take))


def without_prefixes(file: TensorFile) -> TensorFile:
    """Returns the same tensors without the prefixes of training scripts. Raises UserError if two tensors would then
    have the same name, or if the file holds several models."""
    names: dict[str, str] = {}
    firsts = [name for name in file.shapes if name.endswith(_FIRST)]
    if len(firsts) > 1:
        models = ", ".join(sorted(name.removesuffix(_FIRST[1:]) for name in firsts))
        raise UserError(f"{file.where!r} holds several models, {models}; save one of them alone")
    prefix = bare_name(firsts[0]).removesuffix(_FIRST[1:]) if firsts else ""
    for name in file.shapes:
        bare = bare_name(name).removeprefix(prefix)
        if bare in names:
            raise UserError(f"{names[bare]} and {name} in {file.where!r} would both be {bare}; save one of them alone")
        names[bare] = name
    return file.renamed(names)


def open_safetensors_file(path: Path) -> TensorFile:
    """Opens one safetensors file. Raises UserError if it is missing, or its header does not match it."""
    with readable(f"{str(path)!r} is no safetensors file: it"):
        if not path.is_file():
            raise UserError(f"no weights at {str(path)!r}; fetch the file again")
        file = open_safetensors(path)

    def read(name: str) -> torch.Tensor:
        with readable(f"{name} in {str(path)!r}"):
            value = file.read(name)
        if not value.is_floating_point():
            raise whole_numbers_error(f"{name} in {str(path)!r}", value.dtype)
        return value.float()

    return TensorFile(where=str(path), shapes=file.shapes, read=read)


def open_sharded(index: Path) -> TensorFile:
    """Opens all files that an index names. Raises UserError for an invalid index and for missing files.

    The files must be in the index's folder: a name with a folder in it is refused.
    """
    where: Any = json_object(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise UserError(f"{str(index)!r} has no weight_map (name of a tensor: name of a file); fetch it again")
    if len(where) > MOST_TENSORS:
        raise InvalidDataError(
            f"{str(index)!r} names {len(where):,} tensors; allowed: {MOST_TENSORS:,}; fetch it again"
        )
    for name, piece in where.items():
        if not isinstance(piece, str) or Path(piece).name != piece or piece == ".." or "\\" in piece:
            raise UserError(
                f"{name} in {str(index)!r} is in {shown_value(piece)}; allowed: names of files beside it, without a "
                "folder"
            )
    pieces = {piece: open_safetensors_file(index.parent / piece) for piece in sorted(set(where.values()))}
    for name, piece in where.items():
        if name not in pieces[piece].shapes:
            raise UserError(f"{name} is in no piece: {pieces[piece].where!r} has it not; fetch the folder again")
    return TensorFile(
        where=str(index),
        shapes={name: pieces[piece].shapes[name] for name, piece in where.items()},
        read=lambda name: pieces[where[name]].read(name),
    )


def open_torch_file(path: Path, *, take: Take | None = None) -> TensorFile:
    """Opens a PyTorch file. `take`: which weights to take if it holds the raw and the averaged ones.

    Raises UserError if it holds both and `take` is not given, if it holds other objects, if it is cut off, or if a
    tensor is not dense.
    """
    where = str(path)
    _refuse_inflated(path)
    try:
        with torch.serialization.safe_globals(_HARMLESS):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler refuses other objects with several kinds of errors
        what, todo = _refusal(path, error)
        raise UserError(what, todo=todo) from error
    if not isinstance(loaded, dict):
        raise UserError(f"{where!r} holds a {type(loaded).__name__}; allowed: a state dict of tensors by name")
    arguments, loaded = _arguments(loaded), _chosen(loaded, where, take=take)
    tensors = {
        name: value
        for name, value in loaded.items()
        if isinstance(name, str) and torch.is_tensor(value) and name != _COUNTER
    }
    for name, tensor in tensors.items():
        _refuse_not_dense(name, tensor, where)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    refuse_absurd_tensors(where, shapes)

    def read(name: str) -> torch.Tensor:
        if not tensors[name].is_floating_point():
            raise whole_numbers_error(f"{name} in {where!r}", tensors[name].dtype)
        return tensors[name].detach().float()

    return TensorFile(where=where, shapes=shapes, read=read, arguments=arguments)


def _arguments(loaded: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Returns the arguments of the training script, as timm, MAE, DeiT and Lightning store them.

    Without any, returns the name of the model, as MoCo v3 and others store it, following PyTorch's ImageNet example.
    """
    for name in _ARGUMENTS:
        found = loaded.get(name)
        if isinstance(found, argparse.Namespace):
            return vars(found)
        if isinstance(found, dict):
            return found
    return {_MODEL: loaded[_MODEL]} if isinstance(loaded.get(_MODEL), str) else {}


@dataclass(frozen=True, kw_only=True)
class _StateDict:
    """A state dict and the names that lead to it in the dict of a training script."""

    path: tuple[str, ...]
    tensors: dict[Any, Any]

    @property
    def where(self) -> str:
        return ".".join(self.path)

    @property
    def is_averaged(self) -> bool:
        return bool(_AVERAGED & set(_WORDS.split(self.where.lower())))

    @property
    def rank(self) -> int:
        """The place of the first name among the usual ones; other names come last."""
        return next((rank for rank, name in enumerate(_USUAL) if self.path[:1] == (name,)), len(_USUAL))

    @property
    def names(self) -> set[str]:
        return {bare_name(str(name)) for name in self.tensors}

    def is_of_the_model_of(self, other: "_StateDict") -> bool:
        return 2 * len(self.names & other.names) >= min(len(self.names), len(other.names))


def _state_dicts(loaded: dict[Any, Any], path: tuple[str, ...] = ()) -> Iterator[_StateDict]:
    if any(torch.is_tensor(value) for value in loaded.values()):
        yield _StateDict(path=path, tensors=loaded)
    elif len(path) < _MOST_DEPTH:
        for name, value in loaded.items():
            if isinstance(name, str) and isinstance(value, dict) and not _OTHERS & set(_WORDS.split(name.lower())):
                yield from _state_dicts(value, (*path, name))


def _chosen(loaded: dict[Any, Any], where: str, *, take: Take | None) -> dict[Any, Any]:
    """Returns the state dict inside the dict of a training script. Raises UserError if there are several of one model
    and `take` does not decide."""
    found = sorted(_state_dicts(loaded), key=lambda one: one.rank) if loaded else []
    if not found or not found[0].path:
        if take:
            raise UserError(f"{where!r} holds one set of weights and does not say which; leave out --take")
        return loaded
    raw, mean = ([one for one in found if one.is_averaged is kind] for kind in (False, True))
    if raw:
        mean = [one for one in mean if one.is_of_the_model_of(raw[0])]
    if raw and mean and take is None:
        raise FlagNeededError(
            f"{where!r} holds the raw weights ({raw[0].where}) and their average over training ({mean[0].where}); give "
            "--take raw or --take averaged"
        )
    if take and not (mean if take == "averaged" else raw):
        what = "averaged weights" if take == "averaged" else "raw weights"
        raise UserError(f"{where!r} holds no {what}; it has {', '.join(map(str, loaded))[:200]}; leave out --take")
    first, *others = mean if take == "averaged" or not raw else raw
    if same := [one for one in others if one.names == first.names]:
        raise UserError(
            f"{where!r} holds several weights of one model, {first.where} and {same[0].where}, and does not say which "
            "to take; save one of them alone"
        )
    return first.tensors


def _refuse_inflated(path: Path) -> None:
    """Raises InvalidDataError for compressed members, which would be inflated in memory; torch.save compresses none."""
    with readable(repr(str(path))), open_local_file(path) as file:
        is_zip = file.read(len(_ZIP)) == _ZIP
    if is_zip:
        try:
            open_zip(path, is_stored=True).close()
        except UserError as error:
            if isinstance(error.__cause__, Exception):
                what, todo = _refusal(path, error.__cause__)
                raise InvalidDataError(what, todo=todo) from error
            raise


def _refusal(path: Path, error: Exception) -> tuple[str, str]:
    """Returns why torch.load failed, and what to do: the file holds other objects than tensors, or is incomplete."""
    if isinstance(error, OSError):
        return f"{str(path)!r} cannot be read ({error.strerror})", "give a file that this user may read"
    if "nsupported" not in str(error):
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        return f"{str(path)!r} is cut off, or no file of PyTorch's ({reason})", "fetch it again"
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    holds = f"it also holds a {found[1]}" if found else type(error).__name__
    refusal = f"{str(path)!r} cannot be read as tensors alone ({holds})"
    return f"{refusal}; reading more would run code from the file", "save its state dict, better as safetensors"


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
    """Returns the bytes of a tensor's values and of its storage, which has fewer if one value is repeated (an expanded
    tensor)."""
    return tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
