"""Sharded checkpoints: each rank writes the fragments it owns, the manifest comes last, loading verifies checksums.

Any number of ranks, under any ZeRO stage and optimiser, reads any checkpoint: fragments of logical tensors are
addressed by byte. It works in folders and on S3 alike, since it needs no more than writes that are whole or absent.
"""

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.checkpoints.attempts import (
    FAULTS,
    Attempt,
    attempt_from_json,
    attempt_to_json,
    foreign_to,
    list_committed,
    next_attempt,
    next_token,
    read_attempts,
    record_path,
    standing_checkpoints,
    why_over,
)
from pipeline.checkpoints.manifest import (
    MANIFEST_NAME,
    CheckpointId,
    CheckpointManifest,
    manifest_from_json,
    overlapping,
)
from pipeline.checkpoints.rank_file_in import RankFiles, Wanted
from pipeline.checkpoints.shares import Shares, fill_together
from pipeline.data.position import StepRange
from pipeline.ranks.collectives import all_agree, broadcast_json, gather_json
from pipeline.ranks.host import available_bytes
from pipeline.ranks.world import World
from shards.errors import StorageError, UserError, WillNotSucceedError
from shards.store import Store

log = logging.getLogger(__name__)
_HELD_PART = 8  # of a host's free memory, one in 8 bytes may keep what was verified until it is loaded
_NOT_THERE = "checkpoint %s is the last in the ledger of %s, but its manifest is not in %s; looking for an earlier one"
_FOREIGN = (
    "{folder} in {where} was written by another run, and this one has been started from scratch before; move {where}/"
    "attempts away to continue from that checkpoint, or move the checkpoint away to go on from scratch"
)
_UNREADABLE = (
    "%s cannot be read, so it is unknown which checkpoint this attempt resumed from: its number counts, and what the "
    "attempt before it saved is used up to the first checkpoint of this one"
)


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


