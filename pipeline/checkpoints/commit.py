"""Commits a checkpoint whose files are all written: the fence, every rank's report, and MANIFEST.json last.

Rank 0's writer does this. Its requests are one listing, two questions, one report a rank (many at once), one write.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pipeline.checkpoints.assemble import with_reports
from pipeline.checkpoints.attempt_record import Attempt
from pipeline.checkpoints.attempts import FAULTS
from pipeline.checkpoints.manifest import (
    MANIFEST_NAME,
    CheckpointId,
    draft_from_json,
    manifest_from_json,
    manifest_to_json,
)
from pipeline.checkpoints.many_requests import each_at_once
from pipeline.checkpoints.overtaken import why_over
from pipeline.checkpoints.rank_file_out import RankReport, read_report
from pipeline.checkpoints.retention import retire
from shards.errors import StorageError
from shards.schema.config_values import Range
from shards.store import Store

_FENCE = -1  # beside the ranks: whether this attempt may still commit


class OvertakenError(Exception):
    """This attempt must not commit any more. The message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints stay: see CheckpointConfig; `rewind_steps`: one this many steps before the newest, too;
    `folders`: others that are wanted."""

    keep_newest: Annotated[int, Range(1)]
    keep_every: Annotated[int, Range(0)]
    rewind_steps: Annotated[int, Range(0)] = 0
    folders: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Commit:
    """What to commit. `draft`: the manifest without files and tensors' places, as JSON. `save`: the number that all
    ranks' reports must have."""

    draft: str
    num_ranks: Annotated[int, Range(1)]
    save: Annotated[int, Range(1)]
    run_dir: str


def commit(store: Store, order: Commit) -> CheckpointId:
    """Writes the manifest. OvertakenError if the attempt is over; StorageError for a report that cannot be used; else
    what the store raises."""
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
        manifest_from_json(data)  # refuses now what would be refused when a run resumes
    except (ValueError, KeyError) as error:
        raise StorageError(f"the ranks' reports in {store.url}/{folder} do not make a checkpoint: {error}") from error
    store.write(f"{folder}/{MANIFEST_NAME}", data)
    return draft.id


def _report(store: Store, folder: str, *, rank: int, save: int) -> RankReport | StorageError:
    """The report of a rank, or the error: whether the attempt is over comes first."""
    try:
        return read_report(store, folder, rank=rank, save=save)
    except FAULTS as error:
        return StorageError(f"the report of rank {rank} cannot be used: {error}")
    except StorageError as error:
        return error


def retire_after(store: Store, newest: CheckpointId, attempt: Attempt, retention: Retention) -> None:
    """Deletes what `retention` does not keep once `newest` is committed."""
    retire(
        store,
        attempt=attempt,
        newest=newest,
        keep_newest=retention.keep_newest,
        keep_every=retention.keep_every,
        keep=retention.folders,
        rewind_steps=retention.rewind_steps,
    )
