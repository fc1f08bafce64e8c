"""Planned reads: the bytes of a rank's batches, as large range reads of whole windows, one window ahead.

A window (W blocks of one lane) is fetched once and dropped when its lane has moved on, so there is no cache to size or
to evict. Held are the windows that a batch touches and the one after each: 2 a lane as a rule, 3 where a batch goes
from one window to the next, more where a lane's share of the batch is larger than a window. The first batches after a
start read single samples by their offset while the windows are still on their way, so the time to the first batch does
not grow with the window.
"""

import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shards.dataset import Dataset
from shards.errors import WillNotSucceedError
from shards.order import BlockPart, SampleOrder, WindowId
from shards.storage.objects import MissingObjectError


@dataclass(frozen=True, kw_only=True)
class RawSample:
    """One sample as it lies in the shard. `data` is None where `fault` says why the bytes could not be had."""

    sample_id: int
    data: bytes | None
    fault: str
    height: int  # pixels as stored, from the index
    width: int
    orientation: int  # as in EXIF, from the index: 1 to 8, 1 is upright
    labels: tuple[int, ...]
    source: str


@dataclass(frozen=True, kw_only=True)
class RawBatch:
    """A rank's samples of one step, in batch order, with the epoch that each belongs to (int64[n])."""

    step: int
    samples: tuple[RawSample, ...]
    epochs: NDArray[np.int64]


def locate_row(dataset: Dataset, sample_id: int) -> tuple[int, int]:
    """(shard, row) of a sample id."""
    shard = int(np.searchsorted(dataset.first_sample_ids, sample_id, side="right")) - 1
    return shard, sample_id - int(dataset.first_sample_ids[shard])


def read_part(dataset: Dataset, part: BlockPart) -> list[bytes]:
    """The image bytes of consecutive samples of one block, by one range read.

    WillNotSucceedError where the shard's tar is missing or cut off.
    """
    shard, row = locate_row(dataset, part.first_sample_id)
    rows = dataset.shard_rows(shard)
    last = row + part.num_samples - 1
    begin, end = int(rows.offset[row]), int(rows.offset[last] + rows.size[last])
    path = dataset.shard_path(shard)
    try:
        body = memoryview(dataset.shard_store.read_range(path, begin, end))
    except (MissingObjectError, EOFError) as error:
        where = f"{dataset.url}/{path}: bytes {begin}..{end - 1} are not there ({error})"
        raise WillNotSucceedError(f"{where}; run: patchline verify {dataset.url}") from error
    starts = rows.offset[row : last + 1] - begin
    sizes = rows.size[row : last + 1]
    return [bytes(body[first : first + size]) for first, size in zip(starts.tolist(), sizes.tolist(), strict=True)]


def read_sample(dataset: Dataset, sample_id: int) -> bytes:
    """The image bytes of one sample, by its offset."""
    return read_part(dataset, BlockPart(block=-1, first_sample_id=sample_id, num_samples=1))[0]


def checked_sample(dataset: Dataset, sample_id: int, data: bytes) -> RawSample:
    """The sample with its row of the index; bytes whose crc32 is wrong are read once more before they are given up."""
    shard, row = locate_row(dataset, sample_id)
    rows = dataset.shard_rows(shard)
    expected, fault = int(rows.crc32[row]), ""
    if zlib.crc32(data) != expected:
        data = read_sample(dataset, sample_id)
        if zlib.crc32(data) != expected:
            fault = f"crc32 is {zlib.crc32(data):08x}, the index of {dataset.shard_path(shard)} says {expected:08x}"
    return RawSample(
        sample_id=sample_id,
        data=None if fault else data,
        fault=fault,
        height=int(rows.height[row]),
        width=int(rows.width[row]),
        orientation=int(rows.orientation[row]),
        labels=tuple(rows.labels[row]),
        source=rows.source[row],
    )


class _Window:
    """The bytes of one window, arriving in the background."""

    def __init__(self, dataset: Dataset, parts: tuple[BlockPart, ...], pool: ThreadPoolExecutor) -> None:
        self.futures: list[tuple[BlockPart, Future[list[bytes]]]] = [
            (part, pool.submit(read_part, dataset, part)) for part in parts
        ]

    def arrived(self) -> bool:
        return all(future.done() for _, future in self.futures)

    def sample(self, sample_id: int) -> bytes:
        for part, future in self.futures:
            if 0 <= sample_id - part.first_sample_id < part.num_samples:
                return future.result()[sample_id - part.first_sample_id]
        raise AssertionError(f"sample {sample_id} is not in its window")


class SampleReader:
    """Reads a rank's part of every global batch. Ask for steps in rising order; close it when done."""

    def __init__(
        self,
        dataset: Dataset,
        order: SampleOrder,
        *,
        batch_size: int,
        rank: int,
        num_ranks: int,
        num_threads: int,
    ) -> None:
        self.dataset, self.order = dataset, order
        self.batch_size, self.rank, self.num_ranks = batch_size, rank, num_ranks
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="read")
        self._windows: dict[WindowId, _Window] = {}

    def close(self) -> None:
        """Stops the background reads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def read(self, step: int) -> RawBatch:
        """The rank's samples of global batch `step`, checksums verified."""
        positions = self.order.positions(step, self.batch_size, self.rank, self.num_ranks)
        samples: list[RawSample | None] = [None] * positions.size
        found = self.order.locate(positions)
        first_use = {window for window, _, _ in found if window not in self._windows}
        self._hold([window for window, _, _ in found])
        for window, chosen, offsets in found:
            ids = self.order.window_samples(window)[offsets]
            loaded = self._windows[window]
            single = window in first_use and not loaded.arrived()
            for entry, sample_id in zip(chosen.tolist(), ids.tolist(), strict=True):
                data = read_sample(self.dataset, sample_id) if single else loaded.sample(sample_id)
                samples[entry] = checked_sample(self.dataset, sample_id, data)
        complete = tuple(sample for sample in samples if sample is not None)
        return RawBatch(step=step, samples=complete, epochs=positions // self.order.num_samples)

    def _hold(self, current: list[WindowId]) -> None:
        """Keeps exactly the windows in use and the next one of each lane; everything else is passed and dropped."""
        ahead = [self.order.next_window(window) for window in current]
        wanted = dict.fromkeys(current + ahead)
        for window in [held for held in self._windows if held not in wanted]:
            del self._windows[window]
        for window in wanted:
            if window not in self._windows:
                self._windows[window] = _Window(self.dataset, self.order.window_parts(window), self._pool)
