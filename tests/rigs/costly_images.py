"""Sound images that are small as files and costly to decode: many scans, many chunks, large and nearly empty."""

import io
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, product
from typing import Literal

from PIL import Image

_COEFFICIENTS = range(1, 64)
_MOST_BITS = 13  # the most that a scan may leave to later ones
_LONGEST_RUN = 14  # of blocks without coefficients: 2**14 to 2**15 - 1 of them (ITU-T T.81, table G.1)


def progressive_jpeg(
    height: int, width: int, *, num_scans: int, num_components: Literal[1, 3] = 1, band: int = 1
) -> bytes:
    """A black progressive JPEG, 4:4:4 if it has three components: one scan of the first coefficients, then legal scans
    of `band` coefficients each and one bit, all zero. There are at most 882 of these per component."""
    num_blocks = -(-height // 8) * -(-width // 8)
    scans = list(_refinements(num_scans - 1, num_components, band))
    if len(scans) < num_scans - 1:
        raise ValueError(f"{num_scans} scans; there are at most {len(scans) + 1}")
    frame = struct.pack(">BHHB", 8, height, width, num_components)
    frame += b"".join(bytes((number + 1, 0x11, 0)) for number in range(num_components))
    return b"".join(
        (
            b"\xff\xd8",
            _segment(0xDB, b"\0" + b"\1" * 64),
            _segment(0xC2, frame),
            _segment(0xC4, b"\0" + bytes((1, *[0] * 15)) + b"\0"),  # one symbol of one bit: no difference
            # Each run of blocks without coefficients is a symbol of four bits.
            _segment(0xC4, b"\x10" + bytes((0, 0, 0, 15, *[0] * 12)) + bytes(range(0, 0xF0, 0x10))),
            _scan(range(1, num_components + 1), (0, 0, 0), _zeros(num_blocks * num_components)),
            *(_scan([component], spectral, _empty_blocks(num_blocks)) for component, spectral in scans),
            b"\xff\xd9",
        )
    )


def sequential_jpeg(height: int, width: int, scans: Sequence[Sequence[int]]) -> bytes:
    """A black baseline JPEG, 4:4:4, whose scans hold these components, of 1 to 3."""
    num_blocks = -(-height // 8) * -(-width // 8)
    frame = struct.pack(">BHHB", 8, height, width, 3) + b"".join(bytes((number, 0x11, 0)) for number in (1, 2, 3))
    tables = [_segment(0xC4, bytes((kind, 1, *[0] * 15, 0))) for kind in (0, 0x10)]  # no difference; end of block
    coded = [_scan(scan, (0, 63, 0), _zeros(2 * num_blocks * len(scan))) for scan in scans]
    head = (b"\xff\xd8", _segment(0xDB, b"\0" + b"\1" * 64), _segment(0xC0, frame))
    return b"".join((*head, *tables, *coded, b"\xff\xd9"))


def _refinements(num_scans: int, num_components: int, band: int) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """(component, (first coefficient, last coefficient, bits)) of so many scans; `bits` are the two nibbles."""
    firsts = _COEFFICIENTS[::band]
    steps = chain([_MOST_BITS], (high << 4 | high - 1 for high in range(_MOST_BITS, 0, -1)))
    every = product(steps, firsts, range(1, num_components + 1))
    for _, (bits, first, component) in zip(range(num_scans), every, strict=False):
        yield component, (first, min(first + band, 64) - 1, bits)


def _scan(components: Iterable[int], spectral: tuple[int, int, int], data: bytes) -> bytes:
    named = b"".join(bytes((component, 0)) for component in components)
    return _segment(0xDA, bytes((len(named) // 2,)) + named + bytes(spectral)) + data


def _zeros(num_bits: int) -> bytes:
    return b"\0" * (num_bits // 8) + (bytes((0xFF >> num_bits % 8,)) if num_bits % 8 else b"")


def _empty_blocks(num_blocks: int) -> bytes:
    """The fewest runs that cover these blocks."""
    bits = ""
    while num_blocks:
        length = min(num_blocks.bit_length() - 1, _LONGEST_RUN)
        run = min(num_blocks, (2 << length) - 1)
        bits += f"{length:04b}" + (f"{run - (1 << length):0{length}b}" if length else "")
        num_blocks -= run
    bits += "1" * (-len(bits) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")


def _segment(marker: int, contents: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(contents) + 2) + contents


def png_of_chunks(name: bytes, contents: bytes, *, num_chunks: int, interlaced: bool = False) -> bytes:
    """A black PNG of 8 x 8 pixels with so many chunks of one kind before its pixels."""
    header = struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, int(interlaced))
    rows = b"\0" * (8 * 9 if not interlaced else 64 + 15)  # with a filter for each row, and for 15 rows of 7 passes
    pixels = _chunk(b"IDAT", zlib.compress(rows))
    extra = _chunk(name, contents) * num_chunks
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + extra + pixels + _chunk(b"IEND", b"")


def _chunk(name: bytes, contents: bytes) -> bytes:
    return struct.pack(">I4s", len(contents), name) + contents + struct.pack(">I", zlib.crc32(name + contents))


def webp_animation(height: int, width: int, *, num_frames: int) -> bytes:
    """A black animation of frames of 1 x 1 pixel on a canvas of this size."""
    file = io.BytesIO()
    Image.new("RGB", (1, 1)).save(file, "WEBP", lossless=True)
    frame = _riff(b"ANMF", bytes(12) + (10).to_bytes(3, "little") + b"\0" + file.getvalue()[12:])
    canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    header = _riff(b"VP8X", bytes((2, 0, 0, 0)) + canvas) + _riff(b"ANIM", bytes(6))
    return _riff(b"RIFF", b"WEBP" + header + frame * num_frames)


def _riff(name: bytes, contents: bytes) -> bytes:
    return name + struct.pack("<I", len(contents)) + contents + b"\0" * (len(contents) % 2)


def gif_of_extensions(num_extensions: int) -> bytes:
    """A black GIF of 8 x 8 pixels with so many comments before its image."""
    file = io.BytesIO()
    Image.new("P", (8, 8)).save(file, "GIF")
    data = file.getvalue()
    begin = 13 + (3 << (data[10] & 7) + 1)
    return data[:begin] + b"\x21\xfe\x01a\x00" * num_extensions + data[begin:]


def tiff_of_strips(num_strips: int) -> bytes:
    """A grey TIFF of one column whose strips, of one row each, are the same byte of the file."""
    place = 12
    lists = struct.pack("<I", 8) * num_strips + struct.pack("<I", 1) * num_strips
    tags = [(256, 3, 1, 1), (257, 4, 1, num_strips), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    tags += [(273, 4, num_strips, place), (277, 3, 1, 1), (278, 4, 1, 1)]
    tags += [(279, 4, num_strips, place + 4 * num_strips)]
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    header = b"II*\0" + struct.pack("<I", place + len(lists)) + bytes(4)
    return header + lists + struct.pack("<H", len(tags)) + entries + bytes(4)
