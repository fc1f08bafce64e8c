"""Writes safetensors files as a stream: the head (safetensors_head.py), then tensor after tensor.

The rank files of checkpoints and the weights are both written here. All tensors are float32.
"""

from collections.abc import Iterable, Iterator

import torch

from pipeline.models.weights.safetensors import Head


def parts_of(head: Head, tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of the file in order. Each tensor is copied out of its device, and released, when its turn comes."""
    yield memoryview(head.data)
    for tensor in tensors:
        yield tensor.detach().cpu().contiguous().numpy().data.cast("B")
