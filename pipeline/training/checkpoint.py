"""Sharded checkpoints: each rank writes the fragments it owns, the manifest comes last, loading verifies checksums.

Any number of ranks, under any ZeRO stage and optimiser, reads any checkpoint: fragments of logical tensors are
addressed by byte. It works in folders and on S3 alike, since it needs no more than writes that are whole or absent.
"""

import errno
import hashlib
import logging
import secrets
from pathlib import Path
from typing import Any

from pipeline.collectives import all_agree, broadcast_json, gather_json
from pipeline.data.position import StreamPosition
from pipeline.training.attempts import FAULTS, list_committed, read_attempts
from pipeline.training.config import CheckpointConfig
from pipeline.training.fence import next_token, standing_checkpoints, token_order
from pipeline.training.fragments import PartDigests, assemble_manifest, lay_out
from pipeline.training.ledger import last_line, last_saved
from pipeline.training.manifest import (
    MANIFEST_NAME,
    Attempt,
    CheckpointId,
    Manifest,
    attempt_to_json,
    is_checkpoint_file,
    is_sealed,
    manifest_from_json,
    manifest_to_json,
    overlapping,
    record_path,
)
from pipeline.training.rank_files import RankFiles
from pipeline.training.saved_job import SavedJob
from pipeline.training.zero_state import Fragment
from pipeline.world import World
from shards.errors import StorageError, UserError, WillNotSucceedError
from shards.store import Store

log = logging.getLogger(__name__)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_UNSEALED = (
    "checkpoint %s was written by an older version: its manifest has no digest of itself. Its files, and the places of "
    "all tensors in them, are checked as always; a change of its other values would not be noticed"
)
_NOT_THERE = "checkpoint %s is the last in the ledger of %s, but its manifest is not in %s; looking for an earlier one"
_UNREADABLE = (
    "%s cannot be read, so it is unknown which checkpoint this attempt resumed from: its number counts, and what the "
    "attempt before it saved is used up to the first checkpoint of this one"
)


