"""Finds and opens a source's input files, given by name, pattern or folder, on disk or in a bucket.

The footer of a Parquet file is checked against the file before memory is allocated for the sizes in it.
"""

import glob
import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shards.class_names import MOST_LABELS
from shards.errors import ImageRefusedError, UserError
from shards.sources.entry import printable
from shards.sources.tree import is_passed_over
from shards.storage.local import open_regular
from shards.storage.objects import MissingObjectError, StoreFile
from shards.store import SCHEME, Buckets, open_store

if TYPE_CHECKING:
    from shards.parquet_pieces import ParquetPieces

_WILDCARDS = "*?["
_ANY_DEPTH = "**"
MOST_GROUP_ROWS = 1 << 26  # the largest default of any version of pyarrow
MOST_GROUP_IMAGES = 1 << 22  # a damaged row group puts each of its images on the quarantine list
_MOST_GROUP_LABELS = 1 << 26
_MOST_CHUNK_BYTES = 1 << 50  # a loose bound, because images are read in pieces


def find_files(patterns: Sequence[str], *, suffixes: tuple[str, ...]) -> list[str]:
    """Returns all files that `patterns` name, sorted, each once. A pattern is a path, an `s3://bucket/key`, a folder,
    or a path or key with wildcards.

    In a folder, finds the files at any depth whose name ends in one of `suffixes`. Raises UserError if one of
    `patterns` matches no file.
    """
    found: set[str] = set()
    for pattern in patterns:
        some = list(_stored(pattern, suffixes) if "://" in pattern else _local(pattern, suffixes))
        if not some:
            kinds = " or ".join(suffixes)
            message = f"--source.files {printable(pattern)!r} matches no file"
            raise UserError(
                f"{message}; give {kinds} files, a folder of them, or a pattern such as 'DIR/*{suffixes[0]}'"
            )
        found.update(some)
    return sorted(found, key=lambda path: path.encode("utf-8", "surrogateescape"))


def open_found(path: str, buckets: Buckets) -> Any:
    """Opens a file for pyarrow, which can seek in it. Raises OSError, MissingObjectError or InvalidDataError."""
    import pyarrow as pa

    if not path.startswith(SCHEME):
        os.close(open_regular(path, os.O_RDONLY))  # for a pipe, Arrow would wait until somebody writes to it
        return pa.OSFile(os.fsencode(path))
    try:
        return pa.PythonFile(StoreFile(*buckets.locate(path)), "r")
    except ImageRefusedError as error:
        raise MissingObjectError(path) from error


