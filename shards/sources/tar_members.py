"""Streams the members of an uncompressed tar. Nothing is unpacked, and unsafe members are refused.

The formats are POSIX.1-2017 "pax Interchange Format" and "ustar", the GNU tar manual's "Basic Tar Format", and the
older format of Unix V7. Python's tarfile reads the same formats, but creates an object of twenty fields for each
header, stops at the first damaged one, and does not say where an archive broke off.
"""

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shards.config_values import shown_value
from shards.errors import ImageRefusedError
from shards.sources.entry import printable, too_large
from shards.storage.ahead import Pieces

BLOCK_BYTES = 512
SPARSE = b"GNU.sparse."  # the keys of pax records about sparse files begin with it
_USED = (b"path", b"size")
_MOST_DIGITS = 19  # a 64-bit number has at most this many
_ADLER_BASE = 65521
_GNU_MAGIC = b"ustar  \0"  # this format has times in place of the prefix field
_NUMBERS = ((100, 108), (108, 116), (116, 124), (136, 148), (329, 337), (337, 345))  # mode, owner, group, time, device
_OTHER_NUMBERS = "a number in its header is not octal, at which other readers stop"
_PLAIN = re.compile(rb" *[0-7]* *(?:\0|$)")
_MORE_BLOCKS = 482  # if this byte of a sparse file's header is set, more header blocks follow
MAX_EXTENSION_BYTES = 1 << 20
MOST_EXTENSIONS = 16  # per member; Python's tarfile recurses for each
MOST_NAME_BYTES = 4096  # the limit of Linux; a pax record could give every member a name of a megabyte
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")
_EMPTY_BLOCK = bytes(BLOCK_BYTES)
# Type flags of a header.
_FILES = (b"0", b"\0", b"7")
_PASSED_OVER = (b"5", b"D", b"V")  # folders and volume labels
_EXTENSIONS = (b"L", b"K", b"x", b"X", b"g")
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")  # they have no data even if the header states a size
_KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a FIFO",
    b"S": "a sparse file",
    b"M": "the rest of a file that began in another volume",
}
# A name of a sample in webdataset/tariterators.py, and a name of metadata, which belongs to no sample.
_SAMPLE_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_METADATA = re.compile(r"__[^/]*__($|/)")
_MORE_SPARSE_BLOCKS = 504  # if this byte of a further header block is set, another one follows
_REFUSAL = "refusal"  # no pax record has this key: their keys are "path", "size" or contain a dot


@dataclass(slots=True)
class Header:
    """The archive's description of its next member. `kind` is the type flag; `size` is the number of data bytes in the
    archive."""

    name: str
    size: int
    kind: bytes
    more_header_blocks: bool = False
    refusal: str = ""  # why the member must not be read


def parse_header(block: bytes) -> Header | None:
    """Returns the header in a block, or None if the checksum is wrong or a number is invalid."""
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
        kind = b"5"  # the way V7 marks a folder
    refusal = _OTHER_NUMBERS if not all(map(_is_plain, (block[begin:end] for begin, end in _NUMBERS))) else ""
    if block[345] and block[257:265] != _GNU_MAGIC:
        if block[257:262] == b"ustar":
            name = _until_nul(block[345:500]) + b"/" + name
        else:
            refusal = "its header has no format that has a prefix of the name, but a prefix, which some readers use"
    more = kind == b"S" and block[_MORE_BLOCKS] != 0
    return Header(name=decoded(name), size=size, kind=kind, more_header_blocks=more, refusal=refusal)


def begins_again(block: bytes) -> Header | None:
    """Returns the header in a block if the block also has the magic of a header. After a damaged stretch, reading
    continues there."""
    return parse_header(block) if block[257:262] == b"ustar" else None


def parse_number(field: bytes) -> int:
    """Reads octal digits with spaces or NULs around them, or GNU's base-256. Raises ValueError for anything else."""
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
    """Returns the name in the data of a GNU "L" member."""
    return decoded(_until_nul(data))


def parse_pax(data: bytes) -> dict[str, str]:
    """Returns the records `LENGTH KEY=VALUE` of a pax header that matter for reading: path, size and GNU.sparse.*.
    Raises ValueError if the records are damaged."""
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
        if key in _USED or key.startswith(SPARSE):  # the others could fill the memory, record by record
            records[decoded(key)] = decoded(value)
        position = end
    return records


def decoded(name: bytes) -> str:
    """Decodes a name. Bytes that are not UTF-8 become surrogate escapes, as in Python's file names."""
    return name.decode("utf-8", "surrogateescape")


def _is_plain(field: bytes) -> bool:
    """Returns whether every reader parses a field as the same number, or as empty."""
    return _PLAIN.match(field) is not None or field[0] in (0x80, 0xFF)


