"""The manifest of a checkpoint from what all ranks report about their files. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.checkpoints.manifest import (
    FORMAT,
    CheckpointId,
    FileRecord,
    FragmentLocation,
    LogicalTensor,
    Manifest,
)
from pipeline.checkpoints.rank_file_out import RankReport
from pipeline.checkpoints.saved_job import SavedJob
from pipeline.checkpoints.slots import MASTER
from pipeline.data.position import StreamPosition


def draft_manifest(
    checkpoint_id: CheckpointId,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    position: StreamPosition,
    num_updates: int,
    job: SavedJob,
    losses: tuple[float, ...] = (),
    record: dict[str, Any],
) -> Manifest:
    """A manifest before any file is written: all that rank 0 knows when a save begins."""
    return Manifest(
        format=FORMAT,
        id=checkpoint_id,
        tensors={name: LogicalTensor(shape=shape, dtype="float32", slots={}) for name, shape in shapes.items()},
        files={},
        moments=(),
        num_updates=num_updates,
        num_samples=position.next_step * position.global_batch,
        position=position,
        job=job,
        losses=losses,
        record=record,
    )


def with_reports(draft: Manifest, reports: Sequence[RankReport]) -> Manifest:
    """The manifest of a checkpoint from its draft and every rank's report. KeyError for a tensor that is not in the
    draft, ValueError for a file whose checksums do not fit its size."""
    slots: dict[str, dict[str, list[FragmentLocation]]] = {name: {} for name in draft.tensors}
    for report in reports:
        for name, slot, offset, start, length in report.pieces:
            found = FragmentLocation(file=report.file, offset=offset, start=start, length=length)
            slots[name].setdefault(slot, []).append(found)
    moments = sorted({slot for locations in slots.values() for slot in locations} - {MASTER})
    tensors = {}
    for name, tensor in draft.tensors.items():
        locations = {slot: tuple(sorted(found, key=lambda p: p.start)) for slot, found in slots[name].items()}
        tensors[name] = replace(tensor, slots=locations)
    files = {report.file: FileRecord(**vars(report.record)) for report in reports}
    return replace(draft, tensors=tensors, files=files, moments=tuple(moments))
