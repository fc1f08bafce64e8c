"""Opens a file of named tensors by its suffix: safetensors (one file, or several with an index), PyTorch's or .npz."""

from pathlib import Path
from typing import Any

import torch

from pipeline.models.conversion.config import Take
from pipeline.models.conversion.tensor_file import TensorFile, bare_name, json_object, readable, whole_numbers_error
from pipeline.models.conversion.torch_file import open_torch_file
from pipeline.models.conversion.zip_file import open_npz_file
from pipeline.models.weights.safetensors import MOST_TENSORS, open_safetensors
from shards.errors import InvalidDataError, UserError
from shards.schema.config_values import shown_value

SUFFIXES = (".npz", ".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".pth.tar")
# The first tensor of timm's ViTs. What stands before it is the name of a training script for the model.
_FIRST = ".patch_embed.proj.weight"


def open_safetensors_file(path: Path) -> TensorFile:
    """The tensors in one file. Raises UserError if it is missing, or its header does not describe it."""
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
    """The tensors of all files that an index names. Raises UserError for an invalid index and for missing files.

    The files lie beside their index: a name with a folder in it is refused.
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


def open_tensor_file(path: Path, *, take: Take | None = None) -> TensorFile:
    """The tensors in a file, without the prefixes that training scripts add. `take`: which ones of a PyTorch file
    that holds the raw and the averaged weights. UserError if the file is missing or cannot be read."""
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
    """The same tensors without such prefixes. UserError if two would then have one name."""
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
