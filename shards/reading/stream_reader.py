"""All that one stream of batches reads in the background: opened by one call, closed by one call."""

import os
import sys
from dataclasses import asdict, fields

from shards.config import ReadConfig
from shards.dataset import Dataset
from shards.images.config import MAX_IMAGE_BYTES
from shards.order import SampleOrder
from shards.pool import Pool, close_all
from shards.reading.read import SampleReader
from shards.storage.ranges import RangeReads
from shards.storage.traffic import TrafficCounts

TRAFFIC_NAMES = tuple(field.name for field in fields(TrafficCounts))


class StreamReader:
    """Reads one or several datasets for one stream, and owns the stream's connections, threads and counters.

    Close it when done: whoever waits for anything of it then gets a CancelledError at once.
    """

    def __init__(self, config: ReadConfig) -> None:
        self._reads = RangeReads(config)
        # They wait for index files and for samples that are read again; half of them for what a batch waits for.
        self._loaders = Pool(config.connections, name="rows", reserve=config.connections)
        self._pools = [*self._reads.pools, self._loaders]
        self._readers: list[SampleReader] = []
        self._process = os.getpid()

    @property
    def is_closed(self) -> bool:
        """Whether it reads nothing any more."""
        return self._loaders.is_closed

    @property
    def held_bytes(self) -> int:
        """Bytes that are being read, held, or in batches that are still referred to."""
        return sum(reader.held_bytes for reader in self._readers)

    def counts(self) -> dict[str, float]:
        """The counts by name of TRAFFIC_NAMES: what this stream read and retried so far, index files included."""
        return {name: float(value) for name, value in asdict(self._reads.traffic.counts()).items()}

    def dataset(self, dataset: Dataset) -> Dataset:
        """The dataset as this stream reads it."""
        return dataset.read_by(self._reads)

    def samples(
        self, dataset: Dataset, order: SampleOrder, *, most_sample_bytes: int = MAX_IMAGE_BYTES
    ) -> SampleReader:
        """Reads the dataset's samples in this order; a sample larger than `most_sample_bytes` is a fault."""
        tars = self._reads.of(dataset.shard_store)
        reader = SampleReader(
            self.dataset(dataset), order, tars=tars, loaders=self._loaders, most_sample_bytes=most_sample_bytes
        )
        self._readers.append(reader)
        return reader

    def pool(self, limit: int, *, name: str) -> Pool:
        """Threads for the stream's other work, which are closed with it."""
        pool = Pool(limit, name=name)
        self._pools.append(pool)
        return pool

    def close(self) -> None:
        """Stops reads and threads within about a second. The thread of a stalled read ends when the read times out."""
        if sys.is_finalizing() or os.getpid() != self._process:
            return  # closed at exit, or the parent's: a lock may be held by a thread that is no more
        close_all(self._pools)
        for reader in self._readers:
            reader.drop()
