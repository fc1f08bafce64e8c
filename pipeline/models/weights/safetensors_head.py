"""The head of a safetensors file of float32 tensors: the length of the header (8 bytes) and a JSON header. All
functions are pure.

This module does not import torch, because a process that only copies the bytes of tensors does not need it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FLOAT_BYTES = 4
_ALIGNMENT = 8  # the header's length is a multiple of this, so that the tensors can be mapped


@dataclass(frozen=True, kw_only=True)
class SafetensorsHead:
    """The first bytes of a file, the offset at which each tensor begins, and the number of bytes of the whole file."""

    data: bytes
    offsets: Mapping[str, int]
    num_bytes: int


def head_of(shapes: Mapping[str, tuple[int, ...]], *, metadata: Mapping[str, str] | None = None) -> SafetensorsHead:
    """Returns the head of a file with these tensors, in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begins, begin = {}, 0
    for name, shape in shapes.items():
        end = begin + math.prod(shape) * FLOAT_BYTES
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
        begins[name], begin = begin, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    data = len(text).to_bytes(8, "little") + text
    offsets = {name: len(data) + first for name, first in begins.items()}
    return SafetensorsHead(data=data, offsets=offsets, num_bytes=len(data) + begin)
