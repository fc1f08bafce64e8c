"""Whole tensors of a checkpoint, one after the other, as a weights file has them.

Of ViT-H/14 under ZeRO-3, 512 ranks hold 184,000 fragments. The tensors are read in groups, each with all the pieces
that one file has of it in one request: at most groups x files requests, and one group in memory.
"""

from collections.abc import Callable

import torch

from pipeline.checkpoints.manifest import Manifest
from pipeline.checkpoints.rank_file_in import RankFiles
from pipeline.models.weights.safetensors import FLOAT_BYTES

_GROUP_BYTES = 1 << 30


def tensors_in_order(files: RankFiles, manifest: Manifest, *, slot: str) -> Callable[[str], torch.Tensor]:
    """A function that returns the tensor of a name, float32, in its own shape: quickly if it is asked for the names in
    the manifest's order, each once."""
    names, held = list(manifest.tensors), dict[str, torch.Tensor]()

    def tensor(name: str) -> torch.Tensor:
        if name not in held:
            held.clear()
            held.update(files.tensors(_group(manifest, names[names.index(name) :]), slot=slot))
        return held.pop(name)

    return tensor


def _group(manifest: Manifest, names: list[str]) -> list[str]:
    """The first names, with at most _GROUP_BYTES together, at least one."""
    num_bytes = 0
    for number, name in enumerate(names):
        num_bytes += torch.Size(manifest.tensors[name].shape).numel() * FLOAT_BYTES
        if number and num_bytes > _GROUP_BYTES:
            return names[:number]
    return names
