"""Writes safetensors files as a stream: the length of the header (8 bytes), a JSON header, then tensor after tensor.

The rank files of checkpoints and the weights are both written here. All tensors are float32.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

FLOAT_BYTES = 4
_ALIGNMENT = 8  # of the header, so that the tensors can be mapped


@dataclass(frozen=True, kw_only=True)
class Head:
    """The first bytes of a file, the byte offset in it at which each tensor begins, and the bytes of the whole file."""

    data: bytes
    offsets: Mapping[str, int]
    num_bytes: int


def head_of(shapes: Mapping[str, tuple[int, ...]], *, metadata: Mapping[str, str] | None = None) -> Head:
    """The head of a file with these tensors, in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begins, begin = {}, 0
    for name, shape in shapes.items():
        end = begin + torch.Size(shape).numel() * FLOAT_BYTES
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
        begins[name], begin = begin, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    data = len(text).to_bytes(8, "little") + text
    offsets = {name: len(data) + first for name, first in begins.items()}
    return Head(data=data, offsets=offsets, num_bytes=len(data) + begin)


def parts_of(head: Head, tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of the file in order. Each tensor is copied out of its device, and released, when its turn comes."""
    yield memoryview(head.data)
    for tensor in tensors:
        yield tensor.detach().cpu().contiguous().numpy().data.cast("B")
