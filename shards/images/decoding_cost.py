"""Refuses images that would cost far more to decode than others of their size, by reading only their markers.

A file of 25 kB can have 882 scans, each a pass over the whole image in C that nothing interrupts, and a file of 34
bytes can ask for a gigabyte. All code that opens or decodes an image calls `refuse_costly` first. The markers are read
as libjpeg, Pillow and libwebp read them: what these skip is skipped, and reading stops where they stop with an error.
"""

import re
import struct
from collections.abc import Iterator
from math import prod
from typing import NoReturn

from shards.errors import ImageRefusedError
from shards.images.config import WIDEST_LIMITS, ImageLimits
from shards.orientation import EXIF_PREFIX
from shards.output.quantities import plural

Data = bytes | memoryview
_NEXT_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]", re.DOTALL).search  # restart markers have no length
_START, _END, _SCAN, _APP1 = 0xD8, 0xD9, 0xDA, 0xE1
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = frozenset((0xC2, 0xCA))
_SAFE_FRAMES = frozenset((0xC0, 0xC1, 0xC2, 0xC9, 0xCA))  # sequential and progressive, Huffman or arithmetic
_COEFFICIENT_BYTES, _PIXEL_BYTES, _WEBP_PIXEL_BYTES = 2, 3, 16  # WebP: colours, two canvases, libwebp's buffer
_PNG_CHUNK, _WEBP_CHUNK = struct.Struct(">I4s"), struct.Struct("<4sI")
_ADAM7_PASSES = 7
_PROFILE_CHUNKS = 1024  # a colour profile counts as this many, since Pillow inflates it, to at most 1 MB
_EXIF_CHUNKS = 1024  # a part of an EXIF block counts as this many, since Pillow copies all earlier parts again
_TIFF_TEXT = frozenset((1, 2, 7))  # types that Pillow keeps as bytes; values of other types become numbers
_TIFF_PARTS = frozenset((273, 279, 324, 325))  # tags of strips and tiles; Pillow makes an object of each value


def refuse_costly(data: Data, limits: ImageLimits) -> None:
    """Raises ImageRefusedError, which names the flag that raises the limit, if decoding costs more than `limits` allow.

    Damaged images and unknown formats pass, since the decoder refuses them. Lossless and hierarchical JPEGs are
    refused: libjpeg-turbo 3 writes beyond its memory when it decodes a lossless one at a reduced scale. The check of a
    baseline JPEG takes 5 microseconds. For others, it takes as long as a search for the byte 0xFF in all of the data,
    and at most a microsecond per chunk.
    """
    try:
        match bytes(data[:3]):
            case b"\xff\xd8\xff":
                _check_jpeg(data, limits)
            case b"\x89PN":
                _check_png(data, limits)
            case b"RIF":
                _check_webp(data, limits)
            case b"GIF":
                _check_gif(data, limits)
            case b"II*" | b"II+" | b"MM\0":
                _check_tiff(data, limits)
    except (IndexError, struct.error):  # the file ends too early
        return


def _check_jpeg(data: Data, limits: ImageLimits) -> None:
    frame = num_segments = num_scans = scan_pixels = coefficients = 0
    of_component: dict[int, int] = {}
    has_exif = False
    position = 2
    while found := _NEXT_MARKER(data, position):
        position = found.end()
        marker = data[position - 1]
        if position + 3 > len(data):
            break
        if marker == _SCAN:
            chosen = data[position + 3 : position + 3 + 2 * data[position + 2] : 2]
            if not num_scans:
                if not frame or (data[frame - 1] not in _PROGRESSIVE and len(chosen) == data[frame + 7]):
                    return  # libjpeg decodes row by row, and refuses a second scan
                coefficients, of_component = _coefficients(data, frame)
            num_scans += 1
            scan_pixels += sum(of_component.get(component, 0) for component in chosen)
        elif marker in _FRAMES:
            if marker not in _SAFE_FRAMES:
                raise ImageRefusedError("a lossless or hierarchical JPEG, which decoders do not read safely")
            frame = frame or position
        elif marker == _APP1 and data[position + 2 : position + 8] == EXIF_PREFIX:
            has_exif = True
            num_segments += _EXIF_CHUNKS - 1
        elif marker in (_START, _END):
            if num_scans:
                break
            continue  # neither has a length; before the first scan, Pillow skips them
        num_segments += 1
        if num_segments > limits.max_chunks:
            what = f" (a part of its EXIF counts as {_EXIF_CHUNKS})" if has_exif else ""
            _refuse_chunks("a JPEG", f"segments{what}", limits)
        position += max(2, data[position] << 8 | data[position + 1])
    if num_scans:
        height, width = struct.unpack_from(">HH", data, frame + 3)
        num_bytes = _COEFFICIENT_BYTES * coefficients + _PIXEL_BYTES * height * width
        _refuse_scans(num_scans, scan_pixels, num_bytes, limits)


def _refuse_scans(num_scans: int, scan_pixels: int, num_bytes: int, limits: ImageLimits) -> None:
    what = f"a JPEG of {plural(num_scans, 'scan')}"
    if num_scans > limits.max_scans:
        _refuse(what, limits, "max_scans")
    if scan_pixels > limits.max_scan_pixels:
        _refuse(f"{what} with {scan_pixels} pixels in all", limits, "max_scan_pixels")
    _refuse_memory(what, num_bytes, limits)


