"""PNGs whose pixel data ends early in chunks that are sound: Pillow fills the rest with black and says nothing."""

import struct
import zlib

_PNG = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
# First column and row of each pass of Adam7, and the steps from one to the next (PNG specification, section 8.2).
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_PIECE_BYTES = 1 << 16


def png_damage(data: bytes | memoryview) -> str:
    """Returns how many rows' worth of bytes a PNG lacks; "" for a whole one, another format, or one that a decoder
    refuses. The pixel data is inflated in pieces, and none of it is kept."""
    if data[: len(_PNG)] != _PNG:
        return ""
    wanted = found = 0
    inflate = zlib.decompressobj()
    position = len(_PNG)
    try:
        while position + 12 <= len(data):
            size, kind = struct.unpack_from(">I4s", data, position)
            body = data[position + 8 : position + 8 + size]
            if kind == b"IHDR":
                wanted = _raw_bytes(body)
            elif kind == b"IDAT":
                found += _num_inflated(inflate, body, most=wanted - found)
            position += 12 + size
    except (zlib.error, struct.error, KeyError):  # whoever decodes it says why
        return ""
    return f"its pixel data has {found:,} of {wanted:,} bytes" if found < wanted else ""


def _raw_bytes(header: bytes | memoryview) -> int:
    """The bytes of the pixel data: rows of whole bytes, each with its filter in front."""
    width, height, depth, colour, _, _, is_interlaced = struct.unpack_from(">IIBBBBB", header)
    bits = depth * _CHANNELS[colour]
    passes = _ADAM7 if is_interlaced else ((0, 0, 1, 1),)
    sizes = ((-(-(width - x) // dx), -(-(height - y) // dy)) for x, y, dx, dy in passes)
    return sum(rows * (1 + -(-columns * bits // 8)) for columns, rows in sizes if columns > 0 and rows > 0)


def _num_inflated(inflate: "zlib._Decompress", body: bytes | memoryview, *, most: int) -> int:
    """How many bytes a part of the stream inflates to, up to about `most`. It is handed over in pieces, since zlib
    copies what it has not consumed."""
    found = 0
    for begin in range(0, len(body), _PIECE_BYTES):
        left = bytes(body[begin : begin + _PIECE_BYTES])
        while left and found < most and not inflate.eof:
            found += len(inflate.decompress(left, _PIECE_BYTES))
            left = inflate.unconsumed_tail
    return found
