"""A fragment of a logical tensor in memory: what a rank saves, and what it fills when it resumes."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Elements `start` .. `start + length - 1` of a logical tensor, flattened, as this rank holds them.

    `slots`: flat float32 views into the engine's own buffers, by name: `master`, the optimiser's moments, and
    `average` if the weights are averaged.
    """

    name: str
    start: int
    length: int
    slots: dict[str, torch.Tensor]
