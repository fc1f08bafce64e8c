"""Commits a checkpoint whose files are all written, and deletes checkpoints that the run no longer keeps.

Rank 0's writer does this. It checks that no later attempt has taken over, makes the manifest from every rank's report
(many are read at once), and writes MANIFEST.json last. After a commit, it lists the store once to find older
checkpoints. The checkpoint that was just committed is never deleted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.checkpoints.attempts import (
    FAULTS,
    Attempt,
    read_attempt,
    standing_checkpoints,
    token_from_path,
    token_order,
    why_over,
)
from pipeline.checkpoints.config import Retention
from pipeline.checkpoints.manifest import (
    FORMAT,
    MANIFEST_NAME,
    MASTER,
    CheckpointId,
    CheckpointManifest,
    FragmentLocation,
    LogicalTensor,
    SavedJob,
    draft_from_json,
    id_from_path,
    is_checkpoint_file,
    manifest_to_json,
    own_manifest_from_json,
)
from pipeline.checkpoints.rank_file_out import RankReport, rank_of, read_report
from pipeline.checkpoints.writer_messages import CommitOrder
from pipeline.data.position import StreamPosition
from shards.errors import StorageError
from shards.pool import each_at_once
from shards.store import Store

_FENCE = -1  # not a rank: the check whether this attempt may still commit


def retire(
    store: Store,
    *,
    attempt: Attempt,
    newest: CheckpointId | None,
    retention: Retention,
) -> None:
    """Deletes the checkpoints that retention does not keep, and files that killed or overtaken attempts left behind.
    Files that no attempt of this run has written stay, such as a checkpoint copied from another run. So do checkpoints
    that an attempt could not read: the disk or the server may recover. If an attempt's record is unreadable, the
    checkpoints of all attempts before it stay.

    `attempt` is the attempt of this process, and `newest` its newest committed checkpoint. Files of later attempts, and
    of later steps of this attempt, stay, since another writer may not have finished them. Raises what the store raises.
    """
    paths = list(store.list())
    records = [path for path in paths if token_from_path(path)]
    attempts = {each.token: each for each in [*each_at_once(lambda path: read_attempt(store, path), records), attempt]}
    committed = {found for path in paths if (found := id_from_path(path))} | ({newest} if newest else set())
    standing = standing_checkpoints(list(committed), list(attempts.values()))
    unread = {checkpoint.folder for each in attempts.values() for checkpoint in each.unread}
    kept = kept_folders(standing, retention) | unread
    files = [path for path in paths if is_checkpoint_file(path) and _token_of(path) in attempts]
    unwanted = [path for path in files if path.rpartition("/")[0] not in kept]
    unwanted = [path for path in unwanted if not _may_be_written(path, attempt, newest)]
    # An unreadable record may name checkpoints of earlier attempts that must stay.
    lost = max((token_order(each.token) for each in attempts.values() if each.is_unreadable), default=token_order("0-"))
    unwanted = [path for path in unwanted if token_order(_token_of(path)) >= lost]
    # Manifests go first: a checkpoint without one does not exist, even if some of its files remain.
    for is_first in (True, False):
        each_at_once(store.delete, [path for path in unwanted if path.endswith(MANIFEST_NAME) is is_first])


def kept_folders(standing: list[CheckpointId], retention: Retention) -> set[str]:
    """Returns the folders that stay. `standing`: the standing checkpoints, newest first.

    For rewinds, two checkpoints stay: the newest one that is at least `rewind_steps` steps before the newest of all,
    and the one after it, which takes its place later.
    """
    last = max((each.step for each in standing), default=0) - retention.rewind_steps
    far = [each for each in standing if each.step <= last]
    near = [each for each in standing if each.step > last]
    every = [each for each in standing if retention.keep_every and each.step % retention.keep_every == 0]
    kept = [*standing[: retention.keep_newest], *every, *far[:1], *near[-1:]]
    return {each.folder for each in kept} | set(retention.folders)


def _may_be_written(path: str, attempt: Attempt, newest: CheckpointId | None) -> bool:
    """Returns whether a checkpoint's file belongs to a later attempt, or to a step of this attempt after `newest`."""
    token = _token_of(path)
    if token == attempt.token:
        return newest is not None and int(path.partition("/")[0].removeprefix("step-")) > newest.step
    return token_order(token) > token_order(attempt.token)


