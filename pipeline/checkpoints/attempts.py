"""The attempts (starts) of a run, and which of their checkpoints count.

`attempts/0003-5f1c2a9e.json` says which checkpoint an attempt resumed from, and which data steps it leaves out. A
listing may be late, so the last checkpoint in the run's ledger and its attempt count even if they are not listed.

Processes that survive a restart of their run must not interfere with it. The fence against them is on the reading side,
and relies on no feature of the store. Attempts are numbered, and each records what it resumed from. A manifest is
ignored if a later attempt exists that did not resume from it or from its descendant. Before a writer commits, it checks
that no later attempt has taken over the run, and that the run was not deleted. For that it needs only the names of the
records: one listing and one request, no matter how many times the run was started.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter

from pipeline.checkpoints.manifest import CheckpointId, CheckpointManifest, Token, id_from_path
from pipeline.data.position import Skipped, StepRange, joined, refuse_disorder
from shards.errors import InvalidDataError, StorageError, disk_fault
from shards.files.looks import is_a_folder
from shards.files.typed_json import sealed, unsealed
from shards.pool import each_at_once
from shards.store import MissingObjectError, Store

ATTEMPTS = "attempts"
MOST_TOKEN_DIGITS = 18  # the most digits of an attempt's number
_RECORD = re.compile(rf"{ATTEMPTS}/([0-9]{{4,{MOST_TOKEN_DIGITS}}}-[0-9a-f]{{8}})\.json")
# The errors that reading a damaged object raises. A store that fails raises other errors.
FAULTS = (ValueError, EOFError, MissingObjectError, InvalidDataError, IsADirectoryError, NotADirectoryError)
_MOST_BYTES = 1 << 16  # the largest record of an attempt


def gone_message(what: object, *, is_run: bool = False) -> str:
    """Returns the message about a run that cannot be continued because its files were deleted while it ran. `is_run`:
    whether the whole folder of the run was deleted, so that the same command starts from the beginning. If only the
    checkpoints were deleted, the ledger is still there, and the command is refused."""
    again = "run the same command to start from the beginning" if is_run else "start again in another --run-dir"
    return (
        f"{what} was deleted or moved while the run was using it, so nothing saved from now on could be continued; "
        f"put it back, or {again}"
    )


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the run. `token`: the attempt's number and a nonce, which identify it.

    `resumed_from` is None for a start from scratch. `skipped`: the data steps that it leaves out. `unread`: newer
    checkpoints that storage could not read at this start; retention leaves them alone. `is_unreadable`: whether this
    record is damaged or cannot be read, so that it is unknown what the attempt resumed from.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    token: Token
    resumed_from: CheckpointId | None
    skipped: Skipped
    unread: tuple[CheckpointId, ...] = ()
    is_unreadable: bool = False

    def __post_init__(self) -> None:
        refuse_disorder(self.skipped)


_ATTEMPT = TypeAdapter(Attempt)


def attempt_to_json(attempt: Attempt) -> bytes:
    """Returns an attempt's record as UTF-8 JSON that contains its own digest."""
    return sealed(_ATTEMPT.dump_json(attempt, exclude={"is_unreadable"}, exclude_defaults=True))


def attempt_from_json(data: bytes) -> Attempt:
    """Returns the attempt. Raises ValueError if the JSON is broken, or does not match the digest in it."""
    return _ATTEMPT.validate_json(unsealed(data))


def record_path(token: str) -> str:
    """Returns the path of the record of the attempt with this token."""
    return f"{ATTEMPTS}/{token}.json"


def token_from_path(path: str) -> str:
    """Returns the token of the attempt whose record is at `path`; empty for any other file."""
    found = _RECORD.fullmatch(path)
    return found[1] if found else ""


def list_committed(store: Store, *, recorded: CheckpointId | None = None) -> list[CheckpointId]:
    """Returns every checkpoint that has a manifest. `recorded`: a checkpoint that has one, even if it is not listed."""
    found = [id_from_path(path) for path in store.list()]
    committed = [each for each in found if each is not None]
    return committed if recorded is None or recorded in committed else [*committed, recorded]


def read_attempts(store: Store, *, recorded: CheckpointId | None = None) -> list[Attempt]:
    """Returns all recorded attempts, sorted by the paths of their records. Files with other names are ignored.
    `recorded`: a checkpoint whose attempt counts even if it is not listed."""
    paths = {path for path in store.list(f"{ATTEMPTS}/") if token_from_path(path)}
    if recorded and token_from_path(record_path(recorded.attempt)):
        paths.add(record_path(recorded.attempt))
    return each_at_once(lambda path: read_attempt(store, path), sorted(paths))


