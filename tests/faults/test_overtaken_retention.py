"""An overtaken attempt that wakes up while it retires old checkpoints deletes nothing of a later attempt."""

from pathlib import Path

import pytest

from pipeline.training.checkpoint import Checkpoints
from pipeline.training.config import CheckpointConfig
from pipeline.training.manifest import ATTEMPTS, MANIFEST_NAME, Attempt, CheckpointId, attempt_to_json
from shards.store import open_store
from tests.rigs.processes import one_world

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
    old = Checkpoints(store, one_world(), run_dir=tmp_path)
    old.attempt = attempts[0]
    of_the_later = [path for path in store.list() if NEW in path]
    old.retire(CheckpointConfig(keep_newest=1))
    assert [path for path in store.list() if NEW in path] == of_the_later
