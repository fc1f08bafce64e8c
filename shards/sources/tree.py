"""Lists the images below a folder or an S3 prefix, in the same order on disk and on S3, and reads them by path.

A folder may have more files than fit in memory. So the names are sorted in runs, which are kept in a temporary file and
merged as the names are taken.
"""

import heapq
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, BinaryIO

from shards.errors import ImageRefusedError, UserError
from shards.sources.entry import IMAGE_SUFFIXES, MOST_BYTES_AHEAD, Entry, ImageBytes, printable, too_large
from shards.sources.names import PassedOver
from shards.storage.ahead import Hold, in_order_within, no_wait
from shards.storage.local import FolderWalk
from shards.storage.objects import MissingObjectError, Store
from shards.storage.temporary import temporary_file
from shards.store import open_store

if TYPE_CHECKING:
    import pyarrow as pa

RUN_ROWS = 1 << 17  # about 20 MB of Python objects if a row is a file name
BATCH_ROWS = 512  # rows of each run that are in memory during the merge
Row = tuple[bytes, ...]
_first = itemgetter(0)
log = logging.getLogger(__name__)
READS_AHEAD = 16
MOST_BYTES = 1 << 31
REFUSED = "\0"  # begins the locator of an entry that cannot be read; no path contains it
# Synology, QNAP, macOS, Windows and ext4 keep thumbnails or deleted files in these folders.
SYSTEM_FOLDERS = frozenset(
    ("@eaDir", "#recycle", "@Recycle", "__MACOSX", "$RECYCLE.BIN", "System Volume Information", "lost+found")
)
_PIECE_BYTES = 1 << 20
_SUFFIXES = frozenset(suffix.encode() for suffix in IMAGE_SUFFIXES)
# Without O_NONBLOCK, opening a named pipe that nobody writes to would block forever.
_OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def sorted_rows(rows: Iterable[Row]) -> Iterator[Row]:
    """Yields the rows, sorted by their first field. All have the same number of fields. Rows with the same first field
    keep their order."""
    left = iter(rows)
    run = _next_run(left)
    if len(run) < RUN_ROWS:
        yield from run
        return
    import pyarrow as pa

    schema = pa.schema([(f"field{number}", pa.binary()) for number in range(len(run[0]))])
    with temporary_file() as file:
        edges = [0]  # where each run begins, counted in batches
        with pa.ipc.new_file(pa.PythonFile(file, "w"), schema) as writer:
            while run:
                for begin in range(0, len(run), BATCH_ROWS):
                    columns = zip(*run[begin : begin + BATCH_ROWS], strict=True)
                    writer.write_batch(pa.record_batch([pa.array(column, pa.binary()) for column in columns], schema))
                edges.append(edges[-1] + -(-len(run) // BATCH_ROWS))
                run.clear()  # frees it before the next
                run = _next_run(left)
        with pa.ipc.open_file(pa.PythonFile(file)) as batches:
            runs = [_read_run(batches, first, end) for first, end in pairwise(edges)]
            yield from heapq.merge(*runs, key=_first)


def _next_run(left: Iterator[Row]) -> list[Row]:
    run = list(islice(left, RUN_ROWS))
    run.sort(key=_first)
    return run


def _read_run(batches: "pa.ipc.RecordBatchFileReader", first: int, end: int) -> Iterator[Row]:
    for number in range(first, end):
        batch = batches.get_batch(number)
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def refused_entry(name: str, reason: str) -> Entry:
    """Returns an entry for something that cannot be read as an image. Reading it returns the reason."""
    return Entry(locator=REFUSED + reason, name=name)


def is_passed_over(path: str) -> bool:
    """Returns whether a path below a root is hidden, lies in a hidden folder (.ipynb_checkpoints has older copies of
    tables), or lies in a folder that systems use for thumbnails and deleted files."""
    return "/." in f"/{path}" or not SYSTEM_FOLDERS.isdisjoint(path.split("/")[:-1])


def list_images(root: str) -> Iterator[tuple[str, int]]:
    """Yields (path, number of bytes) for all files with an image suffix at any depth below `root`, sorted by the bytes
    of their paths. For local files, the number is 0.

    Hidden files and folders, whose names begin with a dot, are skipped, and so are folders that systems use for
    thumbnails and deleted files. Links are followed, but not in circles (see FolderWalk). Raises UserError if a folder
    cannot be listed.
    """
    if not root:
        raise UserError("--source.root is missing; give the folder or s3://bucket/prefix that holds the images")
    others = PassedOver(why="with no image suffix")
    if "://" in root:
        for path, size in open_store(root).list_sizes():
            if is_passed_over(path):
                continue
            if is_image_name(path.encode("utf-8", "surrogateescape")):
                yield path, size
            else:
                others.add(path)
    else:
        for path_bytes in _Walk(os.fsencode(root), others).paths():
            yield os.fsdecode(path_bytes), 0
    others.mention(root)


def is_image_name(name: bytes) -> bool:
    """Returns whether a file has an image suffix."""
    return name[name.rfind(b".") :].lower() in _SUFFIXES


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Reads the images below a folder or an S3 prefix, by their relative paths."""

    root: str

    def read_many(self, locators: Sequence[str]) -> Iterator[ImageBytes]:
        """Yields the bytes of the files in order. From a bucket, several are fetched at once."""
        entries = (Entry(locator=locator, name="") for locator in locators)
        return (image for _, image in self._read(entries, MOST_BYTES))

    def images(self, entries: Sequence[Entry], *, max_bytes: int) -> Iterator[tuple[Entry, ImageBytes]]:
        """Yields the image of each entry, in order."""
        return self._read(iter(entries), max_bytes)

    def _read(self, entries: Iterator[Entry], max_bytes: int) -> Iterator[tuple[Entry, ImageBytes]]:
        if "://" in self.root:
            store = open_store(self.root)
            return read_ahead(lambda entry, hold: _fetch_listed(store, entry, max_bytes, hold), entries)
        start = self.root.rstrip("/") + "/"
        return ((entry, read_below(start, entry.locator, max_bytes=max_bytes)) for entry in entries)


def read_ahead(
    function: Callable[[Entry, Hold], ImageBytes], entries: Iterator[Entry]
) -> Iterator[tuple[Entry, ImageBytes]]:
    """Calls `function` for every entry in threads, and yields the results in order. Raises the first error, because an
    error means that the store cannot be read."""

    def read(entry: Entry, hold: Hold) -> tuple[Entry, ImageBytes]:
        return entry, function(entry, hold)

    for result in in_order_within(read, entries, threads=READS_AHEAD, most_bytes=MOST_BYTES_AHEAD):
        if isinstance(result, Exception):
            raise result
        yield result
        del result  # frees it before the next


def read_below(start: str, path: str, *, max_bytes: int) -> ImageBytes:
    """Reads the file at a path relative to the folder `start`, which ends in a slash."""
    if reason := outside(path):
        return ImageRefusedError(reason)
    return read_file(start + path, max_bytes=max_bytes)


def outside(path: str) -> str:
    """Returns why a path is not below the source's root, or "" if it is."""
    if path.startswith(REFUSED):
        return path.removeprefix(REFUSED)
    if not path or path[0] == "/" or (".." in path and ".." in path.split("/")) or "\0" in path:
        return f"{printable(path)!r} is not a path below the source's root: no '..', and not absolute"
    return ""


def read_file(path: str, *, max_bytes: int) -> ImageBytes:
    """Reads a local file with as few system calls as possible: open, size, read."""
    try:
        descriptor = os.open(path, _OPEN_FLAGS)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return OSError("a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file")
            size = status.st_size
            if size > max_bytes:
                return too_large(size, max_bytes=max_bytes)
            data = os.read(descriptor, size)
            return data if len(data) == size else data + _rest(descriptor, size - len(data))
        finally:
            os.close(descriptor)
    except OSError as error:
        return OSError(error.strerror or str(error))


def fetch(store: Store, path: str, *, max_bytes: int, hold: Hold = no_wait) -> ImageBytes:
    """Reads an object of a store. Returns a refusal if it has more than `max_bytes`."""
    try:
        with store.open_read(path) as file:
            return read_at_most(file, max_bytes=max_bytes, hold=hold)
    except (MissingObjectError, EOFError) as error:
        return OSError(str(error))
    except ValueError as error:  # a key that is not a path, such as "a//b"
        return ImageRefusedError(str(error))


def read_at_most(file: BinaryIO, *, max_bytes: int, hold: Hold = no_wait) -> bytes | ImageRefusedError:
    """Reads a whole stream. Returns a refusal if it has more than `max_bytes`."""
    pieces, num_bytes = [], 0
    while piece := file.read(_PIECE_BYTES):
        num_bytes += len(piece)
        hold(num_bytes)
        if num_bytes > max_bytes:
            return ImageRefusedError(f"too large: more than {max_bytes} bytes")
        pieces.append(piece)
    return b"".join(pieces)


def _fetch_listed(store: Store, entry: Entry, max_bytes: int, hold: Hold) -> ImageBytes:
    if entry.num_bytes > max_bytes:
        return too_large(entry.num_bytes, max_bytes=max_bytes)
    if reason := outside(entry.locator):
        return ImageRefusedError(reason)
    hold(entry.num_bytes)  # 0 if the listing gives no size: then bytes are counted as they arrive
    return fetch(store, entry.locator, max_bytes=max_bytes, hold=hold)


def _rest(descriptor: int, missing: int) -> bytes:
    """Reads the missing bytes, because network file systems may return fewer than requested. Returns fewer if the file
    has been truncated."""
    pieces = []
    while missing and (piece := os.read(descriptor, missing)):
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


class _Walk:
    """Walks through a local folder. `others` counts the files without an image suffix."""

    def __init__(self, root: bytes, others: PassedOver) -> None:
        self._root, self._others, self._walk = root, others, FolderWalk()
        self._start = root.rstrip(b"/") + b"/"

    def paths(self, below: bytes = b"") -> Iterator[bytes]:
        """Yields the paths in order. A folder sorts as "name/", so that "a-b" comes before "a/b" as it does in S3."""
        folder = os.path.join(self._root, below)  # noqa: PTH118 - names are bytes, since they need not be UTF-8
        try:
            with self._walk.inside(folder) as is_new:
                for (name,) in sorted_rows(self._names(folder)) if is_new else ():
                    if name.endswith(b"/"):
                        yield from self.paths(below + name)
                    else:
                        yield below + name
        except OSError as error:
            what = f"--source.root: {_shown(folder)!r} cannot be listed: {error.strerror}"
            raise UserError(what, todo="give a folder that this user may read") from error

    def _names(self, folder: bytes) -> Iterator[Row]:
        """Yields the images in a folder, and its folders with a slash appended."""
        with os.scandir(folder) as found:
            for item in found:
                name = item.name
                if name.startswith(b"."):
                    continue
                if _is_folder(item):
                    if os.fsdecode(name) in SYSTEM_FOLDERS:
                        continue
                    yield (name + b"/",)
                elif is_image_name(name):
                    yield (name,)  # not checked here: an unreadable image belongs in quarantine
                elif item.is_symlink() and not os.path.exists(item.path):  # noqa: PTH110
                    log.warning("the link %s is broken and is skipped", _shown(item.path))
                else:
                    self._others.add(os.fsdecode(item.path.removeprefix(self._start)))


def _is_folder(item: os.DirEntry[bytes]) -> bool:
    try:
        return item.is_dir()
    except OSError:  # a link to itself, or into a folder without permission
        return False


def _shown(path: bytes) -> str:
    return printable(os.fsdecode(path))