def read_attempt(store: Store, path: str) -> Attempt:
    """Returns the recorded attempt. It is marked as unreadable if the record is damaged or missing, names another
    attempt, or cannot be read from a store that can be listed. Its number still counts: otherwise, the next attempt
    could get the same or a lower number and would not overtake it. Raises what the store raises if it cannot be listed,
    either."""
    token = token_from_path(path)
    for _ in range(2):  # after a fault once more: perhaps the whole store did not answer
        try:
            attempt = attempt_from_json(store.read(path, most_bytes=_MOST_BYTES))
        except FAULTS:
            break
        except (OSError, StorageError) as error:
            if not isinstance(error, StorageError) and not disk_fault(error):
                raise
            next(iter(store.list(f"{ATTEMPTS}/")), "")
        else:
            if attempt.token == token:
                return attempt
            break
    return Attempt(token=token, resumed_from=None, skipped=(), is_unreadable=True)


def token_order(token: str) -> tuple[int, str]:
    """Returns the sort key of an attempt's token: its number, then the nonce."""
    number, _, nonce = token.partition("-")
    return int(number), nonce


def next_token(attempts: list[Attempt], *, nonce: str) -> str:
    """Returns the token of a new attempt: a number above all others, and a nonce in case two attempts start at once.
    Raises InvalidDataError if the highest possible number is taken, for example by a record that somebody put there."""
    last = max((attempt.token for attempt in attempts), key=token_order, default="0-")
    number = token_order(last)[0] + 1
    if number >= 10**MOST_TOKEN_DIGITS:
        raise InvalidDataError(f"{record_path(last)} in the checkpoints' folder has the highest number; move it away")
    return f"{number:04d}-{nonce}"


def next_attempt(
    attempts: list[Attempt], *, token: str, origin: CheckpointManifest | None, skip: StepRange | None
) -> Attempt:
    """Returns a new attempt that resumes from `origin`; None: it starts from scratch and leaves out nothing. It leaves
    out the data steps that this checkpoint left out, those that the latest attempt was going to leave out after this
    checkpoint (it may have ended before it saved anything), and `skip`."""
    if origin is None:
        return Attempt(token=token, resumed_from=None, skipped=())
    found, recorded = origin.position, [each for each in attempts if not each.is_unreadable]
    later = [*max(recorded, key=lambda each: token_order(each.token)).skipped] if recorded else []
    skipped = joined(found.skipped, [*later, *([skip] if skip else [])], since=found.data_step)
    return Attempt(token=token, resumed_from=origin.id, skipped=skipped)


def standing_checkpoints(committed: list[CheckpointId], attempts: list[Attempt]) -> list[CheckpointId]:
    """Returns the committed checkpoints that the fence lets through ("standing"), newest first.

    It follows the line from the latest attempt back through what each attempt resumed from. An attempt on this line
    keeps its checkpoints up to the one from which the next attempt resumed. All other checkpoints were overtaken. If no
    attempt is recorded, all checkpoints stand: they were copied here from a backup or another run.
    """
    if not attempts:
        return sorted(committed, key=lambda c: (c.step, c.attempt), reverse=True)
    by_token = {attempt.token: attempt for attempt in attempts}
    standing: list[CheckpointId] = []
    token = max(by_token, key=token_order, default=None)
    limit = None  # all checkpoints of the latest attempt stand
    while token is not None:
        own = [c for c in committed if c.attempt == token and (limit is None or c.step <= limit)]
        standing += own
        attempt = by_token.get(token)
        if attempt and attempt.is_unreadable:
            token, limit = _before(token, by_token), min((c.step for c in own), default=limit)
            continue
        origin = attempt.resumed_from if attempt else None
        token, limit = (origin.attempt, origin.step) if origin else (None, None)
    return sorted(standing, key=lambda c: (c.step, c.attempt), reverse=True)


def foreign_to(committed: list[CheckpointId], attempts: list[Attempt]) -> list[str]:
    """Returns the folders of committed checkpoints whose attempt is neither recorded nor one that a recorded attempt
    resumed from, in the order of their steps. Returns nothing if no attempt is recorded."""
    if not attempts:
        return []
    known = {attempt.token for attempt in attempts} | {a.resumed_from.attempt for a in attempts if a.resumed_from}
    return [c.folder for c in sorted(committed, key=lambda c: c.step) if c.attempt not in known]


def _before(token: str, by_token: dict[str, Attempt]) -> str | None:
    """Returns the token of the attempt before an unreadable one. The line continues with that attempt, but only up to
    the first checkpoint of the unreadable attempt, so that no later checkpoint of an overtaken attempt stands."""
    return max((t for t in by_token if token_order(t) < token_order(token)), key=token_order, default=None)


def why_over(store: Store, own: str, *, run_dir: Path) -> str:
    """Returns why the attempt with the token `own` must end; empty if it may continue."""
    tokens = [token for path in store.list(f"{ATTEMPTS}/") if (token := token_from_path(path))]
    later = max([t for t in tokens if token_order(t) > token_order(own)], key=token_order, default="")
    if later:
        return (
            f"attempt {own} of {run_dir} ends here: a later one, {later}, took over the run; "
            "leave the run to it, or end it and start again"
        )
    if not is_a_folder(run_dir):
        return gone_message(run_dir, is_run=True)
    if not store.exists(record_path(own)):  # asked for by name, since the listing may be late
        return gone_message(f"{store.url}/{record_path(own)}")
    return ""
