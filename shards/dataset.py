"""A packed dataset, opened for reading. Its manifest, block table and labels are small for any dataset, and stay in
memory."""

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Generic, TypeVar, cast

import numpy as np
import pyarrow as pa
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from shards.class_names import class_name
from shards.errors import InvalidDataError, StorageError, UnreachableError, UserError
from shards.host_copy import LocalRanks, one_copy, passing_copy
from shards.index import (
    block_table,
    read_block_columns,
    read_block_rows,
    read_labels,
    read_sample_rows,
    read_sources,
)
from shards.manifest import (
    BLOCKS_PATH,
    LABELS_PATH,
    MANIFEST_PATH,
    ROWS_PATH,
    Manifest,
    index_path,
    sha256_hex,
)
from shards.manifest_table import array_of, manifest_from, read_manifest, table_of
from shards.output.terminal import printable_name
from shards.sample_rows import BlockTable, SampleRows, refuse_blocks, refuse_count, refuse_labels, refuse_rows
from shards.sources.tar_members import BLOCK_BYTES
from shards.storage.objects import Readable
from shards.storage.ranges import RangeReads
from shards.store import MissingObjectError, Store, open_store
from shards.tables import numbers
from shards.what_is_there import no_dataset

Value = TypeVar("Value")
HELD_ROWS_BYTES = 128 << 20  # at 37 bytes per sample, the rows of 3 million samples fit
_SAMPLES_A_READ = 1024  # per read of rows.bin: 34 kB, 0.5 % of the bytes of a block
_MOST_READ_BYTES = 1 << 20
_FINGERPRINT = b"fingerprint"
_OTHER_TARS = 8  # the number of other tars to look for if one is missing


class _Kept(Generic[Value]):
    """Values by number. The most recently used stay in memory, up to HELD_ROWS_BYTES. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: OrderedDict[int, tuple[Value, int]] = OrderedDict()
        self._num_bytes = 0

    def get(self, number: int, make: Callable[[], Value], size_of: Callable[[Value], int]) -> Value:
        """Returns the value of this number. If it is not in memory, calls `make`, without holding the lock: two threads
        may make the same value, but no thread waits for another's value."""
        with self._lock:
            if number in self._values:
                self._values.move_to_end(number)
                return self._values[number][0]
        value = make()
        with self._lock:
            self._num_bytes += size_of(value) - self._values.pop(number, (value, 0))[1]
            self._values[number] = value, size_of(value)
            while self._num_bytes > HELD_ROWS_BYTES and len(self._values) > 1:
                self._num_bytes -= self._values.popitem(last=False)[1][1]
        return value


class _Held:
    """The parts of the index that are in memory. All readers share them."""

    def __init__(self) -> None:
        self.sample_rows = _Kept[SampleRows]()  # by shard
        self.block_rows = _Kept[bytes]()  # pieces of rows.bin, by the first block of each read
        self.sources: tuple[int, list[str]] = (-1, [])  # the last shard whose sources were read, and these sources
        self.missing_tars: set[int] = set()  # shards whose tar is missing while others are there
        self.has_found_tar = False