def _until_nul(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _checksum_fits(block: bytes) -> bool:
    """Returns whether the header's checksum is right: the sum of all bytes, with spaces in place of the checksum's own
    8."""
    field = block[148:156]
    rest = 8 * ord(" ") - sum(field) - parse_number(field)
    # The low half of Adler-32 is one more than the sum, modulo 65521. It is 10 times faster than sum().
    if ((zlib.adler32(block) & 0xFFFF) - 1 + rest) % _ADLER_BASE == 0:
        return True
    # Some old systems summed signed bytes.
    return sum(block) - 256 * sum(byte > 127 for byte in block) + rest + 256 * sum(byte > 127 for byte in field) == 0


class DamagedTarError(ImageRefusedError):
    """A fault of the archive itself, not of one member. Most other readers take it for the end of the archive."""


class BrokenOffTarError(DamagedTarError):
    """The archive ends or is damaged inside a member or after an extended header. Other readers fail there."""


class AmbiguousMemberError(ImageRefusedError):
    """A member that tar readers interpret differently or fail at. After it, they may read different data."""


@dataclass(frozen=True, slots=True)
class Member:
    """A file of an archive. `offset` is the position of its first data byte in the object that is read.

    `data` is None if it was not requested, and an error if the member is refused. For a fault of the archive itself,
    `name` is empty.
    """

    name: str  # bytes that are not UTF-8 are surrogate escapes
    offset: int
    size: int
    data: bytes | ImageRefusedError | None


def _always(_: str) -> bool:
    return True


def read_members(
    pieces: Pieces, *, wanted: Callable[[str], bool], max_bytes: int, with_data: Callable[[str], bool] = _always
) -> Iterator[Member]:
    """Yields the regular files whose name is `wanted`, and everything that is refused, in the archive's order.

    The data of a file is read if `with_data(name)` is true and it has at most `max_bytes`. Links, devices and the like
    are refused, and so are names that lead out of the archive. A fault of the archive is yielded as a DamagedTarError:
    a damaged stretch, after which reading continues at the next header; the place where the archive breaks off; a
    missing end mark; data after the end mark.
    """
    for header in _Headers(pieces).read():
        if isinstance(header, DamagedTarError):
            yield Member("", pieces.position, 0, header)
            continue
        name, offset, size = header.name, pieces.position, header.size
        if header.kind in _PASSED_OVER:
            continue
        if refusal := _refusal(header):
            kind = AmbiguousMemberError if header.refusal or header.kind == b"S" else ImageRefusedError
            yield Member(name, offset, size, kind(refusal))
        elif wanted(name):
            if not with_data(name):
                yield Member(name, offset, size, None)
            elif size > max_bytes:
                yield Member(name, offset, size, too_large(size, max_bytes=max_bytes))
            else:
                yield Member(name, offset, size, pieces.take(size))


def split_name(name: str) -> tuple[str, str] | None:
    """Returns the key and the suffix in a member's name, by webdataset's rule: the path up to the first dot of the
    file's name, and what follows that dot. Returns None if the member belongs to no sample."""
    found = _SAMPLE_NAME.match(name)
    return (found.group(1), found.group(2)) if found and not _METADATA.match(name) else None


def is_hidden(name: str) -> bool:
    """Returns whether a path's last part begins with a dot, like the `._NAME` that macOS puts next to each file."""
    return name.rpartition("/")[2].startswith(".")


class _Headers:
    """Finds one header after another. The caller may read a member's data before it asks for the next header."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces, self._begin = pieces, pieces.position
        self._num_members = self._num_extensions = 0  # members so far; extended headers of the next member
        self._for_all: dict[str, str] = {}  # pax records of the whole archive
        self._for_next: dict[str, str] = {}  # pax records of the next member

    def read(self) -> Iterator[Header | DamagedTarError]:
        """Yields every member's header, and the faults between them."""
        pieces = self._pieces
        while block := pieces.take(BLOCK_BYTES):
            header = parse_header(block)
            if header is None:
                if block == _EMPTY_BLOCK:
                    if self._num_extensions:
                        yield self._fault("its end mark follows an extended header")
                    yield from self._after_end_mark()
                    return
                fault, header = self._next_header(block)
                yield fault
                if header is None:
                    return
                self._num_extensions = 0
            is_extension = header.kind in _EXTENSIONS
            if not is_extension:
                self._complete(header)
            data_end = pieces.position + header.size
            if data_end > pieces.end:
                where = f"inside {printable(header.name)!r}"
                yield BrokenOffTarError(self._said(f"it ends at byte {pieces.end}, {where}"))
                return
            if is_extension:
                self._extend(header)
            else:
                yield header
                self._num_members += 1
                self._num_extensions = 0
            member_end = data_end + (-header.size) % BLOCK_BYTES
            if member_end > pieces.end:
                yield BrokenOffTarError(self._said(f"it ends at byte {pieces.end}, in the padding of a member"))
                return
            pieces.skip(member_end - pieces.position)
        yield self._no_end_mark()

    def _complete(self, header: Header) -> None:
        """Completes a header with the values of the extended headers before it."""
        if header.kind in _WITHOUT_DATA:
            header.size = 0
        while header.more_header_blocks:
            block = self._pieces.take(BLOCK_BYTES)
            header.more_header_blocks = len(block) == BLOCK_BYTES and block[_MORE_SPARSE_BLOCKS] != 0
        if not self._for_next and not self._for_all:
            return
        records = {**self._for_all, **self._for_next}
        self._for_next = {}
        header.name = records.get("path") or header.name
        if header.kind in _FILES:
            header.size = int(records.get("size") or header.size)
        if any(key.startswith("GNU.sparse.") for key in records):
            header.kind = b"S"
        header.refusal = records.get(_REFUSAL, header.refusal)
        if len(header.name) > MOST_NAME_BYTES:
            header.refusal = f"its name has {len(header.name)} characters, allowed: {MOST_NAME_BYTES}"
            header.name = header.name[:100]

    def _extend(self, header: Header) -> None:
        """Keeps what an extended header says about the next member or all members. If two extended headers of one
        member set the same field, the first wins."""
        self._num_extensions += 1
        if self._num_extensions > MOST_EXTENSIONS:
            self._for_next[_REFUSAL] = f"it has more than {MOST_EXTENSIONS} extended headers"
        if header.size > MAX_EXTENSION_BYTES:
            self._for_next[_REFUSAL] = f"its extended header has {header.size} bytes, allowed: {MAX_EXTENSION_BYTES}"
            return
        if header.refusal:
            self._for_next[_REFUSAL] = header.refusal
        data = self._pieces.take(header.size)
        if header.kind == b"L":
            self._for_next.setdefault("path", parse_long_name(data))
        elif header.kind != b"K":
            try:
                records = parse_pax(data)
                if header.kind == b"g":
                    self._for_all |= records
                    if records.keys() - {"path"}:
                        self._for_all[_REFUSAL] = "a pax header gives one size to all members"
                else:
                    self._for_next = records | self._for_next
            except ValueError as error:
                self._for_next[_REFUSAL] = f"its pax header is damaged: {error}"

    def _next_header(self, block: bytes) -> tuple[DamagedTarError, Header | None]:
        """Returns the fault of a block that is not a header, and the next header after it, or None if there is none."""
        pieces = self._pieces
        begin = pieces.position - len(block)
        self._for_next = {}
        if begin == self._begin and block.startswith(_COMPRESSED):
            return DamagedTarError("it is compressed; images cannot be read by offset: decompress it first"), None
        if len(block) < BLOCK_BYTES:
            return self._no_end_mark(), None
        header = None
        while len(block) == BLOCK_BYTES and (header := begins_again(block)) is None:
            block = pieces.take(BLOCK_BYTES)
        end = pieces.position - BLOCK_BYTES if header else pieces.position
        return self._fault(f"no header is in bytes {begin} to {end}"), header

    def _after_end_mark(self) -> Iterator[DamagedTarError]:
        """Yields a fault if anything but zeros follows the end mark. Zeros fill the last record; other data would be
        lost silently."""
        pieces = self._pieces
        while block := pieces.take(BLOCK_BYTES):
            if block.strip(b"\0"):
                begin = pieces.position - len(block)
                yield self._fault(f"bytes {begin} to {pieces.end} are after its end mark and are not read")
                return

    def _no_end_mark(self) -> DamagedTarError:
        return self._fault(f"it ends at byte {self._pieces.end} without an end mark")

    def _fault(self, what: str) -> DamagedTarError:
        return (BrokenOffTarError if self._num_extensions else DamagedTarError)(self._said(what))

    def _said(self, what: str) -> str:
        return f"damaged tar: {what}, after {self._num_members} members"


def _refusal(header: Header) -> str:
    """Returns why a member must not be read, or "" if it may be."""
    name = header.name
    if header.refusal:
        return header.refusal
    if header.kind not in _FILES:
        return f"{_KINDS.get(header.kind) or f'of the unknown type {header.kind!r}'}, not a file"
    if not name:
        return "it has no name"
    if name[0] == "/":
        return "an absolute path"
    if ".." in name and ".." in name.split("/"):
        return "a path with a '..' part"
    return ""
