"""First phase of packing: every image of a source read once. One Parquet file for each slice of the source.

Slices are cut by position, not by worker, so the files are the same however many tasks share the work.
"""

import hashlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq

from shards.entry import Entry
from shards.image_header import ImageRefusedError, read_header
from shards.index import read_table, table_bytes
from shards.sources import Source, source_hash
from shards.store import MissingObjectError, open_store

SLICE_ENTRIES = 32_768
READ_ENTRIES = 256

SCAN_SCHEMA = pa.schema(
    [
        ("position", pa.int64()),
        ("locator", pa.binary()),  # file names need not be UTF-8
        ("source", pa.string()),
        ("label_name", pa.string()),
        ("ext", pa.string()),
        ("height", pa.int32()),
        ("width", pa.int32()),
        ("size", pa.int64()),
        ("crc32", pa.uint32()),
        ("sha256", pa.binary(32)),
        ("reason", pa.string()),  # null: the image is fit to be packed
    ]
)
_SOURCE_KEY, _LISTING_KEY = b"patchline.source", b"patchline.listing"


@dataclass(frozen=True, kw_only=True)
class ScanSlice:
    """Consecutive entries of a source, the first of them at `first_position`."""

    number: int
    first_position: int
    entries: tuple[Entry, ...]

    def listing_hash(self) -> str:
        """sha256 of names and labels as listed; tells whether the source has changed since."""
        digest = hashlib.sha256()
        for entry in self.entries:
            digest.update(os.fsencode(f"{entry.locator}\0{entry.name}\0{entry.label_name}\n"))
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class ScanTask:
    """One slice to scan into the dataset at `url`."""

    url: str
    source: Source
    slice: ScanSlice


def scan_path(number: int) -> str:
    """Where the scan of a slice is."""
    return f"plan/scan-{number:06d}.parquet"


def slices(source: Source) -> Iterator[ScanSlice]:
    """The source, cut into slices; lists the source, reads no image."""
    entries, number = source.entries(), 0
    while held := tuple(islice(entries, SLICE_ENTRIES)):
        yield ScanSlice(number=number, first_position=number * SLICE_ENTRIES, entries=held)
        number += 1


def scan_slice(task: ScanTask) -> int:
    """Write the scan of a slice unless it is there already; the number of its entries."""
    store, path = open_store(task.url), scan_path(task.slice.number)
    try:
        done = is_scan_of(store.read(path), task.source, task.slice)
    except MissingObjectError:
        done = False
    if not done:
        table = pa.Table.from_pylist(list(_records(task)), schema=SCAN_SCHEMA)
        store.write(path, table_bytes(table.replace_schema_metadata(_footer(task.source, task.slice))))
    return len(task.slice.entries)


def is_scan_of(data: bytes, source: Source, part: ScanSlice) -> bool:
    """Whether a scan file is of this source and of exactly this listing."""
    metadata = pq.read_schema(pa.BufferReader(data)).metadata or {}
    return all(metadata.get(key) == value for key, value in _footer(source, part).items())


def quarantined(scan: bytes) -> pa.Table:
    """Position, source and reason of what a scan file refused."""
    table = read_table(scan, columns=["position", "source", "reason"])
    return table.filter(table.column("reason").is_valid())


def _footer(source: Source, part: ScanSlice) -> dict[bytes, bytes]:
    return {_SOURCE_KEY: source_hash(source).encode(), _LISTING_KEY: part.listing_hash().encode()}


def _records(task: ScanTask) -> Iterator[dict[str, object]]:
    reader, known = task.source.reader(), task.source.known_labels()
    entries = task.slice.entries
    for begin in range(0, len(entries), READ_ENTRIES):
        some = entries[begin : begin + READ_ENTRIES]
        images = reader.read_many([entry.locator for entry in some])
        for row, (entry, image) in enumerate(zip(some, images, strict=True)):
            position = task.slice.first_position + begin + row
            yield {"position": position, **_record(entry, image, known)}


def _record(entry: Entry, image: bytes | OSError, known: tuple[str, ...] | None) -> dict[str, object]:
    named: dict[str, object] = {
        "locator": os.fsencode(entry.locator),
        "source": entry.name,
        "label_name": entry.label_name,
    }
    try:
        return named | _facts(entry, image, known)
    except ImageRefusedError as error:
        return named | {"reason": str(error)}


def _facts(entry: Entry, image: bytes | OSError, known: tuple[str, ...] | None) -> dict[str, object]:
    if isinstance(image, OSError):
        raise ImageRefusedError(f"unreadable: {image}")
    if entry.label_name is None:
        raise ImageRefusedError("no label")
    if known is not None and entry.label_name not in known:
        raise ImageRefusedError(f"unknown label {entry.label_name!r}")
    header = read_header(image)
    return {
        "ext": header.ext,
        "height": header.height,
        "width": header.width,
        "size": len(image),
        "crc32": zlib.crc32(image),
        "sha256": hashlib.sha256(image).digest(),
    }
