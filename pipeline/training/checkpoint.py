"""Sharded checkpoints: each rank writes the fragments it owns, the manifest comes last, loading verifies checksums.

Any number of ranks, under any ZeRO stage and optimiser, reads any checkpoint: fragments of logical tensors are
addressed by byte. It works in folders and on S3 alike, since it needs no more than writes that are whole or absent.
"""

import hashlib
import logging
import secrets
from pathlib import Path
from typing import Any

import torch

from pipeline.collectives import all_agree, broadcast_json, gather_json
from pipeline.data.position import StreamPosition
from pipeline.models.safetensors_stream import FLOAT_BYTES
from pipeline.training.config import CheckpointConfig
from pipeline.training.fragments import assemble_manifest, lay_out
from pipeline.training.ledger import last_line
from pipeline.training.manifest import (
    ATTEMPTS,
    MANIFEST_NAME,
    Attempt,
    CheckpointId,
    Manifest,
    attempt_from_json,
    attempt_to_json,
    id_from_path,
    is_checkpoint_file,
    manifest_from_json,
    manifest_to_json,
    next_token,
    overlapping,
    standing_checkpoints,
    token_order,
)
from pipeline.training.saved_job import SavedJob
from pipeline.training.zero_state import MASTER, Fragment
from pipeline.world import World
from shards.errors import StorageError, UserError, WillNotSucceedError
from shards.store import MissingObjectError, Store

log = logging.getLogger(__name__)
_PART_BYTES = 64 << 20  # of a file being verified
_MOST_READ_AHEAD_BYTES = 1 << 30  # enough for a share of many ranks' files; few ranks' large files are read twice


