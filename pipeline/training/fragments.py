"""What a rank writes into a checkpoint: its fragments as one safetensors file, and where in it each one lies. Pure."""

import json
from dataclasses import dataclass
from typing import Any

from safetensors.torch import save

from pipeline.training.manifest import FORMAT, CheckpointId, FileRecord, LogicalTensor, Manifest, Place
from pipeline.training.zero_state import MASTER, Fragment

FLOAT_BYTES = 4
Piece = tuple[str, str, int, int, int]


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands when it is saved."""

    step: int
    num_updates: int
    num_samples: int


def pack_fragments(fragments: list[Fragment]) -> tuple[bytes, list[Piece]]:
    """The file's bytes, and of every piece (tensor, slot, byte offset in the file, first element, elements)."""
    tensors = {
        f"{slot}:{fragment.name}": view.detach().cpu().contiguous()
        for fragment in fragments
        for slot, view in fragment.slots.items()
    }
    data = save(tensors)
    offsets = tensor_offsets(data)
    pieces = [
        (fragment.name, slot, offsets[f"{slot}:{fragment.name}"], fragment.start, fragment.length)
        for fragment in fragments
        for slot in fragment.slots
    ]
    return data, pieces


def assemble_manifest(
    place: CheckpointId,
    reports: list[dict[str, Any]],
    *,
    position: Position,
    shapes: dict[str, tuple[int, ...]],
    data_state: dict[str, Any],
    record: dict[str, Any],
) -> Manifest:
    """The manifest of a checkpoint from every rank's report: {file, sha256, num_bytes, pieces}."""
    slots: dict[str, dict[str, list[Place]]] = {name: {} for name in shapes}
    for report in reports:
        for name, slot, offset, start, length in report["pieces"]:
            found = Place(file=report["file"], offset=offset, start=start, length=length)
            slots[name].setdefault(slot, []).append(found)
    moments = sorted({slot for places in slots.values() for slot in places} - {MASTER})
    tensors = {}
    for name, shape in shapes.items():
        places = {slot: tuple(sorted(found, key=lambda p: p.start)) for slot, found in slots[name].items()}
        tensors[name] = LogicalTensor(shape=shape, dtype="float32", slots=places)
    files = {r["file"]: FileRecord(sha256=r["sha256"], num_bytes=r["num_bytes"]) for r in reports}
    return Manifest(
        format=FORMAT,
        id=place,
        tensors=tensors,
        files=files,
        moments=tuple(moments),
        num_updates=position.num_updates,
        num_samples=position.num_samples,
        data_state=data_state,
        record=record,
    )


def tensor_offsets(data: bytes) -> dict[str, int]:
    """Byte offset in the file of every tensor of a safetensors file (8-byte header length, JSON header, data)."""
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    return {
        name: 8 + header_bytes + int(entry["data_offsets"][0]) for name, entry in header.items() if name[:2] != "__"
    }
