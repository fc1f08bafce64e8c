"""Reads the orientation from an EXIF block; nothing else in it is used."""

import struct

from shards.orientation import TAG, TURNS, UPRIGHT

PREFIX = b"Exif\0\0"
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">", b"II\0*": "<", b"MM*\0": ">"}  # the last two are wrong, but occur
_NUMBER_FORMATS = {3: "H", 4: "I"}  # SHORT by the standard; some programs write LONG


def orientation_of(exif: bytes) -> int:
    """1 to 8; 1 (upright) if the block, given without its PREFIX, has no orientation or is damaged.

    XMP may have an orientation too. Few decoders read it, and neither do we.
    """
    order = _BYTE_ORDERS.get(exif[:4])
    if order is None:
        return UPRIGHT
    try:
        return _search(exif, order)
    except struct.error:  # the block ends within its first directory
        return UPRIGHT


def _search(exif: bytes, order: str) -> int:
    (directory,) = struct.unpack_from(f"{order}I", exif, 4)
    (num_entries,) = struct.unpack_from(f"{order}H", exif, directory)
    entry = struct.Struct(f"{order}HHI4s")
    for number in range(num_entries):
        tag, kind, count, value = entry.unpack_from(exif, directory + 2 + 12 * number)
        if tag != TAG:
            continue
        if count != 1 or kind not in _NUMBER_FORMATS:
            return UPRIGHT
        orientation = int(struct.unpack_from(order + _NUMBER_FORMATS[kind], value)[0])
        return orientation if orientation in TURNS else UPRIGHT
    return UPRIGHT