def _local(pattern: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    path = Path(pattern)
    if path.is_file():
        yield pattern
    elif path.is_dir():
        below = (name for name in open_store(pattern).list() if not is_passed_over(name))
        yield from (str(path / name) for name in below if name.lower().endswith(suffixes))
    elif _ANY_DEPTH in pattern.split("/"):
        yield from _at_any_depth(pattern)
    else:
        # Path.glob refuses absolute patterns.
        begin, rest = _literal(pattern.split("/"))
        names = glob.iglob("/".join([*map(glob.escape, begin), *rest]))  # noqa: PTH207
        yield from (name for name in names if Path(name).is_file())


def _literal(parts: list[str]) -> tuple[list[str], list[str]]:
    """Divides a pattern after the folders that exist, because brackets in their names are not wildcards."""
    num = next((num for num in range(len(parts) - 1, 0, -1) if Path("/".join(parts[:num]) or "/").is_dir()), 0)
    return parts[:num], parts[num:]


def _at_any_depth(pattern: str) -> Iterator[str]:
    """Yields the files that match a pattern with `**`. glob would find the same files, but follow links in circles."""
    begin, rest = _literal(pattern.split("/"))
    while not glob.has_magic(rest[0]):
        begin, rest = [*begin, rest[0]], rest[1:]
    start = "".join(f"{part}/" for part in begin)
    for path in open_store(start or ".").list():
        if _fits(path.split("/"), rest):
            yield start + path


def _fits(names: list[str], patterns: list[str]) -> bool:
    """Returns whether a path's parts match a pattern's parts. `**` matches any number of folders. No wildcard matches a
    hidden name."""
    if not patterns or not names:
        return not patterns and not names
    is_hidden = names[0].startswith(".")
    if patterns[0] == _ANY_DEPTH:
        return _fits(names, patterns[1:] or ["*"]) or (not is_hidden and _fits(names[1:], patterns))
    is_wild_alone = is_hidden and not patterns[0].startswith(".")
    return not is_wild_alone and fnmatchcase(names[0], patterns[0]) and _fits(names[1:], patterns[1:])


def _stored(pattern: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    bucket, _, key = pattern.removeprefix(SCHEME).partition("/")
    root = open_store(f"{pattern[: len(pattern) - len(pattern.removeprefix(SCHEME))]}{bucket}")
    key = key.rstrip("/")
    is_pattern = any(mark in key for mark in _WILDCARDS)
    if is_pattern and not root.exists(key) and next(root.list(key), None) is None:
        folder = key[: min(key.find(mark) for mark in _WILDCARDS if mark in key)].rpartition("/")[0]
        yield from (f"{root.url}/{path}" for path in root.list(folder) if fnmatchcase(path, key))
    elif key.lower().endswith(suffixes):
        yield from (f"{root.url}/{path}" for path in [key] if root.exists(path))
    else:
        paths = (path for path in root.list(key) if not is_passed_over(path.removeprefix(key)))
        yield from (f"{root.url}/{path}" for path in paths if path.lower().endswith(suffixes))


def refuse_groups(
    opened: "ParquetPieces", columns: Sequence[str], *, most_rows: int, most_bytes: int | None = None
) -> None:
    """Raises ValueError if a row group lies outside the file or has more than `most_rows` rows, or if one of `columns`
    has too many values or more than `most_bytes` decompressed bytes."""
    from shards.parquet_pieces import refuse_encrypted

    for number, group in enumerate(opened.groups):
        where = f"its footer is damaged: row group {number}"
        _check(f"{where} has {group.num_rows} rows", group.num_rows, most_rows)
        most_values = min(group.num_rows * MOST_LABELS, max(group.num_rows, _MOST_GROUP_LABELS))
        for chunk in group.chunks_of([*columns, ""]):  # "": the name of an encrypted column may be encrypted, too
            refuse_encrypted(chunk)
            inside = f"{where}, column {chunk.column!r}"
            num_bytes = chunk.end - chunk.begin
            _check(f"{inside} begins at byte {chunk.begin}", chunk.begin, opened.num_bytes)
            _check(f"{inside} has its data at byte {chunk.data_begin}", chunk.data_begin, opened.num_bytes)
            _check(f"{inside} has {num_bytes} bytes", num_bytes, opened.num_bytes - chunk.begin)
            _check(f"{inside} has {chunk.num_values} values", chunk.num_values, most_values)
            most = most_bytes or _MOST_CHUNK_BYTES
            _check(f"{inside} has {chunk.num_bytes} decompressed bytes", chunk.num_bytes, most)
    if (num_rows := sum(group.num_rows for group in opened.groups)) != opened.num_rows:
        raise ValueError(f"its footer is damaged: it says {opened.num_rows} rows, its row groups have {num_rows}")


def unreadable() -> tuple[type[Exception], ...]:
    """Returns the exceptions that an unreadable file raises. ValueError is one of them because names in a damaged
    footer may not be UTF-8, OverflowError because dates and times may be out of Python's range."""
    import pyarrow as pa

    return pa.ArrowException, ValueError, OverflowError, OSError, EOFError, MissingObjectError


def _check(what: str, found: int, most: int) -> None:
    if not 0 <= found <= most:
        raise ValueError(f"{what}, allowed: 0 to {most}")
