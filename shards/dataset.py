"""A packed dataset, opened for reading. Only what is small for any size is held: manifest, blocks, labels."""

import threading
from collections import OrderedDict
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shards.errors import UserError
from shards.index import (
    BlockTable,
    SampleRows,
    ShardRows,
    read_blocks,
    read_rows,
    read_sample_rows,
    read_sources,
    read_table,
)
from shards.manifest import (
    BLOCKS_PATH,
    LABELS_PATH,
    MANIFEST_PATH,
    Manifest,
    index_path,
    sha256_hex,
)
from shards.store import MissingObjectError, Store, open_store

HELD_SHARDS = 64
HELD_ROWS_BYTES = 128 << 20  # of what reading needs: 37 bytes a sample, so all of a dataset of 3 million samples


class Dataset:
    """One split. `fingerprint` is the sha256 of its manifest, which fixes every byte of it."""

    def __init__(self, store: Store, manifest: Manifest, *, fingerprint: str) -> None:
        self.store, self.manifest, self.fingerprint = store, manifest, fingerprint
        self.url = store.url
        self.shard_store = open_store(manifest.shards_url) if manifest.shards_url else store
        self.num_samples = manifest.num_samples
        self.num_classes = manifest.num_classes
        self.first_sample_ids: NDArray[np.int64] = np.array(
            [shard.first_sample_id for shard in manifest.shards], dtype=np.int64
        )
        self._rows: OrderedDict[int, ShardRows] = OrderedDict()
        self._sample_rows: OrderedDict[int, SampleRows] = OrderedDict()
        self._sample_rows_bytes = 0
        self._lock = threading.Lock()

    @cached_property
    def blocks(self) -> BlockTable:
        """Every block's place."""
        return read_blocks(self.checked_file(BLOCKS_PATH))

    @property
    def block_sizes(self) -> NDArray[np.int64]:
        """int64[num_blocks]: samples a block."""
        return self.blocks.num_samples

    @cached_property
    def label_names(self) -> tuple[str, ...]:
        """The name of each label id."""
        return tuple(read_table(self.checked_file(LABELS_PATH)).column("name").to_pylist())

    def shard_path(self, shard: int) -> str:
        """The tar's path below `shard_store`."""
        return self.manifest.shards[shard].path

    def shard_rows(self, shard: int) -> ShardRows:
        """The whole index of a shard. Threads may ask at once; the last HELD_SHARDS asked for are kept."""
        with self._lock:
            if shard in self._rows:
                self._rows.move_to_end(shard)
                return self._rows[shard]
        # Read outside the lock: two threads may read one index, none waits for another's shard.
        rows = read_rows(self.checked_file(index_path(shard)))
        with self._lock:
            self._rows[shard] = rows
            while len(self._rows) > HELD_SHARDS:
                self._rows.popitem(last=False)
        return rows

    def sample_rows(self, shard: int) -> SampleRows:
        """What reading needs of a shard's index. Threads may ask at once; HELD_ROWS_BYTES of it are kept."""
        with self._lock:
            if shard in self._sample_rows:
                self._sample_rows.move_to_end(shard)
                return self._sample_rows[shard]
        rows = read_sample_rows(self.checked_file(index_path(shard)))
        with self._lock:
            if shard not in self._sample_rows:
                self._sample_rows[shard] = rows
                self._sample_rows_bytes += rows.num_bytes
            while self._sample_rows_bytes > HELD_ROWS_BYTES and len(self._sample_rows) > 1:
                self._sample_rows_bytes -= self._sample_rows.popitem(last=False)[1].num_bytes
        return rows

    def source_of(self, shard: int, row: int) -> str:
        """Where a sample came from; the index is read anew: it is asked only where something is wrong with a sample."""
        return read_sources(self.checked_file(index_path(shard)))[row]

    def checked_file(self, path: str) -> bytes:
        """A file of the dataset whose sha256 is the manifest's; a UserError otherwise."""
        try:
            data = self.store.read(path)
        except MissingObjectError as error:
            raise UserError(f"{error}, but the manifest lists it; {self._advice()}") from None
        if sha256_hex(data) != self.manifest.files.get(path):
            raise UserError(f"{self.url}/{path} is damaged: its sha256 is not the manifest's; {self._advice()}")
        return data

    def _advice(self) -> str:
        return f"see what else is wrong with: patchline verify {self.url}"


def open_dataset(url: str) -> Dataset:
    """The dataset at a folder or `s3://bucket/prefix`. Raises UserError where none is complete."""
    store = open_store(url)
    try:
        data = store.read(MANIFEST_PATH)
    except MissingObjectError:
        message = f"{store.url} has no manifest.json, so it is no complete dataset"
        raise UserError(f"{message}; pack it with: patchline pack RECIPE --out {store.url}") from None
    try:
        manifest = Manifest.from_bytes(data)
    except ValueError as error:
        raise UserError(f"{store.url}/{MANIFEST_PATH} cannot be read: {error}; pack it again") from error
    return Dataset(store, manifest, fingerprint=sha256_hex(data))
