"""Writes a folder of weights, ours or another library's, whole or absent."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from pipeline.models.weights.safetensors import head_of
from pipeline.models.weights.safetensors_stream import parts_of
from pipeline.models.weights.tensor_checks import Shapes, refuse_not_finite
from shards.errors import UserError

CONFIG_FILE, TENSORS_FILE = "config.json", "model.safetensors"
PIXELS_FILE = "preprocessor_config.json"  # of a folder in Hugging Face's format
CONFIG_HASH = "config_sha256"  # in the metadata of the tensors
MOST_DESCRIPTION_BYTES = 64 << 20
_NAMES = (TENSORS_FILE, CONFIG_FILE, PIXELS_FILE)


def write_folder(
    folder: Path,
    *,
    description: Mapping[str, Any],
    shapes: Shapes,
    tensors: Iterable[tuple[str, torch.Tensor]],
    pixels: Mapping[str, Any] | None = None,
) -> None:
    """`config.json`, `model.safetensors` and, if `pixels` is given, `preprocessor_config.json`.

    `tensors` come in the order of `shapes`, and each is written before the next is read: at most two are in memory.
    Whole or absent: earlier files are removed first, and the tensors, which know their config.json by its hash, come
    last. A folder that is left half-way has no tensors. Raises UserError if it cannot be made or written to, and
    InvalidDataError for a tensor that is not finite.
    """
    _make_folder(folder)
    texts = {CONFIG_FILE: description} | ({PIXELS_FILE: pixels} if pixels is not None else {})
    contents = {name: (json.dumps(text, indent=1, allow_nan=False) + "\n").encode() for name, text in texts.items()}
    _refuse_long(folder, contents)
    metadata = {CONFIG_HASH: hashlib.sha256(contents[CONFIG_FILE]).hexdigest(), "format": "pt"}
    try:
        for name, content in contents.items():
            (folder / f"{name}.part").write_bytes(content)
        with (folder / f"{TENSORS_FILE}.part").open("wb") as file:
            file.writelines(parts_of(head_of(shapes, metadata=metadata), _checked(tensors, shapes, folder)))
        for name in _NAMES:
            (folder / name).unlink(missing_ok=True)
        for name in (*contents, TENSORS_FILE):
            (folder / f"{name}.part").replace(folder / name)
    except BaseException:
        for name in (*contents, TENSORS_FILE):
            with suppress(OSError):
                (folder / f"{name}.part").unlink(missing_ok=True)
        with suppress(OSError):  # there was more in it
            folder.rmdir()
        raise


def _make_folder(folder: Path) -> None:
    """UserError if it cannot be made or written to, or has a folder in the place of a file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = [name for name in _NAMES if (folder / name).is_dir()]
    except OSError as error:
        raise UserError(
            f"no folder can be made at {str(folder)!r}: {error.strerror}; give another one, "
            "which this user may write to"
        ) from error
    if taken:
        raise UserError(f"{taken[0]} in {str(folder)!r} is a folder, not a file; move it away, or give another folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{str(folder)!r} cannot be written to; give another one, which this user may write to")


def _refuse_long(folder: Path, contents: Mapping[str, bytes]) -> None:
    for name, content in contents.items():
        if len(content) > MOST_DESCRIPTION_BYTES:
            raise UserError(
                f"{name} for {str(folder)!r} has {len(content):,} bytes; allowed: {MOST_DESCRIPTION_BYTES:,}, the most "
                "that are read again; give fewer or shorter names of classes"
            )


def _checked(tensors: Iterable[tuple[str, torch.Tensor]], shapes: Shapes, folder: Path) -> Iterator[torch.Tensor]:
    """The tensors, each of which must be finite, and the one that the head of the file announces."""
    for (name, shape), (given, tensor) in zip(shapes.items(), tensors, strict=True):
        if (given, tuple(tensor.shape), tensor.dtype) != (name, shape, torch.float32):
            raise ValueError(f"{given} is {tensor.dtype} {list(tensor.shape)}, not {name}, float32 {list(shape)}")
        yield refuse_not_finite(tensor, f"{name} for {str(folder)!r}")
