"""Which checkpoints of a run count, from the records of its attempts. Pure.

The fence against zombies is on the reading side and needs nothing from the store: attempts are numbered, each says what
it resumed from, and a manifest is ignored if a later attempt exists that did not resume from it or from its descendant.
"""

from pipeline.checkpoints.attempt_record import MOST_TOKEN_DIGITS, Attempt, record_path
from pipeline.checkpoints.manifest import CheckpointId, Manifest
from pipeline.data.skipped import StepRange, joined
from shards.errors import InvalidDataError


def token_order(token: str) -> tuple[int, str]:
    """Sort key of an attempt's token: its number, then the nonce."""
    number, _, nonce = token.partition("-")
    return int(number), nonce


def next_token(attempts: list[Attempt], *, nonce: str) -> str:
    """Token of a new attempt: a number above all others, and a nonce in case two start at once. InvalidDataError if
    there is none left: somebody put a record there."""
    last = max((attempt.token for attempt in attempts), key=token_order, default="0-")
    number = token_order(last)[0] + 1
    if number >= 10**MOST_TOKEN_DIGITS:
        raise InvalidDataError(f"{record_path(last)} in the checkpoints' folder has the highest number; move it away")
    return f"{number:04d}-{nonce}"


def next_attempt(attempts: list[Attempt], *, token: str, origin: Manifest | None, skip: StepRange | None) -> Attempt:
    """A new attempt that resumes from `origin`. It leaves out what the checkpoint did, what the latest attempt was to
    leave out after it (it may have ended before it saved anything), and `skip`."""
    if origin is None:
        return Attempt(token=token, resumed_from=None)
    found, recorded = origin.position, [each for each in attempts if not each.is_unreadable]
    later = [*max(recorded, key=lambda each: token_order(each.token)).skipped] if recorded else []
    skipped = joined(found.skipped, [*later, *([skip] if skip else [])], since=found.data_step or 0)
    return Attempt(token=token, resumed_from=origin.id, skipped=skipped)


def standing_checkpoints(committed: list[CheckpointId], attempts: list[Attempt]) -> list[CheckpointId]:
    """Committed checkpoints that the fence lets through, newest first.

    Walk back from the latest attempt along what each resumed from. Of an attempt on this line, the checkpoints up to
    the one that its successor resumed from stand. Everything else was written by an attempt that was overtaken.
    """
    by_token = {attempt.token: attempt for attempt in attempts}
    standing: list[CheckpointId] = []
    token = max(by_token, key=token_order, default=None)
    limit = None  # the latest attempt's own checkpoints stand without limit
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


def _before(token: str, by_token: dict[str, Attempt]) -> str | None:
    """The attempt before one that does not say what it resumed from: the line continues with it, up to the first
    checkpoint of the later one, so that no checkpoint of an overtaken attempt comes before those of the later one."""
    return max((t for t in by_token if token_order(t) < token_order(token)), key=token_order, default=None)
