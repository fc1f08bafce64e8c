"""Planned reads: the bytes of a rank's batches, read block by block, one window ahead.

Each lane holds its current window and the next one (shards/reading/windows.py has the bound in bytes). The first
batches after a start read single samples by their offset while the windows are still being read, so the time to the
first batch grows neither with the window nor with the position in the epoch.
"""

from collections.abc import Iterator
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from shards.dataset import Dataset
from shards.order import SampleOrder, WindowId
from shards.pool import Pool
from shards.reading.samples import (
    RawSample,
    faulty,
    locate_row,
    read_sample,
    read_slice,
    refetched,
    sample_of,
    too_large,
    verified,
)
from shards.reading.windows import (
    SINGLE_READS_SHARE,
    Fetched,
    HeldBytes,
    Window,
    largest_blocks_bytes,
    window_bound_bytes,
)
from shards.sample_rows import SampleRows
from shards.storage.ranges import StreamStore

__all__ = [
    "RawBatch",
    "RawSample",
    "SampleReader",
    "locate_row",
    "read_sample",
    "read_slice",
    "refetched",
    "verified",
    "window_bound_bytes",
]

FIRST_READS = 8  # a lane's first batches read what has not arrived sample by sample; later ones wait for it
_WINDOWS_A_LANE = 2


@dataclass(frozen=True, kw_only=True)
class RawBatch:
    """A rank's samples of one batch, in its order, with the epoch that each belongs to (int64[n])."""

    samples: tuple[RawSample, ...]
    epochs: NDArray[np.int64]


@dataclass(kw_only=True)
class _Lane:
    """The windows of one lane group: those held, and the bytes of passed ones that batches may still refer to."""

    windows: dict[WindowId, Window] = field(default_factory=dict)  # in the order in which they are read
    passed: list[HeldBytes] = field(default_factory=list)
    num_reads: int = 0

    def pass_before(self, name: WindowId) -> None:
        """Drops the windows before this one."""
        while self.windows:
            earliest = next(iter(self.windows))
            if (earliest.epoch, earliest.window) >= (name.epoch, name.window):
                return
            window = self.windows.pop(earliest)
            window.drop()
            self.passed.append(window.held)

    def has_room(self) -> bool:
        """Whether another window may be begun."""
        self.passed = [held for held in self.passed if held.now]
        return len(self.windows) + len(self.passed) < _WINDOWS_A_LANE


@dataclass(kw_only=True, slots=True)
class _Wanted:
    """What a batch takes of one window: entries of the batch and, rising, the samples' numbers in the window."""

    lane: _Lane
    name: WindowId
    window: Window | None  # None: it has not been begun
    entries: list[int]
    places: list[int]


@dataclass(kw_only=True, slots=True)
class _Found:
    """A sample and its row of the index; `fetched` None: it must not be read, for its `fault`."""

    sample_id: int
    rows: SampleRows
    row: int
    fetched: Fetched | None
    fault: str = ""


