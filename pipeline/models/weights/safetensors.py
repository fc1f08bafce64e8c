"""Safetensors files, and the checks that every reader and writer of weights shares.

The header is checked against the file before any tensor is read. The bytes of each tensor must match its type and
shape, and all tensors together must fill the file: no overlap, no gap, nothing after the last one. The format allows
headers of 100 MB; a model of 1000 layers needs 2 MB. Files are read, not mapped: if a mapped file becomes shorter, the
process is killed.

Rank files of checkpoints and weights are both written as a stream: a head (safetensors_head.py), then tensor after
tensor, all float32.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.models.weights.safetensors_head import SafetensorsHead
from shards.config_values import shown_value
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import open_local_file
from shards.files.typed_json import parse_json

TensorByName = Callable[[str], torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]
MOST_TENSORS, MOST_DIMENSIONS, MOST_NAME, MOST_LENGTH = 100_000, 16, 1_000, 1 << 31  # limits for any file
LENGTH_BYTES = 8
MOST_HEADER_BYTES = 16 << 20
_MOST_COUNT = 1 << 62
_METADATA = "__metadata__"
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def refuse_absurd_tensors(where: str, shapes: Shapes) -> None:
    """Raises InvalidDataError for more tensors, longer names or other shapes than any model's file has."""
    if len(shapes) > MOST_TENSORS:
        raise InvalidDataError(f"{where!r} has {len(shapes):,} tensors; allowed: {MOST_TENSORS:,}; fetch it again")
    for name, shape in shapes.items():
        if not 0 < len(name) <= MOST_NAME or not name.isprintable():
            raise InvalidDataError(
                f"{where!r} has a tensor called {shown_value(name)}; allowed: 1 to {MOST_NAME:,} printable characters; "
                "fetch it again"
            )
        are_lengths = all(type(length) is int and 0 <= length <= MOST_LENGTH for length in shape)
        if not are_lengths or len(shape) > MOST_DIMENSIONS:
            raise InvalidDataError(
                f"{name} in {where!r} declares the shape {shown_value(list(shape))}; allowed: up to {MOST_DIMENSIONS} "
                f"dimensions of 0 to {MOST_LENGTH:,}; the file is damaged, or made to do damage: fetch it again"
            )


