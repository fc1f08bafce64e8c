"""The eight orientations of EXIF 2.32: how an EXIF block encodes them, and how stored pixels are turned upright."""

import struct
from dataclasses import dataclass

from PIL.Image import Transpose

TAG = 0x0112
UPRIGHT = 1
EXIF_PREFIX = b"Exif\0\0"
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">", b"II\0*": "<", b"MM*\0": ">"}  # the last two are wrong, but occur
_NUMBER_FORMATS = {3: "H", 4: "I"}  # the standard requires SHORT; some programs write LONG


@dataclass(frozen=True, kw_only=True)
class Turn:
    """How an image is turned upright: rows and columns are exchanged first, then mirrored. `transpose`: Pillow's name
    for the turn (None: nothing to do)."""

    is_exchanged: bool
    is_upside_down: bool
    is_leftright: bool
    transpose: Transpose | None


TURNS = {
    orientation: Turn(is_exchanged=exchanged, is_upside_down=upside_down, is_leftright=leftright, transpose=transpose)
    for orientation, (exchanged, upside_down, leftright, transpose) in {
        UPRIGHT: (False, False, False, None),
        2: (False, False, True, Transpose.FLIP_LEFT_RIGHT),
        3: (False, True, True, Transpose.ROTATE_180),
        4: (False, True, False, Transpose.FLIP_TOP_BOTTOM),
        5: (True, False, False, Transpose.TRANSPOSE),
        6: (True, False, True, Transpose.ROTATE_270),
        7: (True, True, True, Transpose.TRANSVERSE),
        8: (True, True, False, Transpose.ROTATE_90),
    }.items()
}


def orientation_of(exif: bytes) -> int:
    """Returns the orientation, 1 to 8, in an EXIF block without its EXIF_PREFIX; 1 (upright) if the block has none or
    is damaged.

    XMP may have an orientation too. Few decoders read it, and Patchline does not.
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
