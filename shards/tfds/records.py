"""TFRecord files: one record after the other, each with its length and two checksums.

The format, from TensorFlow's `record_writer.h`: the length (uint64, little-endian), its masked CRC-32C (uint32), the
data, and the data's masked CRC-32C (uint32). There is no header and no index.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from shards.errors import ImageRefusedError
from shards.storage.pieces import Pieces
from shards.tfds.crc32c import masked_crc32c

_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size + _CRC.size
AROUND_BYTES = HEADER_BYTES + _CRC.size


class DamagedShardError(ValueError):
    """The file is damaged so that no further record can be found."""


@dataclass(frozen=True, kw_only=True)
class TfRecord:
    """A record: its data, or why it cannot be used. `offset` is where the data begins in the file."""

    offset: int
    data: bytes | ImageRefusedError


def read_records(pieces: Pieces, *, skip: int, most_bytes: int) -> Iterator[TfRecord]:
    """The records after the first `skip`, whose data is not read. One of more than `most_bytes` is not read either.

    Raises DamagedShardError if a length cannot be right; also the errors of `pieces`.
    """
    number = 0
    while pieces.position < pieces.end:
        length = _next_length(pieces, number)
        offset = pieces.position
        if number < skip:
            pieces.skip(length + _CRC.size)
        elif length > most_bytes:
            pieces.skip(length + _CRC.size)
            yield TfRecord(offset=offset, data=ImageRefusedError(f"too large: {length} bytes, allowed: {most_bytes}"))
        else:
            data = pieces.take(length)
            (expected,) = _CRC.unpack(pieces.take(_CRC.size))
            is_whole = masked_crc32c(data) == expected
            fault = ImageRefusedError("damaged TFRecord: the checksum of its data is wrong")
            yield TfRecord(offset=offset, data=data if is_whole else fault)
        number += 1


def _next_length(pieces: Pieces, number: int) -> int:
    """The length of the next record, which lies in the file as a whole."""
    header, where = pieces.take(HEADER_BYTES), f"record {number}"
    if len(header) < HEADER_BYTES:
        raise DamagedShardError(f"{where} is cut off: the file ends within its length")
    (length,), (expected,) = _LENGTH.unpack_from(header), _CRC.unpack_from(header, _LENGTH.size)
    if masked_crc32c(header[: _LENGTH.size]) != expected:
        raise DamagedShardError(f"the checksum of the length of {where} is wrong; this is no TFRecord file, or damaged")
    if length > pieces.end - pieces.position - _CRC.size:
        left = max(0, pieces.end - pieces.position - _CRC.size)
        raise DamagedShardError(f"{where} is cut off: it has {length} bytes, and {left} are left in the file")
    return int(length)
