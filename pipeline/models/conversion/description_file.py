"""Reads the JSON files that describe weights, and lie beside them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.models.conversion.tensor_file import readable
from pipeline.models.weights.folder import MOST_DESCRIPTION_BYTES
from shards.errors import UserError
from shards.files.local_files import read_local_file
from shards.files.typed_json import parse_json


def json_object(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file. Raises UserError if it cannot be read, or holds something else."""
    try:
        with readable(repr(str(path))):
            content = parse_json(read_local_file(path, most_bytes=MOST_DESCRIPTION_BYTES))
    except UserError as error:
        if isinstance(error.__cause__, ValueError):
            raise UserError(f"{str(path)!r} is no JSON ({error.__cause__}); fetch it again") from error
        raise
    if not isinstance(content, dict):
        raise UserError(f"{str(path)!r} is no JSON object; fetch it again")
    return content