class Dataset:
    """One dataset, or a part of one (shards/part.py). `fingerprint` is the sha256 of its manifest without description
    and licence. The manifest determines every byte of the data."""

    def __init__(self, store: Store, manifest: Manifest, *, fingerprint: str, ranks: LocalRanks | None = None) -> None:
        self.store, self.manifest, self.fingerprint = store, manifest, fingerprint
        self._ranks = ranks  # the ranks of this host that share the tables
        self.url = store.url
        self.packed_fingerprint = fingerprint  # the whole dataset's, even for a part
        self.shard_store = open_store(manifest.shards_url) if manifest.shards_url else store
        self.num_samples = manifest.num_samples
        self.num_classes = manifest.num_classes
        self.first_sample_ids: NDArray[np.int64] = manifest.shard_column("first_sample_id")
        self.lost_tars: frozenset[str] = frozenset()  # the paths of tars that are not read: storage has lost them
        self._held = _Held()
        self._files: Readable = self.store
        self._tars: Readable = self.shard_store

    def read_by(self, reads: RangeReads) -> "Dataset":
        """Returns a copy of this dataset that shares everything in memory, but reads through `reads`, which counts the
        bytes. Once `reads` is closed, threads that wait for bytes get a CancelledError."""
        stream = copy.copy(self)
        stream._files = reads.of(self.store)
        stream._tars = reads.of(self.shard_store, lost=self.lost_tars)
        return stream

    def without_tars(self, paths: Collection[str]) -> "Dataset":
        """Returns the same dataset, but streams of it do not read these tars: their samples have no bytes."""
        other = copy.copy(self)
        other.lost_tars = frozenset(paths)
        return other

    def has_lost(self, sample_id: int) -> bool:
        """Whether a sample is in one of the tars that are not read."""
        shard = int(np.searchsorted(self.first_sample_ids, sample_id, side="right")) - 1
        return bool(self.lost_tars) and self.shard_path(shard) in self.lost_tars

    @cached_property
    def blocks(self) -> BlockTable:
        """The place of every block."""
        return self.packed_blocks

    @cached_property
    def packed_blocks(self) -> BlockTable:
        """The place of every block in the dataset as packed. It differs from `blocks` only if this is a part."""
        return block_table(self._one_copy(BLOCKS_PATH, self._checked_blocks))

    def _checked_blocks(self) -> pa.Table:
        with self.naming(BLOCKS_PATH):
            table = read_block_columns(self.checked_file(BLOCKS_PATH), has_rows=self._has_block_rows)
            refuse_blocks(block_table(table), self.manifest)
        return table

    def _one_copy(self, path: str, read: Callable[[], pa.Table]) -> pa.Table:
        """Returns a table of the dataset, read and checked by one rank for the whole host."""
        return one_copy(self._ranks, f"{path} of {self.packed_fingerprint} at {self.url}", read)

    def of_host(self, name: str, make: Callable[[], tuple[NDArray[np.int64], ...]]) -> tuple[NDArray[np.int64], ...]:
        """Returns the int64 arrays of equal length that `make` computes from this dataset alone, as one copy for all
        ranks of a host. `name` distinguishes them from other arrays. Each rank calls this once per name."""

        def table() -> pa.Table:
            arrays = [array_of(values) for values in make()]
            return pa.Table.from_arrays(arrays, names=[str(number) for number in range(len(arrays))])

        if self._ranks is None or self._ranks.num_ranks == 1:
            return make()
        found = passing_copy(self._ranks, f"{name} of {self.fingerprint} at {self.url}", table)
        return tuple(numbers(column) for column in found.columns)

    @property
    def block_sizes(self) -> NDArray[np.int64]:
        """int64[num_blocks]: samples per block."""
        return self.blocks.num_samples

    @cached_property
    def label_names(self) -> tuple[str, ...]:
        """The name of each label id, in the normal form in which all names are compared."""
        return tuple(map(class_name, self.label_table.column("name").to_pylist()))

    @cached_property
    def label_table(self) -> pa.Table:
        """The table of classes as packed, with one row per label id: `name` and `num_samples`. `num_samples` counts the
        whole dataset, even if this is a part. The length of the table is checked."""
        return self._one_copy(LABELS_PATH, self._checked_labels)

    def _checked_labels(self) -> pa.Table:
        with self.naming(LABELS_PATH):
            labels = read_labels(self.checked_file(LABELS_PATH))
            refuse_labels(labels, num_classes=self.num_classes)
        return labels

    def packed_ids(self, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the ids of samples in the dataset as packed. They differ from `sample_ids` only if this is a part."""
        return sample_ids

    def packed_row(self, shard: int, row: int) -> int:
        """Returns the row of a sample in its shard's index. It differs from `row` only if this is a part."""
        packed = self.packed_ids(self.first_sample_ids[shard : shard + 1] + row)[0]
        return int(packed) - self.manifest.shards[shard].first_sample_id

    @property
    def whole(self) -> "Dataset":
        """The dataset as packed. It differs from this one only if this is a part."""
        return self

    def bytes_around(self, first_sample_id: int, last_sample_id: int) -> tuple[int, int]:
        """Returns (first byte, end byte) of the stretch of a tar that has every member of these samples of one shard:
        from the end of the image before them to the header of the image after them. The stretch begins with a header;
        it may also have members of the samples before and after."""
        first, last = self.packed_ids(np.array([first_sample_id, last_sample_id], dtype=np.int64)).tolist()
        shard = int(np.searchsorted(self.whole.first_sample_ids, first, side="right")) - 1
        record = self.manifest.shards[shard]
        begin, end = 0, record.num_bytes
        if first > record.first_sample_id:
            before = self.whole.rows_of(first - 1, 1)
            begin = -(-int(before.offset[0] + before.size[0]) // BLOCK_BYTES) * BLOCK_BYTES
        if last + 1 < record.first_sample_id + record.num_samples:
            end = int(self.whole.rows_of(last + 1, 1).offset[0]) - BLOCK_BYTES
        return begin, end

    def shard_path(self, shard: int) -> str:
        """Returns the path of a shard's tar in `shard_store`."""
        return self.manifest.shards[shard].path

    def read_shard(self, shard: int, first: int, end: int) -> bytes:
        """Reads bytes first..end-1 of a shard's tar. Raises MissingObjectError if it is missing, and EOFError if it is
        shorter."""
        try:
            data = self._tars.read_range(self.shard_path(shard), first, end)
        except EOFError:
            self.tar_was_found()
            raise
        self.tar_was_found()
        return data

    def tar_was_found(self) -> None:
        """Records that a tar was found, so the address is right: from then on, `check_others_than` raises StorageError,
        not UnreachableError, if all tars are missing."""
        self._held.has_found_tar = True

    def sample_rows(self, shard: int) -> SampleRows:
        """Returns the columns of a shard's index that reading needs. Up to HELD_ROWS_BYTES of them stay in memory.
        Thread-safe."""
        return self._held.sample_rows.get(shard, lambda: self._read_rows(shard), lambda rows: rows.num_bytes)

    @property
    def _has_block_rows(self) -> bool:
        """Whether the rows of a block can be read without the whole index of its shard."""
        return ROWS_PATH in self.manifest.files

    def rows_of(self, first_sample_id: int, num_samples: int) -> SampleRows:
        """Returns the rows of consecutive samples of one shard. If the dataset has rows.bin, reads only the rows of the
        blocks with these samples, otherwise the shard's whole index. Thread-safe."""
        if not self._has_block_rows:
            shard = int(np.searchsorted(self.first_sample_ids, first_sample_id, side="right")) - 1
            row = first_sample_id - int(self.first_sample_ids[shard])
            return self.sample_rows(shard).slice(row, row + num_samples)
        ids = self.packed_ids(np.arange(first_sample_id, first_sample_id + num_samples))
        firsts = self.packed_blocks.first_sample_id
        of_block = np.searchsorted(firsts, ids, side="right") - 1
        blocks = np.unique(of_block)
        return SampleRows.joined(
            [self._block_rows(block).take(ids[of_block == block] - firsts[block]) for block in blocks.tolist()]
        )

    def read_together(self, sample_id: int) -> int:
        """Returns a number that is the same for two samples if one read returns the rows of both."""
        if not self._has_block_rows:
            return int(np.searchsorted(self.first_sample_ids, sample_id, side="right"))
        packed = self.packed_ids(np.array([sample_id], dtype=np.int64))[0]
        return self._rows_read(int(np.searchsorted(self.packed_blocks.first_sample_id, packed, side="right")) - 1)[0]

    def _block_rows(self, block: int) -> SampleRows:
        """Returns all rows of a block, checked."""
        blocks = self.packed_blocks
        begin, end = self._rows_read(block)
        data = self._held.block_rows.get(begin, lambda: self._read_block_rows(begin, end), len)
        edges = self._rows_edges(begin, end) - self._rows_edges(begin, begin)[0]
        own = memoryview(data)[edges[block - begin] : edges[block - begin + 1]]
        shard, num_samples = int(blocks.shard[block]), int(blocks.num_samples[block])
        with self.naming(ROWS_PATH):
            rows = read_block_rows(own, num_samples)
            record = replace(self.manifest.shards[shard], num_samples=num_samples)
            refuse_rows(rows, record, num_classes=self.num_classes)
        return rows

    def _rows_read(self, block: int) -> tuple[int, int]:
        """Returns the first and the end block of the read that contains a block's rows: blocks with up to 1,024 samples
        of a shard, or this block alone if those take more than _MOST_READ_BYTES."""
        shards = self.packed_blocks.shard
        first, last = (int(np.searchsorted(shards, shards[block], side=side)) for side in ("left", "right"))
        at_once = max(1, _SAMPLES_A_READ // self.manifest.samples_per_block)
        begin = block - (block - first) % at_once
        end = min(begin + at_once, last)
        edges = self._rows_edges(begin, end)
        return (begin, end) if edges[-1] - edges[0] <= _MOST_READ_BYTES else (block, block + 1)

    def _rows_edges(self, begin: int, end: int) -> NDArray[np.int64]:
        """Returns int64[end - begin + 1]: the offsets in rows.bin at which the rows of blocks begin..end-1 begin, and
        the end of the last."""
        ends = cast("NDArray[np.int64]", self.packed_blocks.rows_end)
        return np.concatenate([ends[begin - 1 : begin] if begin else [0], ends[begin:end]]).astype(np.int64)

    def _read_block_rows(self, begin: int, end: int) -> bytes:
        """Reads the rows of blocks begin..end-1 and compares them with the checksums in the block table. If they
        differ, reads them once more. Raises the same errors as `checked_file`."""
        edges, expected = self._rows_edges(begin, end), cast("NDArray[np.uint32]", self.packed_blocks.rows_crc32)
        for _ in range(2):
            try:
                data = self._files.read_range(ROWS_PATH, int(edges[0]), int(edges[-1]))
            except MissingObjectError as error:
                self._check_manifest()
                raise UserError(f"{error}, but the manifest lists it", todo=self._advice()) from None
            except EOFError:
                continue
            each = [data[first - edges[0] : last - edges[0]] for first, last in pairwise(edges.tolist())]
            if [crc32(one) for one in each] == expected[begin:end].tolist():
                return data
        what = f"bytes {edges[0]} to {edges[-1]} are not those that {BLOCKS_PATH} has the checksums of"
        raise InvalidDataError(f"{self.url}/{ROWS_PATH} is damaged: {what}", todo=self._advice())

    def _read_rows(self, shard: int) -> SampleRows:
        with self.naming(index_path(shard)):
            rows = read_sample_rows(self.checked_file(index_path(shard)))
            refuse_rows(rows, self.manifest.shards[shard], num_classes=self.num_classes)
        return rows

    def source_of(self, shard: int, row: int) -> str:
        """Reads where a sample came from. This is needed only for damaged samples, so it reads the index again. The
        sources of the last shard stay in memory, because more of its samples may be damaged."""
        number, sources = self._held.sources
        if number != shard:
            with self.naming(index_path(shard)):
                sources = read_sources(self.checked_file(index_path(shard)))
                refuse_count(len(sources), self.manifest.shards[shard])
            self._held.sources = shard, sources
        return sources[self.packed_row(shard, row)]

    def check_others_than(self, shard: int) -> None:
        """Raises StorageError if the tars of other shards are missing too, so that an unmounted folder is not mistaken
        for damaged samples. Raises UnreachableError instead if no tar was ever found. A shard for which others were
        found is not checked again."""
        if shard in self._held.missing_tars:
            return
        step = max(1, len(self.manifest.shards) // _OTHER_TARS)
        others = [other for other in range(0, len(self.manifest.shards), step) if other != shard]
        if not any(self._has_tar(other) for other in others):
            kind = StorageError if self._held.has_found_tar else UnreachableError
            todo = f"is the storage mounted? Try again once it is; {self._advice()}"
            if self.manifest.shards_url:
                todo = f"is shards_url in {self.url}/{MANIFEST_PATH} right, and {todo}"
            tar = printable_name(f"{self.shard_store.url}/{self.shard_path(shard)}")
            raise kind(
                f"{tar} is not there, nor is any of {len(others)} other tars of {self.url} that were looked for; {todo}"
            )
        self._held.missing_tars.add(shard)

    def _has_tar(self, shard: int) -> bool:
        try:
            self.read_shard(shard, 0, 1)
        except MissingObjectError:
            return False
        except EOFError:  # the tar is empty
            return True
        return True

    def checked_file(self, path: str) -> bytes:
        """Returns a file of the dataset after comparing its sha256 with the manifest's. If they differ, reads it once
        more.

        Raises InvalidDataError if the sha256 differs again, UserError if the file is missing, and StorageError if the
        manifest is missing too.
        """
        for _ in range(2):
            try:
                data = self._files.read(path)
            except MissingObjectError as error:
                self._check_manifest()
                raise UserError(f"{error}, but the manifest lists it", todo=self._advice()) from None
            if sha256_hex(data) == self.manifest.files.get(path):
                return data
        raise InvalidDataError(f"{self.url}/{path} is damaged: its sha256 is not the manifest's", todo=self._advice())

    @contextmanager
    def naming(self, path: str) -> Iterator[None]:
        """Turns a ValueError about the contents of a file into an InvalidDataError that names the file."""
        try:
            yield
        except ValueError as error:
            raise InvalidDataError(f"{self.url}/{path} cannot be right: {error}", todo=self._advice()) from error

    def _check_manifest(self) -> None:
        try:
            self._files.read(MANIFEST_PATH)
        except MissingObjectError as error:
            todo = "is the storage mounted? Try again once it is"
            raise StorageError(f"{error} any more, which was there when the dataset was opened", todo=todo) from None

    def _advice(self) -> str:
        return f"see what else is wrong with: patchline verify {self.url}"


def open_dataset(url: str, *, ranks: LocalRanks | None = None) -> Dataset:
    """Opens the dataset at a folder or `s3://bucket/prefix`. Raises UserError if there is no complete dataset, and
    InvalidDataError if its manifest has impossible values. `ranks`: the ranks of this host that also open it; one of
    them reads the tables for all."""
    store = open_store(url)
    if ranks is None or ranks.num_ranks == 1:
        manifest, fingerprint = _read_manifest(store, url)
    else:
        table = one_copy(ranks, f"{MANIFEST_PATH} at {store.url}", lambda: _manifest_table(store, url))
        manifest, fingerprint = manifest_from(table), table.schema.metadata[_FINGERPRINT].decode()
    try:
        return Dataset(store, manifest, fingerprint=fingerprint, ranks=ranks)
    except UserError as error:
        raise InvalidDataError(f"{store.url}/{MANIFEST_PATH} names impossible shards_url: {error}") from error


def _manifest_table(store: Store, url: str) -> pa.Table:
    manifest, fingerprint = _read_manifest(store, url)
    table = table_of(manifest)
    return table.replace_schema_metadata({**table.schema.metadata, _FINGERPRINT: fingerprint.encode()})


def _read_manifest(store: Store, url: str) -> tuple[Manifest, str]:
    """Reads the manifest and its fingerprint."""
    try:
        return read_manifest(store)
    except MissingObjectError as error:
        if error.path == MANIFEST_PATH:
            raise no_dataset(url) from None
        what = f"{error}, but {store.url}/{MANIFEST_PATH} names it"
        raise InvalidDataError(what, todo="restore it, or pack it again") from None
    except ValueError as error:
        raise InvalidDataError(f"{store.url}/{MANIFEST_PATH} cannot be read: {error}", todo="pack it again") from error
