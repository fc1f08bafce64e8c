"""RUN/loggers.json: the name by which the services know a run, so that every start of it continues the same one.

It is written before anything is sent: killed at any moment, a run leaves no second one behind.
"""

import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from shards.errors import InvalidDataError
from shards.files.json_lines import write_whole
from shards.files.typed_json import read_record
from shards.local_file import read_local_file
from shards.schema.config_values import shown_value

FILE_NAME = "loggers.json"
_MOST_BYTES = 1 << 12
_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, kw_only=True)
class _Record:
    """ValueError if the id is none of ours."""

    id: str

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ValueError(f"id is {shown_value(self.id)}; allowed: 16 digits of 0 to 9 and a to f")


def read_logger_id(run_dir: Path) -> str:
    """The run's id at its services; empty if it has none yet. InvalidDataError if the file is damaged."""
    path = run_dir / FILE_NAME
    try:
        return read_record(_Record, read_local_file(path, most_bytes=_MOST_BYTES)).id
    except FileNotFoundError:
        return ""
    except (ValueError, InvalidDataError, IsADirectoryError) as error:
        raise InvalidDataError(
            f"{path} is damaged ({error}); it names the run at MLflow and W&B: restore it, or move it away to begin a "
            "new run there, which gets all of metrics.jsonl"
        ) from error


def logger_id(run_dir: Path) -> str:
    """The run's id at its services, made and written down if it has none yet."""
    found = read_logger_id(run_dir)
    if found:
        return found
    made = secrets.token_hex(8)
    write_whole(run_dir / FILE_NAME, json.dumps({"id": made}).encode() + b"\n")
    return made