def _coefficients(data: Data, frame: int) -> tuple[int, dict[int, int]]:
    """Returns the number of coefficients in a frame (64 per block), then the number in each of its components, by
    component id."""
    *size, num_components = struct.unpack_from(">HHB", data, frame + 3)
    each = [struct.unpack_from("BBx", data, frame + 8 + 3 * number) for number in range(num_components)]
    factors = [(identity, (sampling & 0xF, sampling >> 4)) for identity, sampling in each]
    most = [max(1, *(factor[side] for _, factor in factors)) for side in (0, 1)] if factors else [1, 1]
    total, of_component = 0, dict[int, int]()
    for identity, factor in factors:
        # libjpeg rounds sizes up to whole blocks, and numbers of blocks up to a multiple of the sampling factor.
        blocks = [
            -(-pixels * mine // (8 * largest) // max(1, mine)) * max(1, mine)
            for pixels, mine, largest in zip(size, factor, most, strict=True)
        ]
        total += 64 * prod(blocks)
        of_component[identity] = max(of_component.get(identity, 0), 64 * prod(blocks))
    return total, of_component


def _check_png(data: Data, limits: ImageLimits) -> None:
    if data[28] and limits.max_scans < _ADAM7_PASSES:
        _refuse(f"an interlaced PNG, which has {_ADAM7_PASSES} passes", limits, "max_scans")
    position, num_chunks, name = 8, 0, b""
    while name != b"IEND":
        length, name = _PNG_CHUNK.unpack_from(data, position)
        num_chunks += _PROFILE_CHUNKS if name == b"iCCP" else 1
        if num_chunks > limits.max_chunks:
            what = f" (a profile counts as {_PROFILE_CHUNKS})" if name == b"iCCP" else ""
            _refuse_chunks("a PNG", f"chunks{what}", limits)
        position += 12 + length


def _check_webp(data: Data, limits: ImageLimits) -> None:
    if data[8:12] != b"WEBP":
        return
    height, width = webp_size(data)
    _refuse_memory(f"a WebP of {height}x{width} pixels", _WEBP_PIXEL_BYTES * height * width, limits)
    position, num_chunks = 12, 0
    while position + 8 <= len(data):
        num_chunks += 1
        if num_chunks > limits.max_chunks:
            _refuse_chunks("a WebP", "chunks and frames", limits)
        _, length = _WEBP_CHUNK.unpack_from(data, position)
        position += 8 + length + length % 2


def webp_size(data: bytes | memoryview) -> tuple[int, int]:
    """Returns the height and the width of the canvas, from the header. Raises struct.error if the header is cut off."""
    name = bytes(data[12:16])
    if name == b"VP8X":
        (wide,) = struct.unpack_from("<I", data, 24)
        (high,) = struct.unpack_from("<I", data, 26)
        return 1 + (high >> 8), 1 + (wide & 0xFFFFFF)
    if name == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return ((bits >> 14) & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    width, height = struct.unpack_from("<HH", data, 26)
    return height & 0x3FFF, width & 0x3FFF  # the upper bits are a hint for scaling


def _check_gif(data: Data, limits: ImageLimits) -> None:
    for number, _ in enumerate(gif_blocks(data)):
        if number > limits.max_chunks:
            _refuse_chunks("a GIF", "blocks before its first image", limits)


def gif_blocks(data: bytes | memoryview) -> Iterator[int]:
    """Yields the offset at which a GIF's palette ends, then the offset at which each data block (even an empty one) of
    the extensions before its first image ends. Raises IndexError if the data ends before the first image."""
    position = 13 + gif_palette_bytes(data[10])
    yield position
    while data[position] == 0x21:
        position += 2
        while length := data[position]:
            position += 1 + length
            yield position
        position += 1
        yield position


def gif_palette_bytes(flags: int) -> int:
    """Returns the number of bytes of the palette, from its flags."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _check_tiff(data: Data, limits: ImageLimits) -> None:
    """Refuses a TIFF whose first image has too many tags or values, since Pillow reads all of them."""
    order, is_big = "<" if data[:1] == b"I" else ">", data[2:4] in (b"+\0", b"\0+")
    place, count, entry = ("8xQ", "Q", "HHQ8x") if is_big else ("4xI", "H", "HHI4x")
    (begin,) = struct.unpack_from(order + place, data)
    (num_tags,) = struct.unpack_from(order + count, data, begin)
    if num_tags > limits.max_chunks:
        _refuse_chunks("a TIFF", "tags", limits)
    size, begin = struct.calcsize(order + entry), begin + struct.calcsize(order + count)
    for tag in range(min(num_tags, (len(data) - begin) // size)):
        name, kind, num_values = struct.unpack_from(order + entry, data, begin + tag * size)
        if num_values > limits.max_chunks and (kind not in _TIFF_TEXT or name in _TIFF_PARTS):
            _refuse_chunks("a TIFF", f"values in tag {name}, such as strips", limits)


def _refuse_memory(what: str, num_bytes: int, limits: ImageLimits) -> None:
    if num_bytes > limits.max_memory_bytes:
        _refuse(f"{what} takes {num_bytes} bytes of memory", limits, "max_memory_bytes")


def _refuse_chunks(what: str, chunks: str, limits: ImageLimits) -> NoReturn:
    _refuse(f"{what} of more than {limits.max_chunks} {chunks}", limits, "max_chunks")


def _refuse(what: str, limits: ImageLimits, name: str) -> NoReturn:
    most = getattr(limits, name)
    is_lifted = most < getattr(WIDEST_LIMITS, name)
    flag = f" (--limits.{name.replace('_', '-')} of pack and index)" if is_lifted else ""
    raise ImageRefusedError(f"costly to decode: {what}; allowed: {most}{flag}")
