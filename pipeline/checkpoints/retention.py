"""Deletes the checkpoints that a run no longer keeps: after a commit, and never the one that was just committed.

One listing says what there is. Records are read, and files deleted, many at once.
"""

from collections.abc import Collection

from pipeline.checkpoints.attempt_record import Attempt, token_from_path
from pipeline.checkpoints.attempts import read_attempt
from pipeline.checkpoints.fence import standing_checkpoints, token_order
from pipeline.checkpoints.manifest import MANIFEST_NAME, CheckpointId, id_from_path, is_checkpoint_file
from pipeline.checkpoints.many_requests import each_at_once
from shards.store import Store


def retire(
    store: Store,
    *,
    attempt: Attempt,
    newest: CheckpointId | None,
    keep_newest: int,
    keep_every: int,
    keep: Collection[str],
    rewind_steps: int = 0,
) -> None:
    """Deletes what retention does not keep, and what killed or overtaken attempts left.

    `attempt` is this one, and `newest` its newest committed checkpoint: files of later attempts, and of later steps of
    this one, may still be written. `keep`: folders of checkpoints that others want. `rewind_steps`: a checkpoint
    this many steps before the newest is kept, too. Raises what the store raises.
    """
    paths = list(store.list())
    records = [path for path in paths if token_from_path(path)]
    attempts = {each.token: each for each in [*each_at_once(lambda path: read_attempt(store, path), records), attempt]}
    committed = {found for path in paths if (found := id_from_path(path))} | ({newest} if newest else set())
    standing = standing_checkpoints(list(committed), list(attempts.values()))
    kept = {each.folder for each in standing[:keep_newest]} | set(keep)
    kept |= {each.folder for each in standing if keep_every and each.step % keep_every == 0}
    kept |= {each.folder for each in _for_rewinds(standing, rewind_steps)}
    files = [path for path in paths if is_checkpoint_file(path)]
    unwanted = [path for path in files if path.rpartition("/")[0] not in kept]
    unwanted = [path for path in unwanted if not _may_be_written(path, attempt, newest)]
    # Manifests first: without it, a checkpoint does not exist, whatever files of it remain.
    for is_first in (True, False):
        each_at_once(store.delete, [path for path in unwanted if path.endswith(MANIFEST_NAME) is is_first])


def _for_rewinds(standing: list[CheckpointId], rewind_steps: int) -> list[CheckpointId]:
    """The newest that is far enough before the newest of all, and the one after it, which takes its place later."""
    last = max((each.step for each in standing), default=0) - rewind_steps
    far = [each for each in standing if each.step <= last]
    near = [each for each in standing if each.step > last]
    return [*far[:1], *near[-1:]]


def _may_be_written(path: str, attempt: Attempt, newest: CheckpointId | None) -> bool:
    """Whether a checkpoint's file is of a later attempt, or of a later save of this one."""
    step, folder, _ = path.split("/")
    token = folder.removeprefix("attempt-")
    if token == attempt.token:
        return newest is not None and int(step.removeprefix("step-")) > newest.step
    return token_order(token) > token_order(attempt.token)
