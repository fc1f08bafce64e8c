"""Edits of TFRecords by structure: records dropped, repeated, swapped or changed inside, with right checksums."""

import struct
from random import Random

from tests.fuzz import byte_edits
from tests.fuzz.byte_edits import INTEGERS, Edit
from tests.rigs.prepared import framed, masked

_HEADER, _CRC_BYTES = struct.Struct("<QI"), 4


def propose(rng: Random, data: bytes) -> Edit:
    """An edit of a file of records."""
    records = _records(data)
    number = rng.randrange(len(records))
    name = rng.choice(("inside", "inside", "inside", "drop", "twice", "order", "length"))
    if name == "inside":
        return [name, number, byte_edits.propose(rng, records[number])]
    return [name, number, rng.choice(INTEGERS) if name == "length" else rng.randrange(len(records))]


def apply(data: bytes, edit: Edit) -> bytes:
    """The file after the edit."""
    records = _records(data)
    name, number, value = edit
    match name:
        case "inside":
            records[number] = byte_edits.apply(records[number], value)
        case "drop":
            del records[number]
        case "twice":
            records.insert(value, records[number])
        case "order":
            records.insert(value, records.pop(number))
    found = [*map(framed, records)]
    if name == "length":
        told = struct.pack("<Q", value)
        found[number] = told + struct.pack("<I", masked(told)) + found[number][_HEADER.size :]
    return b"".join(found)


def _records(data: bytes) -> list[bytes]:
    """The data of all records of a file that is whole."""
    records, position = [], 0
    while position < len(data):
        length, _ = _HEADER.unpack_from(data, position)
        begin = position + _HEADER.size
        if length > len(data) - begin:
            raise ValueError("an earlier edit has cut the file")
        records.append(data[begin : begin + length])
        position = begin + length + _CRC_BYTES
    return records