def _token_of(path: str) -> str:
    """Returns the token of the attempt that wrote a checkpoint's file."""
    return path.split("/")[1].removeprefix("attempt-")


def draft_manifest(
    checkpoint_id: CheckpointId,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    position: StreamPosition,
    num_updates: int,
    job: SavedJob,
    losses: tuple[float, ...] = (),
    record: dict[str, Any],
) -> CheckpointManifest:
    """Returns a manifest without files: all that rank 0 knows when a save begins."""
    return CheckpointManifest(
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


@dataclass(kw_only=True, slots=True)
class _Run:
    """Fragments of one tensor and slot in the files of consecutive ranks, with the same length and at the same byte."""

    rank: int
    file: str
    offset: int
    start: int
    length: int
    num_files: int = 1

    def takes(self, rank: int, *, offset: int, start: int, length: int) -> bool:
        """Adds the fragment of a rank if it continues this run of fragments, and returns whether it does."""
        is_next = rank == self.rank + self.num_files and start == self.start + self.num_files * length
        if not is_next or offset != self.offset or length != self.length:
            return False
        self.num_files += 1
        return True

    def location(self) -> FragmentLocation:
        """Returns the manifest's entry for these fragments."""
        return FragmentLocation(
            file=self.file, offset=self.offset, start=self.start, length=self.length, num_files=self.num_files
        )


def with_reports(draft: CheckpointManifest, reports: Sequence[RankReport]) -> CheckpointManifest:
    """Returns the manifest of a checkpoint, made from its draft and every rank's report. Raises KeyError for a tensor
    that is not in the draft."""
    runs: dict[str, dict[str, list[_Run]]] = {name: {} for name in draft.tensors}
    for report in sorted(reports, key=lambda each: rank_of(each.file)):
        rank = rank_of(report.file)
        for name, slot, offset, start, length in report.pieces:
            found = runs[name].setdefault(slot, [])
            if not (found and found[-1].takes(rank, offset=offset, start=start, length=length)):
                found.append(_Run(rank=rank, file=report.file, offset=offset, start=start, length=length))
    moments = sorted({slot for found in runs.values() for slot in found} - {MASTER})
    tensors = {}
    for name, tensor in draft.tensors.items():
        locations = {
            slot: tuple(run.location() for run in sorted(found, key=lambda each: each.start))
            for slot, found in runs[name].items()
        }
        tensors[name] = replace(tensor, slots=locations)
    files = {report.file: report.record for report in reports}
    return replace(draft, tensors=tensors, files=files, moments=tuple(moments))


class OvertakenError(Exception):
    """This attempt must not commit any more. The message says why."""


def commit(store: Store, order: CommitOrder) -> CheckpointId:
    """Writes the manifest and returns the checkpoint's id. Raises OvertakenError if the attempt is over, StorageError
    if the reports cannot be used, or what the store raises."""
    draft = draft_from_json(order.draft.encode())
    folder = draft.id.folder

    def ask(rank: int) -> RankReport | StorageError | str:
        if rank == _FENCE:
            return why_over(store, draft.id.attempt, run_dir=Path(order.run_dir))
        return _report(store, folder, rank=rank, save=order.save)

    reason, *found = each_at_once(ask, [_FENCE, *range(order.num_ranks)])
    if reason:
        raise OvertakenError(reason)
    for report in found:
        if isinstance(report, StorageError):
            raise report
    try:
        data = manifest_to_json(with_reports(draft, [report for report in found if isinstance(report, RankReport)]))
        own_manifest_from_json(data)  # refuses now what would otherwise be refused when a run resumes
    except (ValueError, KeyError) as error:
        raise StorageError(f"the ranks' reports in {store.url}/{folder} do not make a checkpoint: {error}") from error
    store.write(f"{folder}/{MANIFEST_NAME}", data)
    return draft.id


def _report(store: Store, folder: str, *, rank: int, save: int) -> RankReport | StorageError:
    """Returns the report of a rank, or the error of reading it. The error is not raised here, since `commit` first
    checks whether the attempt is over."""
    try:
        return read_report(store, folder, rank=rank, save=save)
    except FAULTS as error:
        return StorageError(f"the report of rank {rank} cannot be used: {error}")
    except StorageError as error:
        return error
