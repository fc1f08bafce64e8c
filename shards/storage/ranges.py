"""Byte ranges of a store's objects, read by a few connections in the background."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from shards.errors import UserError
from shards.storage.objects import Store
from shards.storage.traffic import TrafficCounts


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """`connections`: reads under way at once, a rank. `hedge_share`: second requests for slow reads, as a share of all
    requests (0: none)."""

    connections: int = 8
    hedge_share: float = 0.05

    def __post_init__(self) -> None:
        if self.connections < 1 or not 0 <= self.hedge_share <= 1:
            raise UserError(f"allowed are connections of 1 or more and a hedge_share of 0 to 1: {self}")


class RangeReads:
    """Reads of one store in the order they are asked for. Close it when done; reads not begun are dropped then."""

    def __init__(self, store: Store, config: ReadConfig) -> None:
        self.store, self.config = store, config
        self._pool = ThreadPoolExecutor(config.connections, thread_name_prefix="read")

    def submit(self, path: str, first: int, end: int) -> Future[bytes]:
        """Bytes first..end-1 of an object. The future raises what `Store.read_range` raises."""
        return self._pool.submit(self._read, path, first, end)

    def close(self) -> None:
        """Drops what has not begun and waits for what has."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, path: str, first: int, end: int) -> bytes:
        began = time.monotonic()
        data = self.store.read_range(path, first, end)
        self.store.traffic.add(TrafficCounts(requests=1, bytes=len(data), seconds=time.monotonic() - began))
        return data
