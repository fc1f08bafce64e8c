"""Fragments of logical tensors: what each rank saves of them, and whole tensors read back from all ranks' files.

A rank's fragments form one safetensors file. Whole tensors are read one after the other, as a weights file has them: of
ViT-H/14 under ZeRO-3, 512 ranks hold 184,000 fragments, so tensors are read in groups, each with all the pieces that
one file has of it in one request. That is at most groups x files requests, with one group in memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from pipeline.checkpoints.manifest import CheckpointManifest
from pipeline.checkpoints.rank_file_in import RankFiles
from pipeline.checkpoints.rank_file_out import Piece
from pipeline.models.weights.safetensors import parts_of
from pipeline.models.weights.safetensors_head import FLOAT_BYTES, SafetensorsHead, head_of

_GROUP_BYTES = 1 << 30


def tensors_in_order(files: RankFiles, manifest: CheckpointManifest, *, slot: str) -> Callable[[str], torch.Tensor]:
    """A function that returns the tensor of a name, float32, in its own shape: quickly if it is asked for the names in
    the manifest's order, each once."""
    names, held = list(manifest.tensors), dict[str, torch.Tensor]()

    def tensor(name: str) -> torch.Tensor:
        if name not in held:
            held.clear()
            held.update(files.tensors(_group(manifest, names[names.index(name) :]), slot=slot))
        return held.pop(name)

    return tensor


def _group(manifest: CheckpointManifest, names: list[str]) -> list[str]:
    """The first names, with at most _GROUP_BYTES together, at least one."""
    num_bytes = 0
    for number, name in enumerate(names):
        num_bytes += torch.Size(manifest.tensors[name].shape).numel() * FLOAT_BYTES
        if number and num_bytes > _GROUP_BYTES:
            return names[:number]
    return names


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Elements `start` .. `start + length - 1` of a logical tensor, flattened, as this rank holds them.

    `slots`: flat views into the engine's own buffers, by name: `master`, the optimiser's moments, and `average` if the
    weights are averaged. All are float32, but a moment may be bfloat16; files have its values as float32.
    """

    name: str
    start: int
    length: int
    slots: dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """A rank's file, laid out but not copied: its head, the live views that follow, and the offset of each piece.

    `pieces`: one for each view.
    """

    head: SafetensorsHead
    views: tuple[torch.Tensor, ...]
    pieces: tuple[Piece, ...]

    def parts(self) -> Iterator[memoryview]:
        """The file's bytes in order, one tensor at a time, so that no more than one is copied out of a GPU at once."""
        return parts_of(self.head, self.views)


def lay_out(fragments: list[Fragment]) -> RankFile:
    """The safetensors file of these fragments."""
    named = [(fragment, slot, view) for fragment in fragments for slot, view in fragment.slots.items()]
    for fragment, slot, view in named:
        if view.dtype not in (torch.float32, torch.bfloat16) or view.numel() != fragment.length:
            raise ValueError(
                f"{slot} of {fragment.name} is {view.dtype} {list(view.shape)}; allowed: {fragment.length} float32 or "
                "bfloat16"
            )
    head = head_of({f"{slot}:{fragment.name}": (fragment.length,) for fragment, slot, _ in named})
    return RankFile(
        head=head,
        views=tuple(view for _, _, view in named),
        pieces=tuple((f.name, slot, head.offsets[f"{slot}:{f.name}"], f.start, f.length) for f, slot, _ in named),
    )
