"""An overtaken attempt that wakes up while it retires old checkpoints deletes nothing of a later attempt."""

from pathlib import Path

import pytest

from pipeline.checkpoints.attempt_record import ATTEMPTS, Attempt, attempt_to_json
from pipeline.checkpoints.manifest import MANIFEST_NAME, CheckpointId
from pipeline.checkpoints.retention import retire
from shards.store import open_store

OLD, NEW = "0001-aaaaaaaa", "0002-bbbbbbbb"


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("is_committed", [True, False])
def test_the_later_one_keeps_its_files(tmp_path: Path, is_listed: bool, is_committed: bool) -> None:
    """Whether the later one is in the listing of attempts yet, and whether its checkpoint is committed."""
    store = open_store(str(tmp_path))
    attempts = [Attempt(token=OLD, resumed_from=None)]
    attempts += [Attempt(token=NEW, resumed_from=CheckpointId(step=4, attempt=OLD))] * is_listed
    for attempt in attempts:
        store.write(f"{ATTEMPTS}/{attempt.token}.json", attempt_to_json(attempt))
    for step, token in ((4, OLD), (8, OLD), (8, NEW)):
        folder = CheckpointId(step=step, attempt=token).folder
        store.write(f"{folder}/rank-00000.safetensors", b"data")
        if token == OLD or is_committed:
            store.write(f"{folder}/{MANIFEST_NAME}", b"manifest")
    of_the_later = [path for path in store.list() if NEW in path]
    newest = CheckpointId(step=8, attempt=OLD)
    retire(store, attempt=attempts[0], newest=newest, keep_newest=1, keep_every=0, keep=())
    assert [path for path in store.list() if NEW in path] == of_the_later
