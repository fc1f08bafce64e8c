"""Baseline JPEGs that no encoder would make: any Huffman tables, any samplings, any coefficients."""

import random
import struct
from dataclasses import dataclass

Sampling = list[tuple[int, int]]  # of each component, across and down
SAMPLINGS: tuple[Sampling, ...] = (
    *([(1, 1)], [(2, 2)], [(1, 1)] * 3, [(2, 2), (1, 1), (1, 1)], [(2, 1), (1, 1), (1, 1)], [(1, 2), (1, 1), (1, 1)]),
    *([(4, 1), (1, 1), (1, 1)], [(1, 4), (1, 1), (1, 1)], [(2, 2), (2, 1), (1, 2)], [(2, 2), (2, 2), (1, 1)]),
    *([(4, 2), (1, 1), (1, 1)], [(1, 1), (2, 2), (1, 1)], [(3, 1), (1, 1), (1, 1)]),
)
ZERO_RUN = 0xF0


@dataclass(frozen=True, kw_only=True)
class CodedJpeg:
    """`scan`: where the coded data begins."""

    data: bytes
    height: int
    width: int
    scan: int


def coded_jpeg(
    rng: random.Random, *, most_height: int = 70, most_width: int = 90, sampling: Sampling | None = None
) -> CodedJpeg:
    """A whole JPEG of random blocks. Its tables, four of each kind, have one symbol, 16-bit codes alone, or any.
    `sampling`: one of SAMPLINGS at random, or this one."""
    height, width = rng.randint(1, most_height), rng.randint(1, most_width)
    sampling = sampling or rng.choice(SAMPLINGS)
    is_grey = len(sampling) == 1
    blocks = [1] if is_grey else [across * down for across, down in sampling]
    across, down = (1, 1) if is_grey else (max(pair[0] for pair in sampling), max(pair[1] for pair in sampling))
    num_mcus = -(-width // (8 * across)) * -(-height // (8 * down))
    tables = [(_table(rng, rng.sample(range(16), rng.choice([1, 2, 12, 16]))), _ac_table(rng)) for _ in range(4)]
    chosen = [(rng.randrange(4), rng.randrange(4)) for _ in sampling]
    interval = rng.choice([0, 0, 0, 1, 2, 5, 65535])
    header = bytearray(b"\xff\xd8\xff\xdb\x00\x43\x00")
    header += bytes(rng.choice([1, 3, 16, 255]) for _ in range(64))
    header += b"\xff\xc1" + struct.pack(">HBHHB", 8 + 3 * len(sampling), 8, height, width, len(sampling))
    for number, (horizontal, vertical) in enumerate(sampling):
        header += bytes([number + 1, horizontal << 4 | vertical, 0])
    for number, pair in enumerate(tables):
        for kind, codes in enumerate(pair):
            counts = [sum(length == bits for _, length in codes.values()) for bits in range(1, 17)]
            header += (
                b"\xff\xc4" + struct.pack(">HB", 19 + len(codes), kind << 4 | number) + bytes(counts) + bytes(codes)
            )
    if interval:
        header += b"\xff\xdd\x00\x04" + struct.pack(">H", interval)
    header += b"\xff\xda" + struct.pack(">HB", 6 + 2 * len(sampling), len(sampling))
    header += b"".join(bytes([number + 1, dc << 4 | ac]) for number, (dc, ac) in enumerate(chosen)) + b"\x00\x3f\x00"
    end_share, scan, bits = rng.choice([0.0, 0.02, 0.1, 0.3, 0.9]), bytearray(), list[str]()
    for mcu in range(num_mcus):
        if interval and mcu and mcu % interval == 0:
            scan += _stuffed(bits) + bytes([0xFF, 0xD0 + (mcu // interval - 1) % 8])
            bits = []
        for (dc, ac), count in zip(chosen, blocks, strict=True):
            for _ in range(count):
                bits += _block(rng, tables[dc][0], tables[ac][1], end_share)
    data = bytes(header + scan + _stuffed(bits)) + b"\xff\xd9"
    return CodedJpeg(data=data, height=height, width=width, scan=len(header))


def lossless_jpeg(height: int, width: int) -> bytes:
    """A lossless JPEG (SOF3) of noise in three components, each predicted from the pixel to the left."""
    rng = random.Random(0)
    header = b"\xff\xd8\xff\xc3" + struct.pack(">HBHHB", 17, 8, height, width, 3)
    header += b"".join(bytes([number, 0x11, 0]) for number in (1, 2, 3))
    header += b"\xff\xc4" + struct.pack(">HB", 19 + 9, 0) + bytes([0, 0, 0, 9, *[0] * 12]) + bytes(range(9))
    header += b"\xff\xda" + struct.pack(">HB", 12, 3) + bytes([1, 0, 2, 0, 3, 0]) + b"\x01\x00\x00"
    sizes = [rng.randrange(9) for _ in range(3 * height * width)]
    bits = [format(size, "04b") + _any_bits(rng, size) for size in sizes]
    return header + _stuffed(bits) + b"\xff\xd9"


def _ac_table(rng: random.Random) -> dict[int, tuple[int, int]]:
    symbols = rng.sample(range(256), rng.choice([1, 2, 5, 40, 162, 255]))
    if rng.random() < 0.5:
        symbols = [symbol for symbol in symbols if symbol & 15 < 8] or [0]
    if 0 not in symbols and rng.random() < 0.8:
        symbols[0] = 0
    return _table(rng, symbols)


def _table(rng: random.Random, symbols: list[int]) -> dict[int, tuple[int, int]]:
    """Symbol -> its code and the code's length, in the order of the codes; no code is all ones."""
    lengths = {
        "longest": [16] * len(symbols),
        "steep": [min(16, 1 + place) for place in range(len(symbols))],
        "any": sorted(rng.randint(1, 16) for _ in symbols),
    }[rng.choice(["longest", "steep", "any", "any"])]
    while sum(2.0**-length for length in lengths) > 1 - 2.0**-16:
        longer = rng.randrange(len(lengths))
        lengths[longer] = min(16, lengths[longer] + 1)
        lengths.sort()
    codes, code, before = {}, 0, lengths[0]
    for symbol, length in zip(symbols, lengths, strict=True):
        code <<= length - before
        codes[symbol], before = (code, length), length
        code += 1
    return codes


def _block(
    rng: random.Random, dc: dict[int, tuple[int, int]], ac: dict[int, tuple[int, int]], end_share: float
) -> list[str]:
    """The bits of a block that ends in its 64th place or before; beyond it, if the table has no other code."""
    size = rng.choice(list(dc))
    bits, place = [_coded(dc[size]), _any_bits(rng, size)], 1
    ends = [symbol for symbol in ac if symbol & 15 == 0 and symbol != ZERO_RUN]
    while place < 64:
        fitting = [symbol for symbol in ac if symbol not in ends and place + (symbol >> 4) < 64]
        symbol = rng.choice(ends if ends and (not fitting or rng.random() < end_share) else fitting or list(ac))
        bits += [_coded(ac[symbol]), _any_bits(rng, symbol & 15)]
        place += 64 if symbol in ends else (symbol >> 4) + 1
    return bits


def _coded(code: tuple[int, int]) -> str:
    return format(code[0], f"0{code[1]}b")


def _any_bits(rng: random.Random, count: int) -> str:
    return format(rng.getrandbits(count), f"0{count}b") if count else ""


def _stuffed(bits: list[str]) -> bytes:
    joined = "".join(bits)
    joined += "1" * (-len(joined) % 8)
    return int("1" + joined, 2).to_bytes(len(joined) // 8 + 1, "big")[1:].replace(b"\xff", b"\xff\x00")