class Checkpoints:
    """The checkpoints of one run, seen by all ranks together; saves.py writes them. Every public method but `manifest`
    and `loaded` is collective.

    Two questions to the run's ledger, which is read each time: `recorded`, the checkpoint in its last line, and
    `has_records`, whether it has any line."""

    def __init__(
        self,
        store: Store,
        world: World,
        *,
        run_dir: Path,
        recorded: Callable[[], CheckpointId | None],
        has_records: Callable[[], bool],
    ) -> None:
        self.store, self.world, self.run_dir = store, world, run_dir
        self._last_recorded, self._has_records = recorded, has_records
        self.attempt = Attempt(token="", resumed_from=None, skipped=())
        self._files: RankFiles | None = None  # of the checkpoint that was found, until it is loaded

    def newest(self, *, at_most: int | None = None) -> CheckpointManifest | None:
        """The newest standing checkpoint that every rank can verify; None if none was ever committed. `at_most`: only
        checkpoints of this step or an earlier one count; None if there is none."""
        candidates, foreign = list[str](), list[str]()
        if self.world.is_first:
            recorded = self._recorded()
            attempts = read_attempts(self.store, recorded=recorded)
            for attempt in attempts:
                if attempt.is_unreadable:
                    log.warning(_UNREADABLE, f"{self.store.url}/{record_path(attempt.token)}")
            committed = list_committed(self.store, recorded=recorded)
            standing = standing_checkpoints(committed, attempts)
            foreign = foreign_to(committed, attempts)
            candidates = [each.folder for each in standing if at_most is None or each.step <= at_most]
        candidates, foreign = broadcast_json([candidates, foreign], device=self.world.device)
        if foreign and not candidates and at_most is None:
            raise UserError(_FOREIGN.format(folder=foreign[-1], where=self.store.url))
        for folder in candidates:
            manifest = self._usable(folder)
            if manifest:
                return manifest
        if at_most is not None:
            return None
        where = self.store.url
        if candidates:
            raise WillNotSucceedError(
                f"none of the {len(candidates)} checkpoints in {where} can be used (see above); nothing was changed. "
                f"Repair them, or start again in another --run-dir"
            )
        if broadcast_json(self._has_records(), device=self.world.device):
            raise UserError(
                f"{self.run_dir} has recorded checkpoints, but {where} holds none that can be used; put them back, "
                "give the --checkpoint.url that the run was started with, or start again in another --run-dir"
            )
        return None

    def _recorded(self) -> CheckpointId | None:
        """The last checkpoint in the run's ledger, if it is in the store, whose listing may be late or lack it."""
        last = self._last_recorded()
        if last is None or self.store.exists(f"{last.folder}/{MANIFEST_NAME}"):
            return last
        log.warning(_NOT_THERE, last.folder, self.run_dir, self.store.url)
        return None

    def _usable(self, folder: str) -> CheckpointManifest | None:
        """The manifest in a folder if every rank can verify it and its share of the files; else the log says why not.
        Collective."""
        data, fault, manifest = b"", "", None
        try:
            data = self.store.read(f"{folder}/{MANIFEST_NAME}")
            manifest = manifest_from_json(data)
            if manifest.id.folder != folder:
                raise ValueError(f"its manifest is that of {manifest.id.folder}")
            most = available_bytes() // (_HELD_PART * self.world.num_local_ranks)
            self._files = RankFiles(self.store, manifest, most_held_bytes=most)
            for name, first, end in Shares(manifest.files, num_ranks=self.world.num_ranks).of(self.world.rank):
                self._files.verify_parts(name, first, end)
        except FAULTS as error:
            fault = str(error)
        digest = hashlib.sha256(data).hexdigest()
        is_same = broadcast_json(digest, device=self.world.device) == digest
        fault = fault or ("" if is_same else "its manifest changed while it was read")
        if all_agree(not fault, device=self.world.device) and manifest:
            return manifest
        self.loaded()
        faults = [f for f in gather_json(fault, device=self.world.device) if f]
        if self.world.is_first:
            log.warning("skipping checkpoint %s: %s", folder, "; ".join(dict.fromkeys(faults)))
        return None

    def begin_attempt(self, resumed_from: CheckpointManifest | None, *, skip: StepRange | None = None) -> bool:
        """Registers this start, which resumes from a checkpoint that was found (None: there is none); False if it has
        been retired meanwhile, and another one must be found. It leaves out the data steps that the checkpoint and the
        attempts before it left out, and those of `skip`. Call it once the job is accepted: a refused command must not
        take a run over."""
        record = b""
        if self.world.is_first:
            attempts = read_attempts(self.store, recorded=self._last_recorded())
            token = next_token(attempts, nonce=secrets.token_hex(4))
            record = attempt_to_json(next_attempt(attempts, token=token, origin=resumed_from, skip=skip))
        self.attempt = attempt_from_json(broadcast_json(record.decode(), device=self.world.device).encode())
        is_registered: bool = self._register() if self.world.is_first else True
        return bool(broadcast_json(is_registered, device=self.world.device))

    def _register(self) -> bool:
        """Records this attempt. Returns False, without leaving a record, if an older process, still alive until it
        reads the record, has in the meantime retired the checkpoint that this attempt resumes from."""
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
        mine = why_over(self.store, self.attempt.token, run_dir=self.run_dir) if self.world.is_first else ""
        reason = broadcast_json(mine, device=self.world.device)
        if reason:
            raise WillNotSucceedError(reason)

    def manifest(self, checkpoint: CheckpointId) -> CheckpointManifest:
        """The manifest of a committed checkpoint, read from the store (not collective). StorageError if it is not as it
        was written."""
        path = f"{checkpoint.folder}/{MANIFEST_NAME}"
        try:
            return manifest_from_json(self.store.read(path))
        except FAULTS as error:
            raise StorageError(f"{self.store.url}/{path}, which this run has committed: {error}") from error

    def load(self, manifest: CheckpointManifest, wanted: Iterable[tuple[Fragment, str]]) -> None:
        """Fills these slots of fragments from the files that hold their elements, with few requests however many there
        are. Together the ranks read once what they do not have from verifying."""
        files = self._files = self._files or RankFiles(self.store, manifest)
        all_wanted = _wanted(manifest, wanted)
        if self.world.num_ranks == 1:
            files.fill(all_wanted)
        else:
            shares = Shares(manifest.files, num_ranks=self.world.num_ranks)
            fill_together(files, shares, all_wanted, world=self.world)

    def loaded(self) -> None:
        """Frees what was read ahead while verifying."""
        self._files = None


def _wanted(manifest: CheckpointManifest, wanted: Iterable[tuple[Fragment, str]]) -> list[Wanted]:
    return [
        Wanted(location=location, first=first, target=fragment.slots[slot][first - fragment.start :][:count])
        for fragment, slot in wanted
        for location, first, count in overlapping(
            manifest.tensors[fragment.name].slots[slot], start=fragment.start, length=fragment.length
        )
    ]
