"""Reads local files of others whole: regular files only, and never more than a bound."""

import os
from io import BufferedReader
from pathlib import Path

from shards.errors import InvalidDataError
from shards.storage.local import open_regular, read_whole


def at_home(path: str) -> str:
    """A path with `~` or `~user` at its beginning replaced by the home folder, as a shell does it; else as it is."""
    return os.path.expanduser(path) if path.startswith("~") else path  # noqa: PTH111 - Path raises for unknown users


def read_local_file(path: str | Path, *, most_bytes: int) -> bytes:
    """The file's bytes, whatever links lead to it.

    Raises OSError if it is missing, a folder or unreadable; InvalidDataError if it is a pipe, a socket or a device, or
    has more than `most_bytes`.
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
    """The text of a UTF-8 file, without a byte order mark. Raises as `read_local_file`; InvalidDataError if it is not
    UTF-8."""
    data = read_local_file(path, most_bytes=most_bytes)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = f"{path} is not UTF-8: byte {error.start:,} (line {line:,}) is 0x{data[error.start]:02x}"
        raise InvalidDataError(f"{what}; save it as UTF-8") from None


def open_local_file(path: str | Path) -> BufferedReader:
    """The file, open for reading its parts. Raises as `read_local_file`."""
    name = os.fspath(path)
    try:
        return open(name, "rb", opener=open_regular)
    except ValueError:
        raise InvalidDataError(f"cannot read {name!r}: its name has a null byte") from None
