"""Finds JPEGs and PNGs that lack a part because a bad disk zeroed it, or because the file was cut and given a new end.

Pillow, like most decoders, fills what is missing with grey, black or noise, and reports nothing.
"""

import re
import struct
import zlib

import simplejpeg

_JPEG = b"\xff\xd8\xff"
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)  # restarts have no length, and there may be millions
_END, _SCAN, _PROGRESSIVE = 0xD9, 0xDA, 0xC2
_COEFFICIENTS = 64
_LOST = ("Corrupt JPEG data", "Premature end of JPEG file")
_PNG = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by PNG colour type
# First column and row of each pass of Adam7, then the steps between columns and rows (PNG specification, section 8.2).
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_PIECE_BYTES = 1 << 16


def jpeg_damage(data: bytes | memoryview) -> str:
    """Returns what a strict decoder says about a JPEG with missing parts; "" for a sound JPEG and for other formats.

    It decodes in grey at an eighth of the size, which reads every coefficient in less time than a full decode. libjpeg
    also warns about oddities that change no pixel; only its messages about lost data count.
    """
    if data[:3] != _JPEG:
        return ""
    try:
        simplejpeg.decode_jpeg(data, colorspace="GRAY", min_height=1, min_width=1, min_factor=8)
    except Exception as error:  # usually a ValueError
        reason = " ".join(str(error).split())
        return reason if reason.startswith(_LOST) else ""
    try:
        return "scans of a progressive JPEG are missing" if _lacks_scans(data) else ""
    except (IndexError, KeyError, ValueError):  # the decoder accepted the file, so it is not damaged
        return ""


def _lacks_scans(data: bytes | memoryview) -> bool:
    """Returns whether the scans of a progressive JPEG leave out a coefficient, or a part of its precision (ITU-T T.81,
    annex G). A decoder does not notice that a file was cut between two scans. Returns False for a baseline JPEG."""
    missing_bits: dict[int, list[int]] = {}  # per coefficient, by component; 16: in no scan yet
    position = 2
    while found := _MARKER.search(data, position):
        marker, body = data[found.end() - 1], found.end() + 2
        if marker == _END:
            break
        position = body - 2 + int.from_bytes(data[body - 2 : body], "big")
        if marker == _PROGRESSIVE:
            missing_bits = {data[body + 6 + 3 * place]: [16] * _COEFFICIENTS for place in range(data[body + 5])}
        elif marker == _SCAN and not missing_bits:
            break
        elif marker == _SCAN:
            num_components = data[body]
            first, last, bits = data[body + 1 + 2 * num_components : body + 4 + 2 * num_components]
            for component in data[body + 1 : body + 1 + 2 * num_components : 2]:
                missing_bits[component][first : last + 1] = [bits & 0xF] * (last + 1 - first)
    return any(any(bits) for bits in missing_bits.values())


def png_damage(data: bytes | memoryview) -> str:
    """Returns "its pixel data has 90 of 100 bytes" if part of a PNG is missing; "" for a complete PNG, another format,
    or a file that a decoder refuses. The pixel data is inflated in pieces, and none of it is kept."""
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
    except (zlib.error, struct.error, KeyError):  # the decoder reports what is wrong
        return ""
    return f"its pixel data has {found:,} of {wanted:,} bytes" if found < wanted else ""


def _raw_bytes(header: bytes | memoryview) -> int:
    """Returns the number of bytes of the pixel data. Each row is rounded up to whole bytes and follows a byte for its
    filter."""
    width, height, depth, colour, _, _, is_interlaced = struct.unpack_from(">IIBBBBB", header)
    bits = depth * _CHANNELS[colour]
    passes = _ADAM7 if is_interlaced else ((0, 0, 1, 1),)
    sizes = ((-(-(width - x) // dx), -(-(height - y) // dy)) for x, y, dx, dy in passes)
    return sum(rows * (1 + -(-columns * bits // 8)) for columns, rows in sizes if columns > 0 and rows > 0)


def _num_inflated(inflate: "zlib._Decompress", body: bytes | memoryview, *, most: int) -> int:
    """Returns how many bytes a part of the stream inflates to, up to about `most`. zlib gets the part in pieces, since
    it copies all bytes that it has not consumed."""
    found = 0
    for begin in range(0, len(body), _PIECE_BYTES):
        left = bytes(body[begin : begin + _PIECE_BYTES])
        while left and found < most and not inflate.eof:
            found += len(inflate.decompress(left, _PIECE_BYTES))
            left = inflate.unconsumed_tail
    return found
