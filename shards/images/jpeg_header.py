"""Parses a JPEG header, from its markers alone (ITU-T T.81, annex B).

The parser is exact, since every image of a collection goes through it. Like libjpeg, it skips fill bytes and bytes
between segments, and takes an unknown marker for damage.
"""

import re
from collections.abc import Iterable

from shards.errors import ImageRefusedError
from shards.orientation import EXIF_PREFIX, orientation_of

_NEXT_MARKER = re.compile(rb"\xff[^\x00\xff]", re.DOTALL)  # skips fill bytes, and bytes between two segments
_START, _END, _SCAN, _APP1 = 0xD8, 0xD9, 0xDA, 0xE1
_RESTARTS = bytes(range(0xD0, 0xD8))  # have no length and no meaning here
_FRAMES = frozenset((0xC0, 0xC1, 0xC2))  # baseline, extended and progressive, Huffman coded
_OTHER_FRAMES = {
    **dict.fromkeys((0xC3, 0xC7, 0xCB, 0xCF), "lossless"),
    **dict.fromkeys((0xC5, 0xC6, 0xCD, 0xCE), "hierarchical"),
    **dict.fromkeys((0xC9, 0xCA), "arithmetic-coded"),  # Pillow, browsers and GPU decoders do not read it
}
_TAKEN = _FRAMES | {_SCAN, 0xC4, 0xCC, 0xDB, 0xDC, 0xDD, 0xFE, *range(0xE0, 0xF0)}  # also tables, comments, APPn
_MODES = {1: "L", 3: "RGB", 4: "CMYK"}  # by components, as Pillow names them; YCCK is CMYK to it


def jpeg_facts(data: bytes) -> tuple[int, int, str, int]:
    """Height and width as stored, mode, EXIF orientation. Raises ImageRefusedError with the reason."""
    frame: tuple[int, int, str] | None = None
    exif: list[bytes] = []
    position = 2
    while True:
        marker, position, following = _segment(data, position)
        if marker == _SCAN:
            break
        if marker in _FRAMES:
            if frame:
                raise ImageRefusedError("damaged JPEG header: two frames")
            frame = _frame(data[position:following])
        elif marker == _APP1 and data.startswith(EXIF_PREFIX, position):
            exif.append(data[position + len(EXIF_PREFIX) : following])
        position = following
    if frame is None:
        raise ImageRefusedError("damaged JPEG header: no frame before the first scan")
    # Within a scan, 0xFF is followed by 0, so only a real end is found. The backward search is fast if the image is
    # whole; the end of an embedded thumbnail lies before the scan.
    if data.rfind(b"\xff\xd9", following) < 0:
        raise ImageRefusedError(f"truncated: a JPEG without its end, {len(data)} bytes")
    return (*frame, _orientation(exif) if exif else 1)


def _segment(data: bytes, position: int) -> tuple[int, int, int]:
    """The next segment: its marker, and where its contents begin and end."""
    marker = _RESTARTS[0]
    while marker in _RESTARTS:
        found = _NEXT_MARKER.search(data, position)
        if found is None:
            raise ImageRefusedError("truncated: ends within the JPEG header")
        position = found.end()
        marker = data[position - 1]
    if marker not in _TAKEN:
        raise _refusal_of_marker(marker)
    following = position + int.from_bytes(data[position : position + 2], "big")
    if following > len(data) or position + 2 > len(data):
        raise ImageRefusedError("truncated: ends within the JPEG header")
    if following < position + 2:
        raise ImageRefusedError("damaged JPEG header: a segment of no length")
    return marker, position + 2, following


def _refusal_of_marker(marker: int) -> ImageRefusedError:
    if marker in _OTHER_FRAMES:
        return ImageRefusedError(f"{_OTHER_FRAMES[marker]} JPEG, which the decoders do not read")
    names = {_END: "it ends before its first scan", _START: "two starts"}
    return ImageRefusedError(f"damaged JPEG header: {names.get(marker, f'unknown marker 0x{marker:02x}')}")


def _frame(contents: bytes) -> tuple[int, int, str]:
    """Height, width and mode from the contents of a frame's segment."""
    if len(contents) < 6 or len(contents) != 6 + 3 * contents[5]:
        raise ImageRefusedError("damaged JPEG header: frame of a wrong length")
    bits, num_components = contents[0], contents[5]
    if bits != 8 or num_components not in _MODES:
        raise ImageRefusedError(f"JPEG with {num_components} components of {bits} bits; allowed: 1, 3 or 4 of 8 bits")
    height, width = int.from_bytes(contents[1:3], "big"), int.from_bytes(contents[3:5], "big")
    if not height and width:
        raise ImageRefusedError("JPEG whose height follows its first scan (DNL), which decoders do not read")
    return height, width, _MODES[num_components]


def _orientation(exif: Iterable[bytes]) -> int:
    """The orientation, from all segments: a block of more than 64 KiB is split over several."""
    return orientation_of(b"".join(exif).removeprefix(EXIF_PREFIX))
