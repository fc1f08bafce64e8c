"""What a rank writes into a checkpoint: its fragments as one safetensors file, and the offset of each. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pipeline.checkpoints.fragment import Fragment
from pipeline.models.weights.safetensors import Head, head_of
from pipeline.models.weights.safetensors_stream import parts_of

Piece = tuple[str, str, int, int, int]


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """A rank's file, laid out but not copied: its head, the live views that follow, and the offset of each piece.

    `pieces`: one (tensor, slot, byte offset in the file, first element, number of elements) for each view.
    """

    head: Head
    views: tuple[torch.Tensor, ...]
    pieces: tuple[Piece, ...]

    def parts(self) -> Iterator[memoryview]:
        """The file's bytes in order, one tensor at a time, so that no more than one is copied out of a GPU at once."""
        return parts_of(self.head, self.views)


def lay_out(fragments: list[Fragment]) -> RankFile:
    """The safetensors file of these fragments."""
    named = [(fragment, slot, view) for fragment in fragments for slot, view in fragment.slots.items()]
    for fragment, slot, view in named:
        if view.dtype != torch.float32 or view.numel() != fragment.length:
            raise ValueError(
                f"{slot} of {fragment.name} is {view.dtype} {list(view.shape)}, not {fragment.length} float32"
            )
    head = head_of({f"{slot}:{fragment.name}": (fragment.length,) for fragment, slot, _ in named})
    return RankFile(
        head=head,
        views=tuple(view for _, _, view in named),
        pieces=tuple((f.name, slot, head.offsets[f"{slot}:{f.name}"], f.start, f.length) for f, slot, _ in named),
    )