class Checkpoints:
    """The checkpoints of one run, seen by all ranks together. Every public method but `load`, `loaded` and `retire` is
    collective."""

    def __init__(self, store: Store, world: World, *, run_dir: Path) -> None:
        self.store, self.world, self.run_dir = store, world, run_dir
        self.attempt = Attempt(token="", resumed_from=None)
        self._read_ahead: dict[str, bytes] = {}

    def newest(self) -> Manifest | None:
        """The newest standing checkpoint that every rank can verify; None if none was ever committed."""
        candidates: list[str] = []
        if self.world.is_first:
            standing = standing_checkpoints(list_committed(self.store), read_attempts(self.store))
            candidates = [each.folder for each in standing]
        candidates = broadcast_json(candidates, device=self.world.device)
        for folder in candidates:
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
                log.warning("skipping checkpoint %s: %s", folder, "; ".join(faults))
        where = self.store.url
        if candidates:
            raise WillNotSucceedError(
                f"none of the {len(candidates)} checkpoints in {where} can be used (see above); nothing was changed. "
                f"Repair them, or start again in another --run-dir"
            )
        if broadcast_json(bool(last_line(self.run_dir)), device=self.world.device):
            raise UserError(
                f"{self.run_dir} has recorded checkpoints, but {where} holds none that can be used; give the "
                "--checkpoint.url that the run was started with, or another --run-dir to start again"
            )
        return None

    def begin_attempt(self, resumed_from: Manifest | None) -> bool:
        """Registers this start, which resumes from a checkpoint that was found (None: there is none); False if another
        one must be found, because this one has been retired in the meantime.

        Call it once the job is accepted: a refused command must not take a run over.
        """
        token = next_token(read_attempts(self.store), nonce=secrets.token_hex(4)) if self.world.is_first else ""
        token = broadcast_json(token, device=self.world.device)
        self.attempt = Attempt(token=token, resumed_from=resumed_from.id if resumed_from else None)
        is_registered: bool = broadcast_json(
            self._register() if self.world.is_first else True, device=self.world.device
        )
        return is_registered

    def _register(self) -> bool:
        """Puts this attempt on record; False (and off the record) if an older process, still alive until it reads the
        record, has in the meantime retired the checkpoint that this attempt resumes from."""
        path = f"{ATTEMPTS}/{self.attempt.token}.json"
        self.store.write(path, attempt_to_json(self.attempt))
        origin = self.attempt.resumed_from
        if origin is None or self.store.exists(f"{origin.folder}/{MANIFEST_NAME}"):
            self.store.discard_unfinished()
            return True
        self.store.delete(path)
        return False

    def refuse_if_overtaken(self) -> None:
        """Collective. Raises WillNotSucceedError if a later attempt of this run has started elsewhere."""
        later = ""
        if self.world.is_first:
            tokens = [attempt.token for attempt in read_attempts(self.store)]
            later = max([t for t in tokens if token_order(t) > token_order(self.attempt.token)], default="")
        later = broadcast_json(later, device=self.world.device)
        if later:
            raise WillNotSucceedError(
                f"attempt {self.attempt.token} of {self.run_dir} ends here: a later one, {later}, took over the run; "
                "leave the run to it, or end it and start again"
            )

    def save(
        self,
        fragments: list[Fragment],
        *,
        shapes: dict[str, tuple[int, ...]],
        position: StreamPosition,
        num_updates: int,
        job: SavedJob,
        record: dict[str, Any],
    ) -> Manifest | None:
        """Writes and commits a checkpoint; None (and an error in the log) if any rank could not write its file."""
        self.refuse_if_overtaken()
        checkpoint_id = CheckpointId(step=position.next_step, attempt=self.attempt.token)
        try:
            report = self._write_fragments(checkpoint_id, fragments)
        except (OSError, UserError, StorageError) as error:
            report = {"error": f"rank {self.world.rank}: {error}"}
        reports = gather_json(report, device=self.world.device)
        errors = [r["error"] for r in reports if "error" in r]
        manifest = None
        if not errors:
            manifest = assemble_manifest(
                checkpoint_id,
                reports,
                shapes=shapes,
                position=position,
                num_updates=num_updates,
                job=job,
                record=record,
            )
            if self.world.is_first:
                try:
                    self.store.write(f"{checkpoint_id.folder}/{MANIFEST_NAME}", manifest_to_json(manifest))
                except (OSError, UserError, StorageError) as error:
                    errors = [f"manifest: {error}"]
        errors = broadcast_json(errors, device=self.world.device)
        if errors:
            log.error("checkpoint of step %d was not committed: %s", checkpoint_id.step, "; ".join(errors))
            return None
        return manifest

    def load(self, manifest: Manifest, fragment: Fragment, slot: str) -> None:
        """Fills one slot of a fragment from the files that hold its elements (not collective)."""
        locations = manifest.tensors[fragment.name].slots[slot]
        filled = 0
        for location, first, count in overlapping(locations, start=fragment.start, length=fragment.length):
            begin = location.offset + (first - location.start) * FLOAT_BYTES
            data = self._bytes(f"{manifest.id.folder}/{location.file}", begin, begin + count * FLOAT_BYTES)
            inside = first - fragment.start
            fragment.slots[slot][inside : inside + count].copy_(torch.frombuffer(data, dtype=torch.float32))
            filled += count
        if filled != fragment.length:
            raise ValueError(f"{manifest.id.folder} holds {filled} of {fragment.length} elements of {fragment.name}")

    def loaded(self) -> None:
        """Frees what was read ahead while verifying."""
        self._read_ahead.clear()

    def retire(self, config: CheckpointConfig) -> None:
        """Deletes what retention does not keep, and what killed or overtaken attempts left; on rank 0, after a commit.

        If the store refuses, that costs space and not the run.
        """
        if not self.world.is_first:
            return
        try:
            attempts = {attempt.token: attempt for attempt in [*read_attempts(self.store), self.attempt]}
            standing = standing_checkpoints(list_committed(self.store), list(attempts.values()))
            kept = {each.folder for each in standing[: config.keep_newest]}
            kept |= {p.folder for p in standing if config.keep_every and p.step % config.keep_every == 0}
            files = [path for path in self.store.list() if is_checkpoint_file(path)]
            unwanted = [path for path in files if path.rpartition("/")[0] not in kept and not self._is_later(path)]
            # Manifests first: without it, a checkpoint does not exist, whatever files of it remain.
            for path in sorted(unwanted, key=lambda path: not path.endswith(MANIFEST_NAME)):
                self.store.delete(path)
        except (OSError, UserError, StorageError) as error:
            log.warning("old checkpoints could not be deleted: %s", error)

    def _is_later(self, path: str) -> bool:
        """Whether a checkpoint's file is of an attempt after this one, which may still be writing."""
        token = path.split("/")[1].removeprefix("attempt-")
        return token_order(token) > token_order(self.attempt.token)

    def _write_fragments(self, checkpoint_id: CheckpointId, fragments: list[Fragment]) -> dict[str, Any]:
        name = f"rank-{self.world.rank:05d}.safetensors"
        laid_out, digest = lay_out(fragments), hashlib.sha256()
        with self.store.create(f"{checkpoint_id.folder}/{name}") as file:
            for part in laid_out.parts():
                file.write(part)
                digest.update(part)
        return {
            "file": name,
            "sha256": digest.hexdigest(),
            "num_bytes": laid_out.head.num_bytes,
            "pieces": laid_out.pieces,
        }

    def _verify_share(self, manifest: Manifest) -> str:
        """Checks every num_ranks-th file and keeps what it read, since a resumed rank mostly needs its own file."""
        for name in sorted(manifest.files)[self.world.rank :: self.world.num_ranks]:
            record = manifest.files[name]
            path = f"{manifest.id.folder}/{name}"
            digest, parts = hashlib.sha256(), []
            is_kept = record.num_bytes <= _MOST_READ_AHEAD_BYTES - sum(map(len, self._read_ahead.values()))
            if self.store.size(path) != record.num_bytes:
                return f"{path} does not have the bytes its manifest promises"
            for begin in range(0, record.num_bytes, _PART_BYTES):
                part = self.store.read_range(path, begin, min(begin + _PART_BYTES, record.num_bytes))
                digest.update(part)
                parts += [part] if is_kept else []
            if digest.hexdigest() != record.sha256:
                return f"{path} does not have the bytes its manifest promises"
            if is_kept:
                self._read_ahead[path] = b"".join(parts)
        return ""

    def _bytes(self, path: str, begin: int, end: int) -> bytearray:
        ahead = self._read_ahead.get(path)
        return bytearray(ahead[begin:end] if ahead is not None else self.store.read_range(path, begin, end))


def list_committed(store: Store) -> list[CheckpointId]:
    """Every checkpoint that has a manifest."""
    found = [id_from_path(path) for path in store.list()]
    return [each for each in found if each is not None]


def read_attempts(store: Store) -> list[Attempt]:
    """Every attempt on record, in order of start."""
    return [attempt_from_json(store.read(path)) for path in sorted(store.list(f"{ATTEMPTS}/"))]


def read_tensor(store: Store, manifest: Manifest, name: str, *, slot: str = MASTER) -> torch.Tensor:
    """One whole logical tensor of a checkpoint, float32, in its own shape."""
    tensor = manifest.tensors[name]
    flat = torch.empty(int(torch.Size(tensor.shape).numel()))
    for location in tensor.slots[slot]:
        path = f"{manifest.id.folder}/{location.file}"
        data = bytearray(store.read_range(path, location.offset, location.offset + location.length * FLOAT_BYTES))
        flat[location.start : location.start + location.length] = torch.frombuffer(data, dtype=torch.float32)
    return flat.reshape(tensor.shape)
