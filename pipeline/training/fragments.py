"""What a rank writes into a checkpoint: its fragments as one safetensors file, and the offset of each. Pure."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.data.position import StreamPosition
from pipeline.models.safetensors_stream import Head, head_of, parts_of
from pipeline.training.manifest import (
    FORMAT,
    PART_BYTES,
    CheckpointId,
    FileRecord,
    FragmentLocation,
    LogicalTensor,
    Manifest,
)
from pipeline.training.saved_job import SavedJob
from pipeline.training.zero_state import MASTER, Fragment

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


class PartDigests:
    """The sha256 of each part of a file, which is written in pieces of any size."""

    def __init__(self, part_bytes: int = PART_BYTES) -> None:
        self.part_bytes, self.num_bytes = part_bytes, 0
        self._done: list[str] = []
        self._digest = hashlib.sha256()

    def update(self, data: memoryview) -> None:
        """More bytes of the file."""
        begin = 0
        while begin < len(data):
            end = min(len(data), begin + self.part_bytes - self.num_bytes % self.part_bytes)
            self._digest.update(data[begin:end])
            self.num_bytes += end - begin
            begin = end
            if self.num_bytes % self.part_bytes == 0:
                self._done.append(self._digest.hexdigest())
                self._digest = hashlib.sha256()

    def record(self) -> dict[str, Any]:
        """The fields of the file's FileRecord."""
        last = [self._digest.hexdigest()] if self.num_bytes % self.part_bytes else []
        return {"num_bytes": self.num_bytes, "part_bytes": self.part_bytes, "sha256": [*self._done, *last]}


def assemble_manifest(
    checkpoint_id: CheckpointId,
    reports: list[dict[str, Any]],
    *,
    shapes: dict[str, tuple[int, ...]],
    position: StreamPosition,
    num_updates: int,
    job: SavedJob,
    record: dict[str, Any],
) -> Manifest:
    """The manifest of a checkpoint from every rank's report: {file, record, pieces}."""
    slots: dict[str, dict[str, list[FragmentLocation]]] = {name: {} for name in shapes}
    for report in reports:
        for name, slot, offset, start, length in report["pieces"]:
            found = FragmentLocation(file=report["file"], offset=offset, start=start, length=length)
            slots[name].setdefault(slot, []).append(found)
    moments = sorted({slot for locations in slots.values() for slot in locations} - {MASTER})
    tensors = {}
    for name, shape in shapes.items():
        locations = {slot: tuple(sorted(found, key=lambda p: p.start)) for slot, found in slots[name].items()}
        tensors[name] = LogicalTensor(shape=shape, dtype="float32", slots=locations)
    files = {r["file"]: FileRecord(**{**r["record"], "sha256": tuple(r["record"]["sha256"])}) for r in reports}
    return Manifest(
        format=FORMAT,
        id=checkpoint_id,
        tensors=tensors,
        files=files,
        moments=tuple(moments),
        num_updates=num_updates,
        num_samples=position.next_step * position.global_batch,
        position=position,
        job=job,
        record=record,
    )
