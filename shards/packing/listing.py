"""Lists a source's entries once, in slices, so that all tasks of a job array scan the same listing.

The first task lists the source; any other task would write the same files. listing.json is written last.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Annotated, Any

import pyarrow as pa

from shards.config_values import Range
from shards.errors import UserError
from shards.files.typed_json import read_record
from shards.manifest import sha256_hex
from shards.output.progress import Progress
from shards.sources.entry import Entry
from shards.sources.kinds import (
    ClassTarsSource,
    FlatSource,
    FolderSource,
    ManifestSource,
    ParquetSource,
    Source,
    TarOfTarsSource,
    VtabSource,
)
from shards.store import MissingObjectError, Store, open_store
from shards.tables import MOST_ROWS, TableSchema, read_checked, table_bytes

LISTING_PATH = "work/listing.json"
SLICE_ENTRIES = 32_768
SLICE_BYTES = 4 << 30
# The first slices are smaller, so that tasks can share the scan of a small collection too: four slices of 512 images or
# 64 MiB, four of twice that, and so on. After 129,024 images, all slices have the full size.
FIRST_ENTRIES = 512
FIRST_BYTES = 64 << 20
_SLICES_OF_A_SIZE = 4
_MOST_LOOKED_AT = 1000  # files that are checked for tars before an error message is written

_SCHEMA = pa.schema(
    [
        ("locator", pa.binary()),  # file names need not be UTF-8
        ("name", pa.string()),
        ("labels", pa.list_(pa.string())),
        ("weights", pa.list_(pa.float32())),
        ("num_bytes", pa.int64()),
        ("num_images", pa.int32()),
    ]
)
_RULES = TableSchema(schema=_SCHEMA, may_be_null=frozenset(_SCHEMA.names))


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Consecutive entries of a source. `num_images`: the number of images that the listing knows of."""

    sha256: str
    num_images: Annotated[int, Range(0)]
    num_bytes: Annotated[int, Range(0)]


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The content of listing.json. `scan_hash`: the hash of the settings that the listing was made for
    (`PackSpec.scan_hash`)."""

    scan_hash: str
    slices: tuple[Slice, ...]

    def amounts(self) -> tuple[list[int], str]:
        """Returns how much each slice adds to the progress bar, and the unit: images if their numbers are known,
        otherwise MB."""
        if all(some.num_images for some in self.slices):
            return [some.num_images for some in self.slices], "images"
        return [some.num_bytes // 1_000_000 for some in self.slices], "MB"


def listed(store: Store, source: Source, *, scan_hash: str, relist: bool = False) -> Listing:
    """Returns the source's listing at the store. Makes it if there is none with this `scan_hash`.

    `relist`: make a new listing even if there is one, since the source may have grown. Only a process that runs alone
    may set it.
    """
    if relist:
        return _write(store, source, scan_hash)
    try:
        found = read_record(Listing, store.read(LISTING_PATH))
        if found.scan_hash == scan_hash:
            return found
    except (MissingObjectError, ValueError):  # there is no usable listing, so it is made
        pass
    return _write(store, source, scan_hash)


def slice_entries(store: Store, number: int, *, sha256: str) -> list[Entry]:
    """Reads the entries of a slice. Raises UserError if the slice is missing or does not match the listing."""
    path = _path(number)
    try:
        data = store.read(path)
    except MissingObjectError:
        message = f"{store.url}/{path} is gone: another command has packed {store.url} meanwhile, or deleted it"
        raise UserError(f"{message}; if there is no manifest.json, delete {store.url}/work and scan again") from None
    if sha256_hex(data) != sha256:
        message = f"{store.url}/{path} does not match {LISTING_PATH}: the source changed while it was listed"
        raise UserError(f"{message}; delete {store.url}/work and scan again")
    return [_entry(row) for row in read_checked(data, _RULES, most_rows=MOST_ROWS).to_pylist()]


def _write(store: Store, source: Source, scan_hash: str) -> Listing:
    slices = []
    with Progress("list", 0, unit="entries") as progress:
        for number, held in enumerate(_cut(source.entries())):
            rows = [vars(entry) | {"locator": entry.locator.encode("utf-8", "surrogateescape")} for entry in held]
            data = table_bytes(pa.Table.from_pylist(rows, schema=_SCHEMA))
            store.write(_path(number), data)
            sums = sum(entry.num_images for entry in held), sum(entry.num_bytes for entry in held)
            slices.append(Slice(sha256=sha256_hex(data), num_images=sums[0], num_bytes=sums[1]))
            progress.advance(len(held))
    if not slices:
        raise UserError(f"{_nothing_in(source)}; {_another(source)}")
    listing = Listing(scan_hash=scan_hash, slices=tuple(slices))
    store.write(LISTING_PATH, json.dumps(asdict(listing), sort_keys=True).encode())
    return listing


def _nothing_in(source: Source) -> str:
    """Returns a text that says what was not found, and where."""
    match source:
        case ClassTarsSource():
            return f"no *.tar below {source.root}"
        case TarOfTarsSource():
            return f"no tar in {source.path}"
        case FolderSource() | FlatSource():
            return f"no image found below {source.root}"
        case ParquetSource() | ManifestSource():
            return f"no image found in {', '.join(source.files)}"
        case VtabSource():
            return f"no example of {source.task} found in {source.root}"
    return f"no image found in {source.kind}"


def _another(source: Source) -> str:
    """Returns advice for a source without images. If it is a folder with tars, each tar is often one class, or a
    WebDataset shard."""
    if isinstance(source, FolderSource | FlatSource) and any(
        path.lower().endswith(".tar") for path in islice(open_store(source.root).list(), _MOST_LOOKED_AT)
    ):
        return "it has tars: use patchline pack class_tars for one tar a class, patchline index for WebDataset's"
    return "give a source that has some"


def _cut(entries: Iterator[Entry]) -> Iterator[list[Entry]]:
    held: list[Entry] = []
    num_images = num_bytes = num_slices = 0
    most_images, most_bytes = _size(0)
    for entry in entries:
        held.append(entry)
        num_images += max(entry.num_images, 1)
        num_bytes += entry.num_bytes
        if num_images >= most_images or num_bytes >= most_bytes:
            yield held
            held, num_images, num_bytes, num_slices = [], 0, 0, num_slices + 1
            most_images, most_bytes = _size(num_slices)
    if held:
        yield held


def _size(number: int) -> tuple[int, int]:
    """Returns the numbers of images and bytes at which slice `number` ends."""
    doublings = number // _SLICES_OF_A_SIZE
    return min(FIRST_ENTRIES << doublings, SLICE_ENTRIES), min(FIRST_BYTES << doublings, SLICE_BYTES)


def _path(number: int) -> str:
    return f"work/listing-{number:06d}.parquet"


def _entry(row: dict[str, Any]) -> Entry:
    decoded = {
        "locator": row["locator"].decode("utf-8", "surrogateescape"),
        "labels": tuple(row["labels"] or ()),
        "weights": tuple(row["weights"] or ()),
    }
    return Entry(**row | decoded)
