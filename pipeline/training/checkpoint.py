"""Sharded checkpoints: each rank writes the fragments it owns, the manifest comes last, loading verifies checksums.

Any number of ranks, ZeRO stage or optimiser reads any checkpoint: fragments are parts of logical tensors, addressed by
byte. Works on a folder and on S3 alike, since it needs only whole-or-absent writes (design section 6).
"""

import hashlib
import json
import logging
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from pipeline.collectives import all_agree, broadcast_json, gather_json
from pipeline.training.manifest import (
    ATTEMPTS,
    FORMAT,
    MANIFEST_NAME,
    Attempt,
    CheckpointId,
    FileRecord,
    LogicalTensor,
    Manifest,
    Place,
    attempt_from_json,
    attempt_to_json,
    id_from_path,
    manifest_from_json,
    manifest_to_json,
    next_token,
    overlapping,
    standing_checkpoints,
)
from pipeline.training.zero_state import MASTER, Fragment
from pipeline.world import World
from shards.errors import UserError
from shards.store import MissingObjectError, Store

log = logging.getLogger(__name__)
_FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """A checkpoint every `every_steps` and at the end; the newest `keep_newest` are kept, and every `keep_every`-th
    step for good (0: none). `url`: a folder or s3://bucket/prefix instead of RUN/checkpoints."""

    every_steps: int = 1000
    keep_newest: int = 2
    keep_every: int = 0
    url: str = ""

    def __post_init__(self) -> None:
        if self.every_steps < 1 or self.keep_newest < 1 or self.keep_every < 0:
            raise UserError(f"allowed are every_steps and keep_newest of 1 or more, keep_every of 0 or more: {self}")


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands when it is saved."""

    step: int
    num_updates: int
    num_samples: int


class Checkpoints:
    """The checkpoints of one run, seen by all ranks together: every public method but `open` is collective."""

    def __init__(self, store: Store, world: World, *, run_dir: Path) -> None:
        self.store, self.world, self.run_dir = store, world, run_dir
        self.attempt = Attempt(token="", resumed_from=None)
        self._read_ahead: dict[str, bytes] = {}

    @classmethod
    def start(cls, store: Store, world: World, *, run_dir: Path) -> tuple["Checkpoints", Manifest | None]:
        """Registers a new attempt, and finds the newest checkpoint that stands and verifies (None: from scratch)."""
        reader = cls(store, world, run_dir=run_dir)
        manifest = reader._newest_verified()
        token = next_token(read_attempts(store), nonce=secrets.token_hex(4)) if world.is_first else ""
        token = broadcast_json(token, device=world.device)
        reader.attempt = Attempt(token=token, resumed_from=manifest.id if manifest else None)
        if world.is_first:
            store.write(f"{ATTEMPTS}/{token}.json", attempt_to_json(reader.attempt))
        return reader, manifest

    def newest(self) -> Manifest:
        """The newest committed checkpoint that stands (not collective, not verified)."""
        standing = standing_checkpoints(list_committed(self.store), read_attempts(self.store))
        return manifest_from_json(self.store.read(f"{standing[0].folder}/{MANIFEST_NAME}"))

    def save(
        self,
        fragments: list[Fragment],
        *,
        position: Position,
        shapes: dict[str, tuple[int, ...]],
        data_state: dict[str, Any],
        record: dict[str, Any],
    ) -> Manifest | None:
        """Writes and commits a checkpoint; None (and an error in the log) where any rank could not write its part."""
        place = CheckpointId(step=position.step, attempt=self.attempt.token)
        try:
            report = self._write_fragments(place, fragments)
        except (OSError, UserError) as error:
            report = {"error": f"rank {self.world.rank}: {error}"}
        reports = gather_json(report, device=self.world.device)
        errors = [r["error"] for r in reports if "error" in r]
        manifest = None
        if not errors:
            manifest = _assemble(place, reports, position=position, shapes=shapes, data_state=data_state, record=record)
            if self.world.is_first:
                try:
                    self.store.write(f"{place.folder}/{MANIFEST_NAME}", manifest_to_json(manifest))
                except (OSError, UserError) as error:
                    errors = [f"manifest: {error}"]
        errors = broadcast_json(errors, device=self.world.device)
        if errors:
            log.error("checkpoint of step %d was not committed: %s", position.step, "; ".join(errors))
            return None
        return manifest

    def load(self, manifest: Manifest, fragment: Fragment, slot: str) -> None:
        """Fills one slot of a fragment from wherever its elements lie (not collective)."""
        places = manifest.tensors[fragment.name].slots[slot]
        filled = 0
        for place, first, count in overlapping(places, start=fragment.start, length=fragment.length):
            begin = place.offset + (first - place.start) * _FLOAT_BYTES
            data = self._bytes(f"{manifest.id.folder}/{place.file}", begin, begin + count * _FLOAT_BYTES)
            inside = first - fragment.start
            fragment.slots[slot][inside : inside + count].copy_(torch.frombuffer(data, dtype=torch.float32))
            filled += count
        if filled != fragment.length:
            raise ValueError(f"{manifest.id.folder} holds {filled} of {fragment.length} elements of {fragment.name}")

    def loaded(self) -> None:
        """Frees what was read ahead while verifying."""
        self._read_ahead.clear()

    def retire(self, config: CheckpointConfig) -> None:
        """Deletes checkpoints that retention does not keep; rank 0 alone does it, after a commit."""
        if not self.world.is_first:
            return
        standing = standing_checkpoints(list_committed(self.store), read_attempts(self.store))
        for old in standing[config.keep_newest :]:
            if config.keep_every and old.step % config.keep_every == 0:
                continue
            # Manifest first: from then on the checkpoint does not exist, whatever of its files is still there.
            files = sorted(self.store.list(old.folder + "/"), key=lambda path: not path.endswith(MANIFEST_NAME))
            for path in files:
                self.store.delete(path)

    def _write_fragments(self, place: CheckpointId, fragments: list[Fragment]) -> dict[str, Any]:
        name = f"rank-{self.world.rank:05d}.safetensors"
        tensors = {
            f"{slot}:{fragment.name}": view.detach().cpu().contiguous()
            for fragment in fragments
            for slot, view in fragment.slots.items()
        }
        data = save(tensors)
        self.store.write(f"{place.folder}/{name}", data)
        offsets = _tensor_offsets(data)
        pieces = [
            [fragment.name, slot, offsets[f"{slot}:{fragment.name}"], fragment.start, fragment.length]
            for fragment in fragments
            for slot in fragment.slots
        ]
        return {
            "file": name,
            "sha256": hashlib.sha256(data).hexdigest(),
            "num_bytes": len(data),
            "pieces": pieces,
        }

    def _newest_verified(self) -> Manifest | None:
        candidates: list[str] = []
        if self.world.is_first:
            standing = standing_checkpoints(list_committed(self.store), read_attempts(self.store))
            candidates = [place.folder for place in standing]
        for folder in broadcast_json(candidates, device=self.world.device):
            manifest, fault = None, ""
            try:
                manifest = manifest_from_json(self.store.read(f"{folder}/{MANIFEST_NAME}"))
                fault = self._verify_share(manifest)
            except (ValueError, MissingObjectError) as error:
                fault = str(error)
            if all_agree(not fault, device=self.world.device) and manifest:
                return manifest
            self._read_ahead.clear()
            faults = [f for f in gather_json(fault, device=self.world.device) if f]
            if self.world.is_first:
                log.warning("passing over checkpoint %s: %s", folder, "; ".join(faults))
        return None

    def _verify_share(self, manifest: Manifest) -> str:
        """Checks every num_ranks-th file; what was read is kept, since a resumed rank mostly needs its own file."""
        for name in sorted(manifest.files)[self.world.rank :: self.world.num_ranks]:
            record = manifest.files[name]
            path = f"{manifest.id.folder}/{name}"
            data = self.store.read(path)
            if len(data) != record.num_bytes or hashlib.sha256(data).hexdigest() != record.sha256:
                return f"{path} does not have the bytes its manifest promises"
            self._read_ahead[path] = data
        return ""

    def _bytes(self, path: str, begin: int, end: int) -> bytearray:
        ahead = self._read_ahead.get(path)
        return bytearray(ahead[begin:end] if ahead is not None else self.store.read_range(path, begin, end))


def list_committed(store: Store) -> list[CheckpointId]:
    """Every checkpoint that has a manifest."""
    found = [id_from_path(path) for path in store.list()]
    return [place for place in found if place is not None]


def read_attempts(store: Store) -> list[Attempt]:
    """Every attempt on record, in order of start."""
    return [attempt_from_json(store.read(path)) for path in sorted(store.list(f"{ATTEMPTS}/"))]


def read_tensor(store: Store, manifest: Manifest, name: str, *, slot: str = MASTER) -> torch.Tensor:
    """One whole logical tensor of a checkpoint, float32, in its own shape."""
    tensor = manifest.tensors[name]
    flat = torch.empty(int(torch.Size(tensor.shape).numel()))
    for place in tensor.slots[slot]:
        path = f"{manifest.id.folder}/{place.file}"
        data = bytearray(store.read_range(path, place.offset, place.offset + place.length * _FLOAT_BYTES))
        flat[place.start : place.start + place.length] = torch.frombuffer(data, dtype=torch.float32)
    return flat.reshape(tensor.shape)


def _assemble(
    place: CheckpointId,
    reports: list[dict[str, Any]],
    *,
    position: Position,
    shapes: dict[str, tuple[int, ...]],
    data_state: dict[str, Any],
    record: dict[str, Any],
) -> Manifest:
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


def _tensor_offsets(data: bytes) -> dict[str, int]:
    """Byte offset in the file of every tensor of a safetensors file (8-byte header length, JSON header, data)."""
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    return {
        name: 8 + header_bytes + int(entry["data_offsets"][0]) for name, entry in header.items() if name[:2] != "__"
    }
