"""Sharded checkpoints: each rank writes the fragments it owns, the manifest comes last, loading verifies checksums.

Any number of ranks, under any ZeRO stage and optimiser, can read any checkpoint, since fragments of logical tensors are
addressed by byte. This works in folders and on S3 alike: all it needs is that a file is written as a whole or not at
all.
"""

import errno
import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
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
    OtherFormatError,
    id_from_path,
    manifest_from_json,
    overlapping,
)
from pipeline.checkpoints.rank_file_in import RankFiles, Wanted
from pipeline.checkpoints.shares import Shares, fill_together
from pipeline.data.position import StepRange
from pipeline.ranks.collectives import all_agree, broadcast_json, gather_json
from pipeline.ranks.host import available_bytes
from pipeline.ranks.world import World
from shards.errors import StorageError, UserError, WillNotSucceedError, disk_fault
from shards.files.looks import patiently
from shards.store import Store

log = logging.getLogger(__name__)
_HELD_PART = 8  # 1 / 8 of a host's free memory may hold verified bytes until they are loaded
_NOT_THERE = "checkpoint %s is the last in the ledger of %s, but its manifest is not in %s; looking for an earlier one"
_FOREIGN = (
    "{folder} in {where} was written by another run, and this one has been started from scratch before; move {where}/"
    "attempts away to continue from that checkpoint, or move the checkpoint away to go on from scratch"
)
_UNREADABLE = (
    "%s cannot be read, so it is unknown which checkpoint this attempt resumed from: its number counts, and what the "
    "attempt before it saved is used up to the first checkpoint of this one"
)
_DELETED = "all checkpoints in %s were deleted while the run was using them; its state is saved again, from memory"
_SKIPPED = "skipping checkpoint %s: %s"
_UNREAD = "checkpoint %s cannot be read for now: %s; it stays as it is, and older ones are tried"


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Elements `start` .. `start + length - 1` of a flattened logical tensor, which this rank holds.

    `slots`: flat views into the engine's own buffers, by name: `master`, the optimiser's moments, and `average` if the
    weights are averaged. All are float32, except that a moment may be bfloat16; in files, its values are float32, too.
    """

    name: str
    start: int
    length: int
    slots: dict[str, torch.Tensor]


class Checkpoints:
    """The checkpoints of one run, as all ranks together see them; saves.py writes them. Every public method but
    `manifest` and `loaded` is collective.

    Two functions ask the run's ledger, which they read on each call: `recorded` returns the checkpoint in its last
    line, and `has_records` returns whether it has any line."""

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
        # The run's folder, open from the first attempt until the process ends: its inode cannot be given to another.
        self._run_folder: int | None = None
        self._unread: list[str] = []  # the checkpoints that could not be read when the newest was last looked for
        self._files: RankFiles | None = None  # the files of the checkpoint that was found, until it is loaded

    def newest(self, *, at_most: int | None = None) -> CheckpointManifest | None:
        """Returns the newest standing checkpoint that every rank can verify. Returns None if none was ever committed;
        raises an error if some were but none can be used. `at_most`: only checkpoints of this step or an earlier one
        count, and None is returned if none of them can be used.

        A checkpoint that storage cannot read, even after retries, is skipped like a damaged one. Raises StorageError if
        no other can be used, or if the store can no longer be listed, since such a fault may pass."""
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
        self._unread, fault = [], ""
        for folder in candidates:
            manifest, fault_of_storage = self._usable(folder)
            if manifest:
                return manifest
            if fault_of_storage:
                fault = fault or f"{folder}: {fault_of_storage}"
        where = self.store.url
        if fault:
            raise StorageError(
                f"none of the {len(candidates)} checkpoints in {where} can be used for now, and nothing was changed; "
                f"storage cannot read {fault}",
                todo="check the disk or the server",
            )
        if at_most is not None:
            return None
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
        """Returns the last checkpoint in the run's ledger if its manifest is in the store, even if the store does not
        list it yet; else None."""
        last = self._last_recorded()
        if last is None or self.store.exists(f"{last.folder}/{MANIFEST_NAME}"):
            return last
        log.warning(_NOT_THERE, last.folder, self.run_dir, self.store.url)
        return None

    def _usable(self, folder: str) -> tuple[CheckpointManifest | None, str]:
        """Returns the manifest in a folder if every rank can verify it and its share of the files, else None and logs
        why not. Also returns the fault of storage that kept a rank from reading; empty if storage had no fault. After
        such a fault, the checkpoint is verified once more: perhaps the whole store did not answer. Raises
        WillNotSucceedError if another version of Patchline wrote the checkpoint. Collective."""
        manifest, fault = self._verified(folder)
        if fault:
            manifest, fault = self._verified(folder)
        if fault:
            self._unread.append(folder)
            if self.world.is_first:
                log.warning(_UNREAD, folder, fault)
        return manifest, fault

    def _verified(self, folder: str) -> tuple[CheckpointManifest | None, str]:
        """Returns the same as `_usable` after one look. Raises StorageError if a rank cannot list the store."""
        data, fault, manifest, is_read, other_format = b"", "", None, True, ""
        try:
            data = self.store.read(f"{folder}/{MANIFEST_NAME}")
            manifest = manifest_from_json(data)
            if manifest.id.folder != folder:
                raise ValueError(f"its manifest is that of {manifest.id.folder}")
            most = available_bytes() // (_HELD_PART * self.world.num_local_ranks)
            self._files = RankFiles(self.store, manifest, most_held_bytes=most)
            for name, first, end in Shares(manifest.files, num_ranks=self.world.num_ranks).of(self.world.rank):
                self._files.verify_parts(name, first, end)
        except OtherFormatError as error:
            fault = other_format = str(error)
        except FAULTS as error:
            fault = str(error)
        except (OSError, StorageError) as error:
            if not isinstance(error, StorageError) and not disk_fault(error):
                raise
            fault, is_read = _words(error), False
        digest = hashlib.sha256(data).hexdigest()
        is_same = broadcast_json(digest, device=self.world.device) == digest
        fault = fault or ("" if is_same else "its manifest changed while it was read")
        if all_agree(not fault, device=self.world.device) and manifest:
            return manifest, ""
        self.loaded()
        others = [text for text in gather_json(other_format, device=self.world.device) if text]
        if others:  # an older checkpoint would abandon this one
            raise WillNotSucceedError(f"checkpoint {folder} in {self.store.url}: {others[0]}, or another --run-dir")
        faults = [
            (text, was_read) for text, was_read in gather_json([fault, is_read], device=self.world.device) if text
        ]
        of_storage = [text for text, was_read in faults if not was_read]
        if of_storage:
            self._refuse_silent_store(is_asked=not is_read)
        elif self.world.is_first:
            log.warning(_SKIPPED, folder, "; ".join(dict.fromkeys(text for text, _ in faults)))
        return None, "; ".join(dict.fromkeys(of_storage))

    def _refuse_silent_store(self, *, is_asked: bool) -> None:
        """Raises StorageError if a rank cannot list the store: then the whole store fails for this rank, not only what
        it has tried to read. `is_asked`: whether this rank lists it. Collective."""
        fault = ""
        try:
            next(iter(self.store.list()) if is_asked else iter(()), "")
        except (OSError, StorageError) as error:
            fault = _words(error)
        if faults := [text for text in gather_json(fault, device=self.world.device) if text]:
            raise StorageError(f"{self.store.url} cannot be listed: {faults[0]}", todo="check the disk or the server")

    def begin_attempt(self, resumed_from: CheckpointManifest | None, *, skip: StepRange | None = None) -> bool:
        """Registers this attempt, which resumes from a checkpoint that was found (None: a start from scratch). Returns
        False if that checkpoint has been deleted in the meantime, so that another one must be found. The attempt leaves
        out the data steps that the checkpoint and the latest attempt left out, and the steps in `skip`. Call this only
        once the job is accepted: a refused command must not take over a run."""
        record = b""
        if self.world.is_first:
            attempts = read_attempts(self.store, recorded=self._last_recorded())
            token = next_token(attempts, nonce=secrets.token_hex(4))
            unread = tuple(found for folder in self._unread if (found := id_from_path(f"{folder}/{MANIFEST_NAME}")))
            own = next_attempt(attempts, token=token, origin=resumed_from, skip=skip)
            record = attempt_to_json(replace(own, unread=unread))
        self.attempt = attempt_from_json(broadcast_json(record.decode(), device=self.world.device).encode())
        if self._run_folder is None and self.world.is_first:
            self._run_folder = patiently(self.run_dir, lambda: os.open(self.run_dir, os.O_RDONLY | os.O_DIRECTORY))
        is_registered: bool = self._register() if self.world.is_first else True
        return bool(broadcast_json(is_registered, device=self.world.device))

    def _register(self) -> bool:
        """Records this attempt. An older process may still be alive until it reads that record, and may have deleted
        the checkpoint from which this attempt resumes. If so, deletes the record again and returns False."""
        path = record_path(self.attempt.token)
        self.store.write(path, attempt_to_json(self.attempt))
        origin = self.attempt.resumed_from
        if origin is None or self.store.exists(f"{origin.folder}/{MANIFEST_NAME}"):
            self.store.discard_unfinished()
            return True
        self.store.delete(path)
        return False

    def register_again(self) -> bool:
        """Records this attempt again if all checkpoints and records in the store were deleted but the run directory was
        not, since the state in memory can be saved again. Returns whether it may be saved. Collective."""
        may_save = False
        if self.world.is_first:
            try:
                if self._is_same_folder() and not list_committed(self.store) and not read_attempts(self.store):
                    self.store.write(record_path(self.attempt.token), attempt_to_json(self.attempt))
                    log.warning(_DELETED, self.store.url)
                    may_save = True
            except (OSError, StorageError) as error:
                log.warning("%s: %s", self.store.url, error)
                may_save = True  # the next save asks again
        return bool(broadcast_json(may_save, device=self.world.device))

    def _is_same_folder(self) -> bool:
        """Returns whether the folder at the run's path is still the one in which this process began, not that of
        another run under the same name."""
        if self._run_folder is None:
            return False
        try:
            own, found = os.fstat(self._run_folder), patiently(self.run_dir, self.run_dir.stat)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):  # a file server says ESTALE once it is gone
                return False
            raise
        return own.st_nlink > 0 and os.path.samestat(own, found)

    def refuse_if_overtaken(self) -> None:
        """Raises WillNotSucceedError if a later attempt of this run has started elsewhere, or if the run's folder or
        this attempt's record was deleted. Collective."""
        mine = why_over(self.store, self.attempt.token, run_dir=self.run_dir) if self.world.is_first else ""
        reason = broadcast_json(mine, device=self.world.device)
        if reason:
            raise WillNotSucceedError(reason)

    def manifest(self, checkpoint: CheckpointId) -> CheckpointManifest:
        """Reads the manifest of a committed checkpoint from the store (not collective). Raises StorageError if it is
        missing or damaged."""
        path = f"{checkpoint.folder}/{MANIFEST_NAME}"
        try:
            return manifest_from_json(self.store.read(path))
        except FAULTS as error:
            raise StorageError(f"{self.store.url}/{path}, which this run has committed: {error}") from error

    def load(self, manifest: CheckpointManifest, wanted: Iterable[tuple[Fragment, str]]) -> None:
        """Fills these slots of fragments from the files that hold their elements, with few requests even for many
        fragments. What the ranks have kept from verifying is not read again."""
        files = self._files = self._files or RankFiles(self.store, manifest)
        all_wanted = _wanted(manifest, wanted)
        if self.world.num_ranks == 1:
            files.fill(all_wanted)
        else:
            shares = Shares(manifest.files, num_ranks=self.world.num_ranks)
            fill_together(files, shares, all_wanted, world=self.world)

    def loaded(self) -> None:
        """Frees what was kept in memory while verifying."""
        self._files = None


def _words(error: OSError | StorageError) -> str:
    """Returns what failed, with the path if it is known."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.strerror} at {error.filename}"
    return str(error)


def _wanted(manifest: CheckpointManifest, wanted: Iterable[tuple[Fragment, str]]) -> list[Wanted]:
    return [
        Wanted(location=location, first=first, target=fragment.slots[slot][first - fragment.start :][:count])
        for fragment, slot in wanted
        for location, first, count in overlapping(
            manifest.tensors[fragment.name].slots[slot], start=fragment.start, length=fragment.length
        )
    ]
