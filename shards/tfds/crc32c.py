"""CRC-32C, the checksum of a TFRecord: RFC 3720, appendix B.4, with the reflected polynomial 0x82F63B78.

Each byte adds a term that depends only on its value and on its distance from the end. So the terms of many bytes are
looked up together, which checks 100 MB per second and more; a loop over the bytes would check five.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_POLYNOMIAL, _ALL_ONES, _MASK_DELTA = 0x82F63B78, 0xFFFFFFFF, 0xA282EAD8
_BLOCK_BYTES = 1024
_BLOCKS_AT_ONCE = 64  # an index takes eight times the memory of its byte
_FEW_BYTES = 64  # a loop is faster


def masked_crc32c(data: bytes) -> int:
    """The checksum as a TFRecord stores it (`crc32c.h` of TensorFlow): rotated by 15 bits, plus a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & _ALL_ONES


def crc32c(data: bytes) -> int:
    """The checksum of any bytes."""
    state = _ALL_ONES
    if len(data) < _FEW_BYTES:
        table = _byte_table()
        for byte in data:
            state = table[(state ^ byte) & 0xFF] ^ state >> 8
        return state ^ _ALL_ONES
    group_bytes = _BLOCKS_AT_ONCE * _BLOCK_BYTES
    for begin in range(0, len(data), group_bytes):
        state = _after_group(state, data[begin : begin + group_bytes])
    return state ^ _ALL_ONES


def _after_group(state: int, group: bytes) -> int:
    """The state after up to _BLOCKS_AT_ONCE blocks, of which the last may be short."""
    import numpy as np

    terms, first = _terms()
    row = np.arange(_BLOCK_BYTES) * 256
    values, num_blocks = np.frombuffer(group, np.uint8), len(group) // _BLOCK_BYTES
    # [num_blocks, _BLOCK_BYTES] -> [num_blocks]
    blocks = values[: num_blocks * _BLOCK_BYTES].reshape(num_blocks, _BLOCK_BYTES)
    for term in np.bitwise_xor.reduce(terms.take(row + blocks), axis=1).tolist():
        # The state counts as if its four bytes were added to the first four of the block.
        for number in range(4):
            term ^= first[number][state >> 8 * number & 0xFF]  # noqa: PLW2901
        state = term
    rest = values[num_blocks * _BLOCK_BYTES :].copy()
    if not len(rest):
        return state
    head = min(4, len(rest))
    rest[:head] ^= np.frombuffer(state.to_bytes(4, "little"), np.uint8)[:head]
    return int(np.bitwise_xor.reduce(terms.take(row[-len(rest) :] + rest))) ^ state >> 8 * head


@lru_cache(maxsize=1)
def _terms() -> "tuple[NDArray[np.uint32], list[list[int]]]":
    """uint32[_BLOCK_BYTES * 256]: what each byte, in each place of a block, adds to the state after the block. Also the
    rows of the first four places."""
    import numpy as np

    table = np.array(_byte_table(), np.uint32)
    terms = np.empty((_BLOCK_BYTES, 256), np.uint32)
    terms[-1] = table
    for place in range(_BLOCK_BYTES - 2, -1, -1):  # one more byte follows
        terms[place] = table[terms[place + 1] & 0xFF] ^ terms[place + 1] >> 8
    return terms.reshape(-1), terms[:4].tolist()


@lru_cache(maxsize=1)
def _byte_table() -> tuple[int, ...]:
    """What each byte makes of a state of zeros."""
    states = []
    for byte in range(256):
        state = byte
        for _ in range(8):
            state = state >> 1 ^ (_POLYNOMIAL if state & 1 else 0)
        states.append(state)
    return tuple(states)