class Checkpoints:
    """The checkpoints of one run, seen by all ranks together. Every public method but `load`, `loaded` and `retire` is
    collective."""

    def __init__(self, store: Store, world: World, *, run_dir: Path) -> None:
        self.store, self.world, self.run_dir = store, world, run_dir
        self.attempt = Attempt(token="", resumed_from=None)
        self.fault = ""  # why the latest save failed
        self._files: RankFiles | None = None  # of the checkpoint that was found, until it is loaded

    def newest(self) -> Manifest | None:
        """The newest standing checkpoint that every rank can verify; None if none was ever committed."""
        candidates: list[str] = []
        if self.world.is_first:
            recorded = self._recorded()
            attempts = read_attempts(self.store, recorded=recorded)
            for attempt in attempts:
                if attempt.is_unreadable:
                    log.warning(_UNREADABLE, f"{self.store.url}/{record_path(attempt.token)}")
            standing = standing_checkpoints(list_committed(self.store, recorded=recorded), attempts)
            candidates = [each.folder for each in standing]
        candidates = broadcast_json(candidates, device=self.world.device)
        for folder in candidates:
            manifest = self._usable(folder)
            if manifest:
                return manifest
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

    def _recorded(self) -> CheckpointId | None:
        """The last checkpoint in the run's ledger, if it is in the store, whose listing may be late or lack it."""
        last = last_saved(self.run_dir)
        if last is None or self.store.exists(f"{last.folder}/{MANIFEST_NAME}"):
            return last
        log.warning(_NOT_THERE, last.folder, self.run_dir, self.store.url)
        return None

    def _usable(self, folder: str) -> Manifest | None:
        """The manifest in a folder if every rank can verify it and its share of the files; else the log says why not.
        Collective."""
        data, fault, manifest = b"", "", None
        try:
            data = self.store.read(f"{folder}/{MANIFEST_NAME}")
            manifest = manifest_from_json(data)
            if manifest.id.folder != folder:
                raise ValueError(f"its manifest is that of {manifest.id.folder}")
            self._files = RankFiles(self.store, manifest)
            for name in sorted(manifest.files)[self.world.rank :: self.world.num_ranks]:
                self._files.verify(name)
        except FAULTS as error:
            fault = str(error)
        digest = hashlib.sha256(data).hexdigest()
        is_same = broadcast_json(digest, device=self.world.device) == digest
        fault = fault or ("" if is_same else "its manifest changed while it was read")
        if all_agree(not fault, device=self.world.device) and manifest:
            if self.world.is_first and not is_sealed(data):
                log.warning(_UNSEALED, folder)
            return manifest
        self.loaded()
        faults = [f for f in gather_json(fault, device=self.world.device) if f]
        if self.world.is_first:
            log.warning("skipping checkpoint %s: %s", folder, "; ".join(dict.fromkeys(faults)))
        return None

    def begin_attempt(self, resumed_from: Manifest | None) -> bool:
        """Registers this start, which resumes from a checkpoint that was found (None: there is none); False if another
        one must be found, because this one has been retired in the meantime.

        Call it once the job is accepted: a refused command must not take a run over.
        """
        token = ""
        if self.world.is_first:
            attempts = read_attempts(self.store, recorded=last_saved(self.run_dir))
            token = next_token(attempts, nonce=secrets.token_hex(4))
        token = broadcast_json(token, device=self.world.device)
        self.attempt = Attempt(token=token, resumed_from=resumed_from.id if resumed_from else None)
        is_registered: bool = broadcast_json(
            self._register() if self.world.is_first else True, device=self.world.device
        )
        return is_registered

    def _register(self) -> bool:
        """Puts this attempt on record; False (and off the record) if an older process, still alive until it reads the
        record, has in the meantime retired the checkpoint that this attempt resumes from."""
        path = record_path(self.attempt.token)
        self.store.write(path, attempt_to_json(self.attempt))
        origin = self.attempt.resumed_from
        if origin is None or self.store.exists(f"{origin.folder}/{MANIFEST_NAME}"):
            self.store.discard_unfinished()
            return True
        self.store.delete(path)
        return False

    def refuse_if_overtaken(self) -> None:
        """Collective. Raises WillNotSucceedError if a later attempt of this run has started elsewhere, or if what this
        one needs to be continued was deleted."""
        reason = broadcast_json(self._why_over() if self.world.is_first else "", device=self.world.device)
        if reason:
            raise WillNotSucceedError(reason)

    def _why_over(self) -> str:
        own = self.attempt.token
        tokens = [attempt.token for attempt in read_attempts(self.store)]
        later = max([t for t in tokens if token_order(t) > token_order(own)], key=token_order, default="")
        if later:
            return (
                f"attempt {own} of {self.run_dir} ends here: a later one, {later}, took over the run; "
                "leave the run to it, or end it and start again"
            )
        if not self.run_dir.is_dir():
            return gone_message(self.run_dir)
        if not self.store.exists(record_path(own)):  # not from the listing, which may be late
            return gone_message(f"{self.store.url}/{record_path(own)}")
        return ""

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
            report = {"error": f"rank {self.world.rank}: {self._said(error)}"}
        reports = gather_json(report, device=self.world.device)
        errors, manifest = [r["error"] for r in reports if "error" in r], None
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
                    errors = [f"manifest: {self._said(error)}"]
        errors = broadcast_json(errors, device=self.world.device)
        if errors:
            self.fault = "; ".join(errors)
            log.error("checkpoint of step %d was not committed: %s", checkpoint_id.step, self.fault)
        return manifest if not errors else None

    def load(self, manifest: Manifest, fragment: Fragment, slot: str) -> None:
        """Fills one slot of a fragment from the files that hold its elements (not collective)."""
        files = self._files = self._files or RankFiles(self.store, manifest)
        locations = manifest.tensors[fragment.name].slots[slot]
        for location, first, count in overlapping(locations, start=fragment.start, length=fragment.length):
            inside = first - fragment.start
            files.fill(fragment.slots[slot][inside : inside + count], location, first=first)

    def loaded(self) -> None:
        """Frees what was read ahead while verifying."""
        self._files = None

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
        laid_out, digests = lay_out(fragments), PartDigests()
        with self.store.create(f"{checkpoint_id.folder}/{name}") as file:
            for part in laid_out.parts():
                file.write(part)
                digests.update(part)
        return {"file": name, "record": digests.record(), "pieces": laid_out.pieces}

    def _said(self, error: Exception) -> str:
        """An error of a save as the log says it, with what to do."""
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            where = error.filename or self.store.url
            return f"{error.strerror} at {where}; make room there (a smaller --checkpoint.keep-newest needs less)"
        return str(error)


def gone_message(what: object) -> str:
    """What a run says that cannot be continued because its folder was deleted under way."""
    return (
        f"{what} was deleted or moved while the run was using it, so nothing saved from now on could be continued; "
        "put it back, or run the same command to start from the beginning"
    )
