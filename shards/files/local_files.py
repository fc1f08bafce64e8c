"""Reads and writes local files, even if a killed process or another program has damaged them.

Only regular files are read, up to a limit. Files with one JSON object per line are appended to, and are read line by
line or from their end, since the metrics of 300,000 steps take 200 MB. Other small files are written completely or not
at all.
"""

import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, BinaryIO

from shards.errors import InvalidDataError, disk_fault
from shards.files.looks import Look, look_once, patiently
from shards.files.typed_json import MOST_DEPTH
from shards.storage.local import open_regular, read_whole
from shards.storage.objects import too_large

log = logging.getLogger(__name__)
MOST_FILE_BYTES = 1 << 30
MOST_LINE_BYTES = 1 << 20
_MOST_KEPT = 10_000  # writes of 1 or 2 kB each
Line = dict[str, Any]


def at_home(path: str) -> str:
    """Returns the path with a leading `~` or `~user` replaced by the home folder, as in a shell."""
    return os.path.expanduser(path) if path.startswith("~") else path  # noqa: PTH111 - Path raises for unknown users


def read_local_file(path: str | Path, *, most_bytes: int) -> bytes:
    """Reads a file, following links.

    Raises OSError if it is missing, a folder or unreadable, and InvalidDataError if it is a pipe, a socket or a device,
    or has more than `most_bytes`.
    """
    name = os.fspath(path)
    try:
        descriptor = open_regular(name, os.O_RDONLY | os.O_CLOEXEC)
    except ValueError:
        raise InvalidDataError(f"cannot read {name!r}: its name has a null byte") from None
    try:
        return read_whole(descriptor, name=name, most_bytes=most_bytes)
    finally:
        os.close(descriptor)


def read_local_text(path: str | Path, *, most_bytes: int) -> str:
    """Reads a UTF-8 file as text, without a byte order mark. Raises the same errors as `read_local_file`, and
    InvalidDataError if the file is not UTF-8."""
    data = read_local_file(path, most_bytes=most_bytes)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = f"{path} is not UTF-8: byte {error.start:,} (line {line:,}) is 0x{data[error.start]:02x}"
        raise InvalidDataError(f"{what}; save it as UTF-8") from None


def open_local_file(path: str | Path) -> BufferedReader:
    """Opens a file to read parts of it. Raises OSError if it is missing, a folder or unreadable, and InvalidDataError
    if it is not a regular file."""
    name = os.fspath(path)
    try:
        return open(name, "rb", opener=open_regular)
    except ValueError:
        raise InvalidDataError(f"cannot read {name!r}: its name has a null byte") from None


@dataclass(frozen=True, kw_only=True)
class Lines:
    """The objects in the usable lines of a file, in order, and the number of unusable lines.

    `has_half_line`: whether the last line is unusable and has no line break, as if it were still being written.
    """

    objects: list[Line]
    num_unusable: int
    has_half_line: bool = False


def read_lines(path: Path, *, is_usable: Callable[[Line], bool], containing: bytes = b"") -> Lines:
    """Reads the lines that are usable objects and contain `containing`. There are none if the file is missing. The file
    may have any size, because only these lines are kept.

    Raises InvalidDataError if the file is not regular, or if these lines have more than MOST_FILE_BYTES.
    """
    return patiently(path, lambda: _read_lines(path, is_usable, containing))


def _read_lines(path: Path, is_usable: Callable[[Line], bool], containing: bytes) -> Lines:
    objects, num_bytes, num_unusable, has_half_line = list[Line](), 0, 0, False
    for _, text, found in each_line(path, containing=containing):
        num_bytes += len(text)
        if num_bytes > MOST_FILE_BYTES:
            raise InvalidDataError(f"{too_large(str(path), MOST_FILE_BYTES)}; move it away")
        has_half_line = False
        if found is not None and is_usable(found):
            objects.append(found)
        else:
            num_unusable, has_half_line = num_unusable + 1, not text.endswith(b"\n")
    return Lines(objects=objects, num_unusable=num_unusable, has_half_line=has_half_line)


