"""The first phase of packing reads every image of a source once, and writes one Parquet file for each slice of the
listing.

Slices are cut by position, so the files do not depend on the number of tasks.

Some sources (Parquet) cannot read a single image: a shard of 1,000 random images would read 1,000 row groups. The scan
reads all images in order anyway, so for such a source it copies the images of each slice into one file in the work
folder, and packing reads them from there by offset. These copies are removed once the manifest is written.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from types import TracebackType
from typing import BinaryIO, Self

import pyarrow as pa
import pyarrow.parquet as pq
from isal.isal_zlib import crc32

from shards.class_names import class_name, labels_fault
from shards.config_values import Range
from shards.errors import ImageRefusedError, InvalidDataError, UserError
from shards.images.damage import jpeg_damage, png_damage
from shards.images.image_header import read_header
from shards.images.near_duplicates import perceptual_hash
from shards.packing.config import PackSpec
from shards.packing.listing import slice_entries
from shards.parquet_pieces import ParquetPieces
from shards.sources.entry import MOST_BYTES_AHEAD, Entry, ImageBytes, Reader
from shards.storage.ahead import Hold, in_order_within
from shards.storage.objects import StoreFile
from shards.store import MissingObjectError, Store, open_store
from shards.tables import MOST_ROWS, TableSchema, arrow_faults, read_checked, refuse_values

READS_AHEAD = 16
ROWS_AT_ONCE = 4096
SCAN_SCHEMA = pa.schema(
    [
        ("locator", pa.binary()),  # file names need not be UTF-8
        ("source", pa.string()),
        ("labels", pa.list_(pa.string())),  # as written in the source
        ("weights", pa.list_(pa.float32())),
        ("ext", pa.string()),
        ("height", pa.int32()),
        ("width", pa.int32()),
        ("mode", pa.string()),
        ("orientation", pa.int8()),
        ("size", pa.int64()),
        ("crc32", pa.uint32()),
        ("sha256", pa.binary(32)),
        ("phash", pa.binary(32)),  # null unless the scan looks for near-duplicates
        ("reason", pa.string()),  # null: the image can be packed
    ]
)
_RULES = TableSchema(schema=SCAN_SCHEMA, may_be_null=frozenset(SCAN_SCHEMA.names))
_FIT_RULES = TableSchema(  # for images that can be packed
    schema=SCAN_SCHEMA,
    ranges={"height": Range(1), "width": Range(1), "size": Range(0), "orientation": Range(1)},
    may_be_null=frozenset({"weights", "phash", "reason"}),
)
_SCAN_KEY, _SLICE_KEY = b"patchline.scan", b"patchline.slice"


class StagedFile:
    """Writes the copies of one slice's images. The complete file appears when the block ends without an error."""

    def __init__(self, store: Store, number: int) -> None:
        self._number, self._position = number, 0
        self._writing: AbstractContextManager[BinaryIO] = store.create(_staged_path(number))

    def __enter__(self) -> Self:
        self._file = self._writing.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writing.__exit__(kind, error, trace)

    def add(self, entry: Entry, image: bytes) -> Entry:
        """Appends an image. Returns its entry, with the locator of the copy."""
        self._file.write(image)
        locator = f"{self._number}:{self._position}:{len(image)}"
        self._position += len(image)
        return replace(entry, locator=locator)


@dataclass(frozen=True, kw_only=True)
class StagedReader:
    """Reads copied images by the locators that `StagedFile.add` returned."""

    store: Store

    def read_many(self, locators: Sequence[str]) -> Iterator[ImageBytes]:
        """Yields the images in order. Several are read ahead."""
        for image in in_order_within(self._read, locators, threads=READS_AHEAD, most_bytes=MOST_BYTES_AHEAD):
            if isinstance(image, Exception) and not isinstance(image, OSError | ImageRefusedError):
                raise image
            yield image
            del image  # frees the image before the next one

    def _read(self, locator: str, hold: Hold) -> ImageBytes:
        number, first, size = (int(text) for text in locator.split(":"))
        hold(size)
        try:
            return self.store.read_range(_staged_path(number), first, first + size)
        except (MissingObjectError, EOFError) as error:
            return OSError(f"the copy in the work folder is gone: {error}")


def reader_of(store: Store, spec: PackSpec) -> Reader:
    """Returns the reader that finds the images of a packing by their locators."""
    return StagedReader(store=store) if spec.source.staged else spec.source.reader()


def _staged_path(number: int) -> str:
    return f"work/staged-{number:06d}.bin"


@dataclass(frozen=True, kw_only=True)
class ScanTask:
    """A task: one slice to scan, for the dataset at `url`. `slice_sha256`: the sha256 of the slice's file in the
    listing."""

    url: str
    spec: PackSpec
    number: int
    slice_sha256: str


