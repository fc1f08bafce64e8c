"""How a file of each format is edited by structure, and any file as bytes."""

import base64
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from tests.fuzz import archive_edits, byte_edits, json_edits, parquet_edits, record_edits
from tests.fuzz.byte_edits import Edit

BYTES, WHOLE = "bytes", "whole"


@dataclass(frozen=True, kw_only=True)
class Format:
    """`propose` draws an edit of a file, `apply` makes it; both may raise anything for a file of another format."""

    propose: Callable[[Random, bytes], Edit]
    apply: Callable[[bytes, Edit], bytes]


FORMATS = {
    BYTES: Format(propose=byte_edits.propose, apply=byte_edits.apply),
    "json": Format(propose=json_edits.propose, apply=json_edits.apply),
    "json lines": Format(propose=json_edits.propose_lines, apply=json_edits.apply_lines),
    "safetensors": Format(propose=json_edits.propose_header, apply=json_edits.apply_header),
    "parquet": Format(propose=parquet_edits.propose, apply=parquet_edits.apply),
    "zip": Format(propose=archive_edits.propose_zip, apply=archive_edits.apply_zip),
    "tar": Format(propose=archive_edits.propose_tar, apply=archive_edits.apply_tar),
    "tfrecord": Format(propose=record_edits.propose, apply=record_edits.apply),
    "csv": Format(propose=archive_edits.propose_csv, apply=archive_edits.apply_csv),
}


def propose(rng: Random, kind: str, data: bytes) -> Edit:
    """An edit of a file of this format, with the name of the format first; two in five are of its bytes."""
    if kind != BYTES and rng.random() < 0.6:
        with suppress(Exception):  # an earlier edit has broken the file
            return [kind, *FORMATS[kind].propose(rng, data)]
    return [BYTES, *byte_edits.propose(rng, data)]


def apply(data: bytes, edit: Edit) -> bytes:
    """The file after an edit; the same if its structure is broken already."""
    kind, *rest = edit
    if kind == WHOLE:
        return zlib.decompress(base64.b64decode(rest[0]))
    try:
        return FORMATS[kind].apply(data, rest)
    except Exception:
        if kind == BYTES:
            raise
        return data


def whole(data: bytes) -> Edit:
    """The edit that gives a file this content, whatever it was."""
    return [WHOLE, base64.b64encode(zlib.compress(data, 9)).decode()]
