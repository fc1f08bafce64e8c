"""What retention keeps, and what it must not touch, such as the files of a later attempt."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoints.attempts import ATTEMPTS, Attempt, attempt_to_json, record_path
from pipeline.checkpoints.commit import retire
from pipeline.checkpoints.config import Retention
from pipeline.checkpoints.manifest import MANIFEST_NAME, CheckpointId
from shards.store import open_store

OLD, OWN = "0001-aaaaaaaa", "0002-bbbbbbbb"
KILLED = "0001-cccccccc"
LATER = "0002-bbbbbbbb"


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        pytest.param({}, {(16, OWN), (20, OWN)}, id="the newest"),
        pytest.param({"keep_newest": 2}, {(12, OWN), (16, OWN), (20, OWN)}, id="the newest two"),
        pytest.param({"keep_every": 8}, {(8, OLD), (16, OWN), (20, OWN)}, id="every eighth"),
        pytest.param(
            {"folders": (CheckpointId(step=4, attempt=OLD).folder,)}, {(4, OLD), (16, OWN), (20, OWN)}, id="the best"
        ),
        pytest.param({"rewind_steps": 4}, {(12, OWN), (16, OWN), (20, OWN)}, id="one for a rewind"),
        pytest.param(
            {"rewind_steps": 5}, {(8, OLD), (12, OWN), (16, OWN), (20, OWN)}, id="one for a rewind, and its successor"
        ),
        pytest.param({"rewind_steps": 99}, {(4, OLD), (16, OWN), (20, OWN)}, id="none is old enough yet"),
    ],
)
def test_what_is_left(tmp_path: Path, keep: dict[str, Any], left: set[tuple[int, str]]) -> None:
    """Step 20 is being written; step 9 and the attempt that was killed never were committed."""
    store = open_store(str(tmp_path))
    own = Attempt(token=OWN, resumed_from=CheckpointId(step=8, attempt=OLD), skipped=())
    for attempt in (
        Attempt(token=OLD, resumed_from=None, skipped=()),
        Attempt(token=KILLED, resumed_from=None, skipped=()),
        own,
    ):
        store.write(record_path(attempt.token), attempt_to_json(attempt))
    for step, token in ((4, OLD), (8, OLD), (9, OWN), (12, OWN), (12, KILLED), (16, OWN), (20, OWN)):
        folder = CheckpointId(step=step, attempt=token).folder
        for name in ("rank-00000.safetensors", "rank-00000.json"):
            store.write(f"{folder}/{name}", b"")
        if step not in (9, 20) and token != KILLED:
            store.write(f"{folder}/{MANIFEST_NAME}", b"")
    newest = CheckpointId(step=16, attempt=OWN)
    retire(store, attempt=own, newest=newest, retention=replace(Retention(keep_newest=1), **keep))
    assert {path.rpartition("/")[0] for path in store.list() if path.startswith("step-")} == {
        CheckpointId(step=step, attempt=token).folder for step, token in left
    }


def test_a_checkpoint_for_a_rewind_is_never_far_behind(tmp_path: Path) -> None:
    """With a save at every step, too, and with three checkpoints at most."""
    store, own = open_store(str(tmp_path)), Attempt(token=OWN, resumed_from=None, skipped=())
    store.write(record_path(OWN), attempt_to_json(own))
    for step in range(1, 40):
        newest = CheckpointId(step=step, attempt=OWN)
        store.write(f"{newest.folder}/{MANIFEST_NAME}", b"")
        retire(store, attempt=own, newest=newest, retention=Retention(keep_newest=1, rewind_steps=4))
        left = sorted(int(path[5:13]) for path in store.list() if path.startswith("step-"))
        assert len(left) <= 3
        assert step <= 4 or any(step - 8 <= one <= step - 4 for one in left), left


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("is_committed", [True, False])
def test_an_attempt_that_wakes_up_deletes_nothing_of_a_later_one(
    tmp_path: Path, is_listed: bool, is_committed: bool
) -> None:
    """Whether the later one is in the listing of attempts yet, and whether its checkpoint is committed."""
    store = open_store(str(tmp_path))
    attempts = [Attempt(token=OLD, resumed_from=None, skipped=())]
    attempts += [Attempt(token=LATER, resumed_from=CheckpointId(step=4, attempt=OLD), skipped=())] * is_listed
    for attempt in attempts:
        store.write(f"{ATTEMPTS}/{attempt.token}.json", attempt_to_json(attempt))
    for step, token in ((4, OLD), (8, OLD), (8, LATER)):
        folder = CheckpointId(step=step, attempt=token).folder
        store.write(f"{folder}/rank-00000.safetensors", b"data")
        if token == OLD or is_committed:
            store.write(f"{folder}/{MANIFEST_NAME}", b"manifest")
    of_the_later = [path for path in store.list() if LATER in path]
    newest = CheckpointId(step=8, attempt=OLD)
    retire(store, attempt=attempts[0], newest=newest, retention=Retention(keep_newest=1))
    assert [path for path in store.list() if LATER in path] == of_the_later


def test_what_this_run_has_not_written_stays(tmp_path: Path) -> None:
    """A checkpoint that was copied here from another run, which this one continues."""
    store, copied = open_store(str(tmp_path)), CheckpointId(step=4, attempt="0007-dddddddd")
    own = Attempt(token=OWN, resumed_from=copied, skipped=())
    store.write(record_path(OWN), attempt_to_json(own))
    for each in (copied, CheckpointId(step=8, attempt=OWN), CheckpointId(step=12, attempt=OWN)):
        store.write(f"{each.folder}/{MANIFEST_NAME}", b"")
    retire(store, attempt=own, newest=CheckpointId(step=12, attempt=OWN), retention=Retention(keep_newest=1))
    assert sorted(path[5:13] for path in store.list() if path.startswith("step-")) == ["00000004", "00000012"]


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_an_attempt_could_not_read_stays_and_takes_nobodys_place(tmp_path: Path, is_lost: bool) -> None:
    """Through later attempts, too, which could read what they continued from, even if the record that names it is
    lost."""
    store, unread = open_store(str(tmp_path)), CheckpointId(step=12, attempt=OLD)
    own = Attempt(token="0003-eeeeeeee", resumed_from=CheckpointId(step=16, attempt=OWN), skipped=())
    for attempt in (
        Attempt(token=OLD, resumed_from=None, skipped=()),
        Attempt(token=OWN, resumed_from=CheckpointId(step=8, attempt=OLD), skipped=(), unread=(unread,)),
        own,
    ):
        store.write(record_path(attempt.token), attempt_to_json(attempt))
    for step, token in ((4, OLD), (8, OLD), (12, OLD), (12, OWN), (16, OWN), (20, own.token)):
        store.write(f"{CheckpointId(step=step, attempt=token).folder}/{MANIFEST_NAME}", b"")
    if is_lost:
        store.write(record_path(OWN), b"")
    newest = CheckpointId(step=20, attempt=own.token)
    retire(store, attempt=own, newest=newest, retention=Retention(keep_newest=2))
    left = {path.rpartition("/")[0] for path in store.list() if path.startswith("step-")}
    kept = {unread.folder, CheckpointId(step=16, attempt=OWN).folder, newest.folder}
    before = {CheckpointId(step=step, attempt=OLD).folder for step in (4, 8)}
    assert left == (kept | before if is_lost else kept)
