"""One 512-byte header of a tar, and the records that extend the next one.

POSIX.1-2017 "pax Interchange Format" and "ustar", the GNU tar manual's "Basic Tar Format", and Unix V7 before both.
"""

import re
import zlib
from dataclasses import dataclass

from shards.config_values import shown_value

BLOCK_BYTES = 512
SPARSE = b"GNU.sparse."  # begins the keys of pax records about a sparse file
_USED = (b"path", b"size")
_MOST_DIGITS = 19  # of a number of 64 bits
_ADLER_BASE = 65521
_GNU_MAGIC = b"ustar  \0"  # has no prefix field: times are in its place
_NUMBERS = ((100, 108), (108, 116), (116, 124), (136, 148), (329, 337), (337, 345))  # mode, owner, group, time, device
_OTHER_NUMBERS = "a number in its header is not octal, at which other readers stop"
_PLAIN = re.compile(rb" *[0-7]* *(?:\0|$)")
_MORE_BLOCKS = 482  # byte of a GNU sparse file's header: more blocks follow before its data


@dataclass(slots=True)
class Header:
    """What the archive says about its next member. `kind` is the type flag, `size` that of the data in the archive."""

    name: str
    size: int
    kind: bytes
    more_header_blocks: bool = False
    refusal: str = ""  # why it must not be read


def parse_header(block: bytes) -> Header | None:
    """The header in a block; None if it is not one: its checksum is wrong, or a number is invalid."""
    if len(block) != BLOCK_BYTES:
        return None
    try:
        if not _checksum_fits(block):
            return None
        size = parse_number(block[124:136])
    except ValueError:
        return None
    kind = block[156:157]
    name = _until_nul(block[:100])
    if kind == b"\0" and name.endswith(b"/"):
        kind = b"5"  # V7's way to mark a folder
    refusal = _OTHER_NUMBERS if not all(map(_is_plain, (block[begin:end] for begin, end in _NUMBERS))) else ""
    if block[345] and block[257:265] != _GNU_MAGIC:
        if block[257:262] == b"ustar":
            name = _until_nul(block[345:500]) + b"/" + name
        else:
            refusal = "its header has no format that has a prefix of the name, but a prefix, which some readers use"
    more = kind == b"S" and block[_MORE_BLOCKS] != 0
    return Header(name=decoded(name), size=size, kind=kind, more_header_blocks=more, refusal=refusal)


def begins_again(block: bytes) -> Header | None:
    """A header that its magic also tells from other data: reading continues there after a damaged stretch."""
    return parse_header(block) if block[257:262] == b"ustar" else None


def parse_number(field: bytes) -> int:
    """Octal digits with spaces or NULs around, or GNU's base-256. Raises ValueError."""
    if field[0] & 0x80:
        if field[0] == 0xFF:
            raise ValueError("a negative number")
        return int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
    digits = _until_nul(field).strip()
    if digits.isdigit():
        return int(digits, 8)
    if digits:
        raise ValueError(f"{digits!r} is not octal")
    return 0


def parse_long_name(data: bytes) -> str:
    """The name in the data of a GNU "L" member."""
    return decoded(_until_nul(data))


def parse_pax(data: bytes) -> dict[str, str]:
    """Reads from the records `LENGTH KEY=VALUE` of a pax header those that say where or what its file is: path, size
    and GNU.sparse.*. Raises ValueError if they are damaged."""
    records = {}
    position = 0
    while position < len(data) and data[position]:
        digits = data[position : data.index(b" ", position)]
        if not digits.isdigit() or len(digits) > _MOST_DIGITS:
            raise ValueError(f"the length of the record at byte {position} is not a number")
        end = position + int(digits)
        key, equals, value = data[position + len(digits) + 1 : end - 1].partition(b"=")
        if not equals or data[end - 1 : end] != b"\n":
            raise ValueError(f"the record at byte {position} has no end or no value")
        if key == b"size" and not (value.isdigit() and len(value) <= _MOST_DIGITS):
            raise ValueError(f"the size {shown_value(value)} is not a number of bytes")
        if key in _USED or key.startswith(SPARSE):  # others could fill the memory, record by record
            records[decoded(key)] = decoded(value)
        position = end
    return records


def decoded(name: bytes) -> str:
    """Bytes that are not UTF-8 become surrogate escapes, as Python does with file names."""
    return name.decode("utf-8", "surrogateescape")


def _is_plain(field: bytes) -> bool:
    """Whether every reader takes a field for a number, or for none."""
    return _PLAIN.match(field) is not None or field[0] in (0x80, 0xFF)


def _until_nul(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _checksum_fits(block: bytes) -> bool:
    """Whether the sum of all bytes, the checksum's own 8 read as spaces, is what the header says."""
    field = block[148:156]
    rest = 8 * ord(" ") - sum(field) - parse_number(field)
    # Adler-32's low half is one more than the sum, modulo 65521: 10 times faster than sum().
    if ((zlib.adler32(block) & 0xFFFF) - 1 + rest) % _ADLER_BASE == 0:
        return True
    # Some old systems summed signed bytes.
    return sum(block) - 256 * sum(byte > 127 for byte in block) + rest + 256 * sum(byte > 127 for byte in field) == 0