def each_line(path: Path, *, containing: bytes = b"") -> Iterator[tuple[int, bytes, Line | None]]:
    """Yields the offset and the bytes of each line that is not empty and contains `containing`, and the object in it:
    None if it has none, or more than MOST_LINE_BYTES. Yields nothing if the file is missing. Only one line is in
    memory, since a run's metrics may have millions.

    Raises InvalidDataError if the file is not regular.
    """
    from pydantic_core import from_json  # noqa: PLC0415 - short commands read only the ends of files

    try:
        file = open_local_file(path)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        raise InvalidDataError(f"{path} is a folder; move it away, a run writes a file of this name") from None
    except InvalidDataError as error:
        raise InvalidDataError(f"{error}; move it away") from error
    with file:
        offset = 0
        while text := file.readline(MOST_LINE_BYTES):
            begin, offset, rest = offset, offset + len(text), text
            while len(rest) == MOST_LINE_BYTES and not rest.endswith(b"\n"):
                rest = file.readline(MOST_LINE_BYTES)
                offset += len(rest)
            if text != b"\n" and containing in text:
                yield begin, text, object_by(from_json, text) if offset == begin + len(text) else None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds this path to OSErrors inside the block that name no file, such as those of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a file to write, PATH.part. It replaces `path` if the block ends without an error; otherwise
    it is removed, and `path` is unchanged. Nothing is synced to the disk."""
    waiting = path.with_name(f"{path.name}.part")
    try:
        yield waiting
        waiting.replace(path)
    except BaseException:
        with suppress(OSError):
            waiting.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file with exactly these bytes. If that fails, an earlier file is unchanged."""
    with naming(path), replacing(path) as waiting:
        waiting.write_bytes(data)


def append_line(path: Path, line: Mapping[str, object]) -> None:
    """Appends an object as a separate line, even if a killed process has left half a line."""
    with naming(path), open_to_append(path) as file:
        append_to(file, line)


def open_to_change(path: Path) -> FileIO:
    """Opens an existing regular file to read and write it, without a buffer. Waits as `patiently` does. Raises OSError
    if the file is missing, and InvalidDataError if it is not regular."""
    return patiently(path, lambda: FileIO(path, "r+", opener=open_regular))


def open_to_append(path: Path) -> BinaryIO:
    """Opens a file for `append_to`. If a killed process or a full disk has left half a line, adds a line break."""
    file = path.open("a+b", buffering=0)
    try:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        if file.read(1) not in (b"", b"\n"):
            file.write(b"\n")
    except BaseException:
        file.close()
        raise
    return file


def append_to(file: BinaryIO, line: Mapping[str, object]) -> None:
    """Appends an object to a file from `open_to_append`. After an OSError the file may end with half a line, so it must
    be opened again."""
    write_all(file, json.dumps(line).encode() + b"\n")


def write_all(file: BinaryIO, data: bytes) -> None:
    """Writes to an unbuffered file, of which a nearly full disk takes only the beginning at first."""
    while data:
        data = data[file.write(data) :]


def append_or_say(path: Path, line: Mapping[str, object], *, what: str) -> None:
    """Appends an object. If the file cannot be written, logs a warning that the file lacks `what`. Raises OSError if
    the folder is gone."""
    try:
        append_line(path, line)
    except OSError as error:
        if look_once(path.parent) is Look.MISSING:
            raise
        log.warning("%s cannot be written: %s; it lacks this: %s", path, error.strerror, what)