def scan_path(number: int) -> str:
    """Returns the path of a slice's scan file."""
    return f"plan/scan-{number:06d}.parquet"


def scan_slice(task: ScanTask) -> int:
    """Writes the scan of a slice unless it exists. Returns the slice's number."""
    store = open_store(task.url)
    footer = scan_footer(task.spec.scan_hash(), task.slice_sha256)
    if not is_scanned(store, task.number, footer):
        entries = slice_entries(store, task.number, sha256=task.slice_sha256)
        if task.spec.source.staged:
            with StagedFile(store, task.number) as staged:
                _scan(store, task, _staged(staged, _images(task, entries)), footer)
        else:
            _scan(store, task, _images(task, entries), footer)
    return task.number


def scan_footer(scan_hash: str, slice_sha256: str) -> dict[bytes, bytes]:
    """Returns the footer of a scan file: hashes of the settings and of the slice that the file was made from."""
    return {_SCAN_KEY: scan_hash.encode(), _SLICE_KEY: slice_sha256.encode()}


def is_scanned(store: Store, number: int, footer: dict[bytes, bytes]) -> bool:
    """Returns whether the scan of a slice exists and was made with the same settings from the same slice."""
    try:
        with arrow_faults():
            metadata = ParquetPieces(StoreFile(store, scan_path(number)), ours=True).schema.metadata or {}
    except (MissingObjectError, ValueError):
        return False
    return all(metadata.get(key) == value for key, value in footer.items())


def read_scan(store: Store, number: int, columns: Sequence[str]) -> tuple[bytes, pa.Table]:
    """Returns the bytes of a slice's scan file, and these columns of it. Raises UserError if it is missing or
    damaged."""
    path = scan_path(number)
    try:
        data = store.read(path)
        table = read_checked(data, _RULES, list(dict.fromkeys((*columns, "reason"))), most_rows=MOST_ROWS)
        refuse_values(table.filter(table["reason"].is_null()), _FIT_RULES)
    except MissingObjectError:
        message = f"{store.url}/{path} is missing: the scan is not complete"
        raise UserError(f"{message}; run --phase scan with every part first") from None
    except ValueError as error:
        message = f"{store.url}/{path} cannot be used: {error}"
        raise InvalidDataError(f"{message}; delete it and scan again") from error
    return data, table.select(list(columns))


def _scan(store: Store, task: ScanTask, images: Iterator[tuple[Entry, ImageBytes]], footer: dict[bytes, bytes]) -> None:
    records = (_record(entry, image, task.spec) for entry, image in images)
    schema = SCAN_SCHEMA.with_metadata(footer)
    with store.create(scan_path(task.number)) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        while some := list(islice(records, ROWS_AT_ONCE)):
            writer.write_table(pa.Table.from_pylist(some, schema=schema))


def _images(task: ScanTask, entries: list[Entry]) -> Iterator[tuple[Entry, ImageBytes]]:
    return task.spec.source.images(entries, max_bytes=task.spec.limits.max_bytes)


def _staged(file: StagedFile, images: Iterator[tuple[Entry, ImageBytes]]) -> Iterator[tuple[Entry, ImageBytes]]:
    for entry, image in images:
        yield (file.add(entry, image), image) if isinstance(image, bytes) else (entry, image)


def _record(entry: Entry, image: ImageBytes, spec: PackSpec) -> dict[str, object]:
    labels = tuple(class_name(label) for label in entry.labels)
    fault = labels_fault(labels)
    named: dict[str, object] = {
        "locator": entry.locator.encode("utf-8", "surrogateescape"),
        "source": entry.name,
        "labels": () if fault else labels,
        "weights": () if fault else entry.weights,
    }
    try:
        if fault:
            raise ImageRefusedError(fault)
        return named | _facts(image, spec)
    except ImageRefusedError as error:
        return named | {"reason": str(error)}


def _facts(image: ImageBytes, spec: PackSpec) -> dict[str, object]:
    if isinstance(image, ImageRefusedError):
        raise image
    if isinstance(image, OSError):
        raise ImageRefusedError(f"unreadable: {image}")
    header = read_header(image, spec.limits)
    if spec.refuses_truncated and (damage := jpeg_damage(image) or png_damage(image)):
        kind = "PNG" if header.ext == "png" else "JPEG"
        raise ImageRefusedError(f"truncated: a part of the {kind} is missing ({damage})")
    return {
        **vars(header),
        "size": len(image),
        "crc32": crc32(image),
        "sha256": hashlib.sha256(image).digest(),
        "phash": perceptual_hash(image) if spec.is_hashed else None,
    }