class SampleReader:
    """Reads samples at positions of the order, for one stream (shards/reading/stream_reader.py makes and closes it).

    From call to call the positions of every lane rise; one reader belongs to one thread. What it holds is bounded by
    `window_bound_bytes`: two windows a lane, the bytes of batches that the caller has not dropped yet included.
    A sample larger than `most_sample_bytes` is handed over as a fault.

    `tars` reads the shards; `loaders` run what waits for index files and for samples that are read again.
    """

    def __init__(
        self, dataset: Dataset, order: SampleOrder, *, tars: StreamStore, loaders: Pool, most_sample_bytes: int
    ) -> None:
        self.dataset, self.order, self.most_sample_bytes = dataset, order, most_sample_bytes
        self._tars, self._loaders = tars, loaders
        self._held = HeldBytes()
        self._singles = HeldBytes(self._held)
        self._lanes: dict[int, _Lane] = {}
        self._allowed = (0, 0)  # lanes, and what single reads may hold with as many

    @property
    def held_bytes(self) -> int:
        """Bytes that are being read, held, or in batches that are still referred to."""
        return self._held.now

    def drop(self) -> None:
        """Drops all windows."""
        for lane in list(self._lanes.values()):  # copies: the thread that reads may not have noticed yet
            for window in list(lane.windows.values()):
                window.drop()

    def read(self, positions: NDArray[np.int64]) -> RawBatch:
        """The samples at `positions`, in that order.

        A sample whose bytes are unavailable carries the reason as its `fault`. Raises what an unreachable store raises.
        """
        asked = self._ask(positions)
        found = self._ask_for_singles(asked)
        for wanted in asked:
            self._begin_needed(wanted, found)
        found |= {entry: sample for wanted in asked for entry, sample in self._of_windows(wanted, found)}
        samples = self._samples([found[entry] for entry in range(positions.size)])
        for wanted in asked:
            if wanted.window:
                wanted.window.hand_over(wanted.places)
        for wanted in {id(wanted.lane): wanted for wanted in asked}.values():  # the last of each lane
            self._move_on(wanted)
        return RawBatch(samples=samples, epochs=positions // self.order.num_samples)

    def _ask(self, positions: NDArray[np.int64]) -> list[_Wanted]:
        asked = []
        touched = set()
        for name, entries, places in self.order.locate(positions):
            group = int(positions[entries[0]]) % self.order.lanes
            lane = self._lanes.setdefault(group, _Lane())
            if group not in touched:
                touched.add(group)
                lane.num_reads += 1
                lane.pass_before(name)
            window = lane.windows.get(name)
            asked.append(_Wanted(lane=lane, name=name, window=window, entries=entries.tolist(), places=places.tolist()))
        return asked

    def _ask_for_singles(self, asked: list[_Wanted]) -> dict[int, _Found]:
        """Entry -> sample, for a lane's first batches: samples whose block has not arrived, all requested at once."""
        missing: list[tuple[int, int]] = []
        for wanted in asked:
            if wanted.lane.num_reads <= FIRST_READS:
                window = wanted.window
                ids = self.order.window_samples(wanted.name)[wanted.places].tolist()
                each = zip(wanted.entries, wanted.places, ids, strict=True)
                missing += [(entry, number) for entry, place, number in each if not (window and window.arrived(place))]
        if not missing:
            return {}
        groups: dict[int, list[tuple[int, int]]] = {}
        for entry, number in missing:
            groups.setdefault(self.dataset.read_together(number), []).append((entry, number))
        loads = {
            self._loaders.submit(partial(self._rows_of_each, [number for _, number in group]), urgent=True): group
            for group in groups.values()
        }
        allowed = self._allowed_singles()
        found = {}
        for load in as_completed(loads):  # no sample waits for the rows of another shard
            for (entry, number), rows in zip(loads[load], load.result(), strict=True):
                sample = self._ask_for_single(number, rows, allowed=allowed)
                if sample is not None:
                    found[entry] = sample
        return found

    def _rows_of_each(self, numbers: list[int]) -> list[SampleRows]:
        return [self.dataset.rows_of(number, 1) for number in numbers]

    def _allowed_singles(self) -> int:
        """Bytes that single reads may hold: a share of two windows of each lane seen so far."""
        if self._allowed[0] != len(self._lanes):
            num_blocks = _WINDOWS_A_LANE * self.order.window_blocks * len(self._lanes)
            of_windows = largest_blocks_bytes(self.dataset.blocks, num_blocks, epochs=2)
            self._allowed = len(self._lanes), of_windows // SINGLE_READS_SHARE
        return self._allowed[1]

    def _ask_for_single(self, number: int, rows: SampleRows, *, allowed: int) -> _Found | None:
        """Requests a single sample; None if it would exceed what single reads may hold: it has to wait for its
        block."""
        if fault := too_large(rows, 0, most_bytes=self.most_sample_bytes):
            return _Found(sample_id=number, rows=rows, row=0, fetched=None, fault=fault)
        first, end = int(rows.offset[0]), int(rows.offset[0] + rows.size[0])
        if self._singles.now + end - first > allowed:
            return None
        shard, _ = locate_row(self.dataset, number)
        fetched = self._singles.fetch(self._tars, self.dataset.shard_path(shard), first, end, urgent=True)
        return _Found(sample_id=number, rows=rows, row=0, fetched=fetched)

    def _begin_needed(self, wanted: _Wanted, singles: dict[int, _Found]) -> None:
        """Begins a window that this batch needs or, if the batch is read singly, one of the next batches."""
        if wanted.window:
            return
        waits = any(entry not in singles for entry in wanted.entries)
        if not waits and not wanted.lane.has_room():
            return
        first = wanted.places[0] if waits else wanted.places[-1] + 1
        if first < self.order.window_samples(wanted.name).size:
            wanted.window = self._begin(wanted.lane, wanted.name, first=first)

    def _begin(self, lane: _Lane, name: WindowId, *, first: int) -> Window:
        window = Window(name=name, first=first, held=HeldBytes(self._held))
        lane.windows[name] = window
        load = partial(window.load, self.dataset, self.order, self._tars)
        self._loaders.submit(load).add_done_callback(window.over)
        return window

    def _of_windows(self, wanted: _Wanted, singles: dict[int, _Found]) -> Iterator[tuple[int, _Found]]:
        waiting = [both for both in zip(wanted.entries, wanted.places, strict=True) if both[0] not in singles]
        if not waiting or not wanted.window:  # a window that something waits for has been begun
            return
        contents = wanted.window.contents.result()
        for entry, place in waiting:
            of_block, row = contents.slices[contents.slice_of[place]], int(contents.row[place])
            fault = too_large(of_block.rows, row, most_bytes=self.most_sample_bytes)
            number, fetched = int(contents.ids[place]), of_block.fetched
            yield entry, _Found(sample_id=number, rows=of_block.rows, row=row, fetched=fetched, fault=fault)

    def _samples(self, found: list[_Found]) -> tuple[RawSample, ...]:
        """Waits for the bytes. Samples that a block's read did not bring are read again, one by one."""
        samples, again = [], []
        for entry, item in enumerate(found):
            data = item.fetched.sample(item.rows, item.row) if item.fetched and not item.fault else None
            sample = sample_of(item.rows, item.row, sample_id=item.sample_id, data=data)
            if item.fault:
                sample = faulty(self.dataset, sample, item.fault)
            elif data is None:
                again.append(entry)
            samples.append(sample)
        if any(sample.data for sample in samples):
            self.dataset.tar_was_found()
        mended = [
            self._loaders.submit(partial(refetched, self.dataset, samples[entry]), urgent=True) for entry in again
        ]
        for entry, mending in zip(again, mended, strict=True):
            samples[entry] = mending.result()
        return tuple(samples)

    def _move_on(self, wanted: _Wanted) -> None:
        """Drops windows that are passed, and begins the next one if the lane has room for it."""
        lane, name, first = wanted.lane, wanted.name, wanted.places[-1] + 1
        if first == self.order.window_samples(name).size:
            name, first = self.order.next_window(name), 0
            lane.pass_before(name)
        while len(lane.windows) < _WINDOWS_A_LANE and lane.has_room():
            while name in lane.windows:  # only as far as needed: the order of the next epoch takes a while
                name, first = self.order.next_window(name), 0
            self._begin(lane, name, first=first)