class KeptWrites:
    """Repeats writes to one file that a full, read-only or failing disk refuses, so that the caller can continue in the
    meantime.

    Refused writes are kept in order, and repeated before the next one. If more than `_MOST_KEPT` are kept, the disk's
    error is raised. `path`: the file, for messages.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = deque[Callable[[], object]]()
        self._fault: OSError | None = None

    def do(self, write: Callable[[], object]) -> None:
        """Writes now or later. It must be possible to call `write` again after an OSError."""
        self._kept.append(write)
        try:
            while self._kept:
                self._kept[0]()
                self._kept.popleft()
        except OSError as error:
            fault = disk_fault(error)
            if fault is None or len(self._kept) > _MOST_KEPT:
                raise
            if self._fault is None:
                log.warning("%s cannot be written: %s; its lines are kept until it can", self._path, fault.strerror)
            self._fault = fault
            return
        if self._fault:
            log.warning("%s can be written again; nothing is missing", self._path)
        self._fault = None

    def settle(self) -> None:
        """Tries the kept writes again, and raises the disk's error if one is still refused."""
        if self._kept:
            self.do(lambda: None)
        if self._fault:
            raise self._fault


def is_number(value: object) -> bool:
    """Returns whether a value in a line is a number, including NaN."""
    return type(value) is int or type(value) is float


def is_finite(value: object) -> bool:
    """Returns whether a value in a line is a finite number that fits in a float."""
    return is_number(value) and abs(value) < 1e300 and math.isfinite(value)  # type: ignore[arg-type]


def is_step(value: object) -> bool:
    """Returns whether a value in a line is a number of steps."""
    return type(value) is int and 0 <= value < 1 << 62


def object_in(text: bytes) -> Line | None:
    """Returns the object in a line; None if there is none, or if the line is too long or nested too deeply.

    NaN and Infinity are accepted as this program writes them, since a loss may be either.
    """
    if len(text) > MOST_LINE_BYTES or text.count(b"[") + text.count(b"{") > MOST_DEPTH:
        return None
    try:
        found = json.loads(text)
    except ValueError:  # broken, not UTF-8, or an integer of thousands of digits
        return None
    return found if isinstance(found, dict) else None


def object_by(from_json: Callable[[bytes], Any], text: bytes) -> Line | None:
    """Returns what `object_in` does, in a sixth of the time for an object of numbers. `from_json`: pydantic's parser,
    which is given because a short command does not load it. Python's gets the lines that it refuses."""
    if len(text) > MOST_LINE_BYTES or text.count(b"{") != 1 or b"[" in text:
        return object_in(text)
    try:
        found = from_json(text)
    except ValueError:
        return object_in(text)
    return found if isinstance(found, dict) else None


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The last bytes of a file. `num_bytes`: the length of the whole file."""

    data: bytes
    num_bytes: int

    def last(self, is_usable: Callable[[Line], bool], *, containing: bytes = b"") -> Line | None:
        """Returns the last usable line that contains `containing`; None if there is none. A line that begins before
        `data` does not count."""
        end = len(self.data)
        while end > 0:
            if containing:
                end = self._end_of_line(self.data.rfind(containing, 0, end), most=end)
            first = self.data.rfind(b"\n", 0, max(0, end)) + 1
            if end < 0 or (first == 0 and len(self.data) < self.num_bytes):
                return None
            text = self.data[first:end]
            if text and (found := object_in(text)) is not None and is_usable(found):
                return found
            end = first - 1
        return None

    def _end_of_line(self, position: int, *, most: int) -> int:
        """Returns the end, up to `most`, of the line that contains this position; -1 if `position` is negative."""
        if position < 0:
            return -1
        end = self.data.find(b"\n", position, most)
        return most if end < 0 else end


def read_tail(path: Path, *, most_bytes: int) -> Tail | None:
    """Reads the last `most_bytes` of a file, or all of it; None if it is missing.

    Raises OSError if it is a folder or unreadable, and InvalidDataError if it is not a regular file.
    """
    try:
        file = open_local_file(path)
    except FileNotFoundError:
        return None
    with file:
        num_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, num_bytes - most_bytes))
        return Tail(data=file.read(most_bytes), num_bytes=num_bytes)
