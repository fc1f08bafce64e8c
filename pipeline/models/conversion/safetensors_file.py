"""Opens safetensors: one file, or several with an index (transformers' model.safetensors.index.json)."""

from pathlib import Path
from typing import Any

import torch

from pipeline.models.conversion.description_file import json_object
from pipeline.models.conversion.tensor_file import TensorFile, readable, whole_numbers_error
from pipeline.models.weights.safetensors import open_safetensors
from pipeline.models.weights.tensor_checks import MOST_TENSORS
from shards.errors import InvalidDataError, UserError
from shards.schema.config_values import shown_value


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