def refuse_misfits(where: str, *, found: Shapes, wanted: Shapes, advice: str = "") -> None:
    """Raises a UserError that lists the tensors that have another shape, are missing or are unexpected. `advice`: what
    the user should do."""
    missing = [f"{name} {list(wanted[name])} is not there" for name in wanted if name not in found]
    extra = [f"{name} {list(found[name])} is not in the model" for name in found if name not in wanted]
    shapes = [
        f"{name} is {list(found[name])}, the model needs {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if missing or extra or shapes:
        faults = shapes + missing + extra
        listed = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        default = "Give the model the sizes of the weights (--model.name, --model.width, ...), or other weights"
        raise UserError(f"the weights at {where!r} do not fit the model: {listed}. {advice or default}")


def refuse_not_finite(value: torch.Tensor, what: str) -> torch.Tensor:
    """Returns the same tensor. Raises InvalidDataError if it holds NaN or infinity.

    The check is one pass of `aminmax`, which returns NaN if any value is NaN, and is 70 times faster than `isfinite`.
    For the message, `isfinite` counts the values.
    """
    if value.numel() and not torch.stack(value.aminmax()).isfinite().all():
        num_bad = value.numel() - int(torch.isfinite(value).sum())
        raise InvalidDataError(
            f"{what} has {num_bad:,} values of {value.numel():,} that are not finite (NaN or infinite, as float32); the"
            " file is damaged or its training failed: give other weights"
        )
    return value


@dataclass(frozen=True, kw_only=True)
class TensorPlace:
    """A tensor in a file: its type, its shape, and its bytes first..end-1 of the whole file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    end: int

    def __str__(self) -> str:
        return f"{list(self.shape)} of {self.dtype} at bytes {self.first} to {self.end}"


@dataclass(frozen=True, kw_only=True)
class SafetensorsFile:
    """A safetensors file whose header has been checked."""

    path: Path
    places: Mapping[str, TensorPlace]
    metadata: Mapping[str, str]

    @property
    def shapes(self) -> Shapes:
        """The shape of each tensor."""
        return {name: place.shape for name, place in self.places.items()}

    def read(self, name: str) -> torch.Tensor:
        """Reads one tensor in its own type. Raises OSError, or EOFError if the file has become shorter since it was
        opened."""
        place = self.places[name]
        data = torch.empty(place.end - place.first, dtype=torch.uint8)
        with open_local_file(self.path) as file:
            file.seek(place.first)
            num_read = file.readinto(data.numpy().data)
        if num_read != len(data):
            raise EOFError(f"the file ends {len(data) - num_read:,} bytes before the end of {name}")
        return data.view(place.dtype).reshape(place.shape)


def open_safetensors(path: Path) -> SafetensorsFile:
    """Opens the file at `path`. Raises OSError if it cannot be read, and ValueError or InvalidDataError, which say what
    is wrong, if its header does not match the file."""
    with open_local_file(path) as file:
        num_bytes = file.seek(0, 2)
        file.seek(0)
        header = file.read(header_length(file.read(LENGTH_BYTES), num_bytes=num_bytes))
    places, metadata = read_header(header, num_bytes=num_bytes)
    refuse_absurd_tensors(str(path), {name: place.shape for name, place in places.items()})
    return SafetensorsFile(path=path, places=places, metadata=metadata)


def header_length(first_bytes: bytes, *, num_bytes: int) -> int:
    """Returns the length of the header, from the first 8 bytes. Raises ValueError if a file of `num_bytes` cannot have
    such a header."""
    declared = int.from_bytes(first_bytes, "little")
    most = min(MOST_HEADER_BYTES, num_bytes - LENGTH_BYTES)
    if not 0 < declared <= most:
        raise ValueError(f"its header declares {declared:,} bytes; allowed in a file of {num_bytes:,}: 1 to {most:,}")
    return declared


def read_header(header: bytes, *, num_bytes: int) -> tuple[Mapping[str, TensorPlace], Mapping[str, str]]:
    """Reads where each tensor is in a file of `num_bytes`, and the metadata, from the bytes of its header. Raises
    ValueError if the header does not describe such a file."""
    values = parse_json(header)
    if not isinstance(values, dict):
        raise ValueError(f"its header is {shown_value(values)}; allowed: an object")
    metadata, first = _metadata_of(values.pop(_METADATA, {})), LENGTH_BYTES + len(header)
    places = {name: _place_of(name, entry, first) for name, entry in values.items()}
    _refuse_gaps(places, first=first, end=num_bytes)
    return places, metadata


def _metadata_of(value: Any) -> Mapping[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError(f"its metadata is {shown_value(value)}; allowed: texts by name")
    return value


def _place_of(name: str, entry: Any, start: int) -> TensorPlace:
    """Reads one entry of the header; `start`: the file's first byte after the header."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{shown_value(name)} is {shown_value(entry)}; allowed: dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _TYPES:
        raise ValueError(f"{shown_value(name)} is of the type {shown_value(dtype)}; allowed: {', '.join(_TYPES)}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        said = f"the shape {shown_value(shape)} at {shown_value(offsets)}"
        raise ValueError(f"{shown_value(name)} has {said}; allowed: whole numbers of 0 or more, and two offsets")
    num_bytes = math.prod(shape) * _TYPES[dtype].itemsize
    if offsets[1] - offsets[0] != num_bytes:
        said = f"{shown_value(shape)} of {dtype}, {num_bytes} bytes, at the offsets {offsets}"
        raise ValueError(f"{shown_value(name)} is {said}, where {offsets[1] - offsets[0]} are")
    return TensorPlace(dtype=_TYPES[dtype], shape=tuple(shape), first=start + offsets[0], end=start + offsets[1])


def _are_counts(value: Any) -> bool:
    is_short = isinstance(value, list) and len(value) <= MOST_DIMENSIONS
    return is_short and all(type(one) is int and 0 <= one <= _MOST_COUNT for one in value)


def _refuse_gaps(places: Mapping[str, TensorPlace], *, first: int, end: int) -> None:
    for name, place in sorted(places.items(), key=lambda item: (item[1].first, item[1].end)):
        if place.first != first:
            raise ValueError(f"{name} begins at byte {place.first:,}, the tensor before it ends at {first:,}")
        first = place.end
    if first != end:
        raise ValueError(f"its tensors end at byte {first:,}, the file at {end:,}")


def parts_of(head: SafetensorsHead, tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    """Yields the bytes of the file in order. Each tensor is copied from its device only when its turn comes, and
    released after that; bfloat16 is widened to float32."""
    yield memoryview(head.data)
    for tensor in tensors:
        yield tensor.detach().cpu().float().contiguous().numpy().data.cast("B")
