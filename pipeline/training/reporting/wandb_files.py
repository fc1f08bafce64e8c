"""Reads the last step out of W&B's own file of a run, and tells whether something still writes it.

The file is LevelDB's log: blocks of 32 KiB with pieces of records, each with a checksum, after a head of 7 bytes. A
record is a message of wandb_internal.proto. The process that writes it may be killed at any byte.
"""

import glob
import json
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from shards.files.json_lines import is_step
from shards.local_file import open_local_file

_BLOCK_BYTES = 1 << 15
_MOST_RECORD_BYTES = 1 << 26
_HEAD = struct.Struct("<4sHB")  # of the file
_MAGIC = b":W&B"
_PIECE = struct.Struct("<IHB")  # checksum, length, type
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def last_step(path: Path) -> int:
    """The last step in a file of W&B; 0 if there is none."""
    from wandb.proto.wandb_internal_pb2 import Record  # noqa: PLC0415 - an extra

    last = 0
    with open_local_file(path) as file:
        for data in _records(file):
            with suppress(DecodeError, ValueError):  # it is as it was written, but by another hand
                record = Record.FromString(data)
                if record.HasField("history"):
                    last = max(last, _step_of(record.history))
    return last


def is_open(path: Path) -> bool:
    """Whether a process of this user on this host has the file open."""
    wanted = str(path.resolve())
    for link in glob.iglob("/proc/[0-9]*/fd/*"):  # noqa: PTH207 - Path.glob fails at a process that ends meanwhile
        try:
            if str(Path(link).readlink()) == wanted:
                return True
        except OSError:  # it has ended, or is another user's
            continue
    return False


def _step_of(history: Any) -> int:
    """Of one row; 0 if it has none that makes sense."""
    if history.HasField("step"):
        return int(history.step.num) if is_step(history.step.num) else 0
    for item in history.item:
        if item.key == "_step" or list(item.nested_key) == ["_step"]:
            found = json.loads(item.value_json or "0")
            return int(found) if is_step(found) else 0
    return 0


def _records(file: BufferedReader) -> Iterator[bytes]:
    """All records up to the first byte that is not as it was written."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or _HEAD.unpack(head)[0] != _MAGIC:
        return
    parts: list[bytes] = []
    for kind, data in _pieces(file):
        parts = [*parts, data] if kind in (_MIDDLE, _LAST) else [data]
        if sum(map(len, parts)) > _MOST_RECORD_BYTES:
            return
        if kind in (_WHOLE, _LAST):
            yield b"".join(parts)


def _pieces(file: BufferedReader) -> Iterator[tuple[int, bytes]]:
    """The pieces of records, each with its type."""
    while True:
        left = _BLOCK_BYTES - file.tell() % _BLOCK_BYTES
        if left < _PIECE.size:
            file.read(left)  # a block ends with zeros
            continue
        head = file.read(_PIECE.size)
        if len(head) < _PIECE.size:
            return
        checksum, num_bytes, kind = _PIECE.unpack(head)
        data = file.read(num_bytes)
        is_right = zlib.crc32(data, zlib.crc32(bytes([kind]))) == checksum
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or len(data) < num_bytes or not is_right:
            return
        yield kind, data
