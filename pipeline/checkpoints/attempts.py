"""Which attempts and checkpoints the store of a run has.

A listing may be late: the last checkpoint in the run's ledger counts, and so does its attempt, listed or not.
"""

from pipeline.checkpoints.attempt_record import ATTEMPTS, Attempt, attempt_from_json, record_path, token_from_path
from pipeline.checkpoints.manifest import CheckpointId, id_from_path
from pipeline.checkpoints.many_requests import each_at_once
from shards.errors import InvalidDataError
from shards.store import MissingObjectError, Store

# What damaged objects raise when they are read; faults of the store are others.
FAULTS = (ValueError, EOFError, MissingObjectError, InvalidDataError, IsADirectoryError, NotADirectoryError)
_MOST_BYTES = 1 << 16  # of an attempt's record


def list_committed(store: Store, *, recorded: CheckpointId | None = None) -> list[CheckpointId]:
    """Every checkpoint that has a manifest. `recorded`: one that has, whether it is listed or not."""
    found = [id_from_path(path) for path in store.list()]
    committed = [each for each in found if each is not None]
    return committed if recorded is None or recorded in committed else [*committed, recorded]


def read_attempts(store: Store, *, recorded: CheckpointId | None = None) -> list[Attempt]:
    """Every attempt on record, in order of start. Files with other names are left alone. `recorded`: a checkpoint whose
    attempt counts, whether it is listed or not."""
    paths = {path for path in store.list(f"{ATTEMPTS}/") if token_from_path(path)}
    if recorded and token_from_path(record_path(recorded.attempt)):
        paths.add(record_path(recorded.attempt))
    return each_at_once(lambda path: read_attempt(store, path), sorted(paths))


def read_attempt(store: Store, path: str) -> Attempt:
    """The attempt on record, unreadable if the record is damaged or that of another one: its number counts all the
    same, since an attempt that is not counted would not be overtaken."""
    token = token_from_path(path)
    try:
        attempt = attempt_from_json(store.read(path, most_bytes=_MOST_BYTES))
    except FAULTS:
        return Attempt(token=token, resumed_from=None, is_unreadable=True)
    return attempt if attempt.token == token else Attempt(token=token, resumed_from=None, is_unreadable=True)
