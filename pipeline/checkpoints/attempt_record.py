"""What an attempt (a start of a run) says about itself, below the checkpoints' root. Pure.

`attempts/0003-5f1c2a9e.json` holds which checkpoint this attempt resumed from, and the data steps that it leaves out.
"""

import re
from dataclasses import dataclass

from pydantic import ConfigDict, TypeAdapter

from pipeline.checkpoints.manifest import CheckpointId, Token
from pipeline.data.skipped import Skipped, refuse_disorder
from shards.files.seal import sealed, unsealed

ATTEMPTS = "attempts"
MOST_TOKEN_DIGITS = 18  # of an attempt's number
_RECORD = re.compile(rf"{ATTEMPTS}/([0-9]{{4,{MOST_TOKEN_DIGITS}}}-[0-9a-f]{{8}})\.json")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the run: its token sorts by number; `resumed_from` is None for a start from scratch. `skipped`: the
    data steps that it leaves out.

    `is_unreadable`: its record is damaged, so nobody knows what it resumed from.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    token: Token
    resumed_from: CheckpointId | None
    skipped: Skipped = ()
    is_unreadable: bool = False

    def __post_init__(self) -> None:
        refuse_disorder(self.skipped)


_ATTEMPT = TypeAdapter(Attempt)


def attempt_to_json(attempt: Attempt) -> bytes:
    """UTF-8 JSON of an attempt's record."""
    unused = {"is_unreadable"} if attempt.skipped else {"is_unreadable", "skipped"}
    text = _ATTEMPT.dump_json(attempt, exclude=unused) + b"\n"
    return sealed(text) if attempt.skipped else text  # older versions read those that skip nothing


def attempt_from_json(data: bytes) -> Attempt:
    """The attempt. ValueError if the JSON is broken, or does not have the digest that it carries."""
    return _ATTEMPT.validate_json(unsealed(data) if b'"digest"' in data else data)


def record_path(token: str) -> str:
    """Where the record of the attempt with this token is."""
    return f"{ATTEMPTS}/{token}.json"


def token_from_path(path: str) -> str:
    """The token of the attempt whose record is at `path`; empty for any other file."""
    found = _RECORD.fullmatch(path)
    return found[1] if found else ""
