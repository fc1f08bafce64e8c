"""Planned reads: the bytes of a rank's batches, read block by block, one window ahead.

Each lane holds its current window and the next one (shards/reading/windows.py has the bound in bytes). The first
batches after a start read single samples by their offset while the windows are still being read, so the time to the
first batch grows neither with the window nor with the position in the epoch.

A StreamReader has all that one stream of batches reads in the background: it is opened by one call, and closed by one.
"""

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shards.config import ReadConfig
from shards.dataset import Dataset
from shards.images.config import MAX_IMAGE_BYTES
from shards.order import SampleOrder, WindowId
from shards.pool import Pool, close_all
from shards.reading.samples import RawSample, faulty, locate_row, refetched, sample_of, too_large
from shards.reading.windows import (
    PLACED,
    SINGLE_READS_SHARE,
    HeldBytes,
    LoadedSlice,
    ReadPiece,
    Window,
    as_matrix,
    largest_blocks_bytes,
    placed,
)
from shards.sample_rows import SampleRows
from shards.storage.objects import TrafficCounts
from shards.storage.ranges import RangeReads, StreamStore

FIRST_READS = 8  # batches of a lane that read missing samples one by one; later batches wait for their blocks
_WINDOWS_A_LANE = 2
TRAFFIC_NAMES = tuple(field.name for field in fields(TrafficCounts))


@dataclass(frozen=True, kw_only=True)
class RawBatch:
    """A rank's samples of one batch, in its order, as arrays: PLACED[n]; in int64[n] the epoch that each belongs to;
    and in uint64[n] the address of its bytes, which this object keeps in memory, or 0 if they are not there.

    `pieces`: the ranges that were read, by number. `exceptions`: by place, the samples that were read again or may not
    be read.
    """

    table: NDArray[Any]
    epochs: NDArray[np.int64]
    addresses: NDArray[np.uint64]
    pieces: Mapping[int, ReadPiece]
    exceptions: Mapping[int, RawSample]

    def sample(self, place: int) -> RawSample:
        """Returns the sample at this place. If its bytes are unavailable, its `fault` says why."""
        if place in self.exceptions:
            return self.exceptions[place]
        row = self.table[place]
        piece, begin = self.pieces[int(row["piece"])], int(row["begin"])
        data = piece.body.data[begin : begin + int(row["size"])] if self.addresses[place] else None
        return sample_of(piece.rows, int(row["row"]), sample_id=int(row["sample_id"]), data=data)

    @property
    def samples(self) -> tuple[RawSample, ...]:
        """All samples."""
        return tuple(map(self.sample, range(self.table.size)))

    def labels_of(self, place: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Returns the labels of a sample, and their weights: one per label, or none."""
        row = self.table[place]
        rows, number = self.pieces[int(row["piece"])].rows, int(row["row"])
        return rows.labels_of(number), rows.weights_of(number)


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
        """Says whether another window may be begun."""
        self.passed = [held for held in self.passed if held.now]
        return len(self.windows) + len(self.passed) < _WINDOWS_A_LANE


@dataclass(kw_only=True, slots=True)
class _Wanted:
    """The part of a batch that one window has: entries of the batch and, rising, the samples' numbers in the window."""

    lane: _Lane
    name: WindowId
    window: Window | None  # None: it has not been begun
    entries: NDArray[np.int64]
    places: NDArray[np.int64]


@dataclass(kw_only=True)
class _Gathered:
    """The samples of a batch, in the order in which they were found: rows of PLACED and their entries of the batch."""

    rows: list[NDArray[np.int64]] = field(default_factory=list)
    entries: list[NDArray[np.int64]] = field(default_factory=list)
    pieces: dict[int, ReadPiece] = field(default_factory=dict)
    first_pieces: list[int] = field(default_factory=list)  # what the pieces of `rows` count from
    num_pieces: int = 0

    def add_single(self, entry: int, number: int, single: LoadedSlice) -> None:
        """Waits for a sample that is read singly, and adds it."""
        row = placed(single.rows, np.zeros(1, dtype=np.int64), first_sample_id=number)
        row["begin"] = 0
        self.add(np.array([entry]), as_matrix(row), [single])

    def add(self, entries: NDArray[np.int64], rows: NDArray[np.int64], slices: Sequence[LoadedSlice]) -> None:
        """Waits for samples, whose pieces are these slices, and adds them."""
        first = self.num_pieces
        for number in set(rows[:, 0].tolist()):
            self.pieces[first + number] = slices[number].wait()
        self.entries.append(entries)
        self.rows.append(rows)
        self.first_pieces.append(first)
        self.num_pieces += len(slices)

    def table(self) -> NDArray[Any]:
        """Returns PLACED[n], in the order of the batch."""
        if not self.rows:
            return np.empty(0, dtype=PLACED)
        rows = np.concatenate(self.rows)
        rows[:, 0] += np.repeat(self.first_pieces, [entries.size for entries in self.entries])
        in_order = np.empty_like(rows)
        in_order[np.concatenate(self.entries)] = rows
        return in_order.view(PLACED)[:, 0]


def _gather(gathered: _Gathered, wanted: _Wanted, singles: Collection[int]) -> None:
    """Adds the samples that a batch takes of a window, but not those that are read singly."""
    entries, places = wanted.entries, wanted.places
    if singles:
        waits = np.array([entry not in singles for entry in entries.tolist()])
        entries, places = entries[waits], places[waits]
    if entries.size and wanted.window:  # a window that something waits for has been begun
        contents = wanted.window.wait()
        gathered.add(entries, contents.rows_of(places), contents.slices)


class SampleReader:
    """Reads samples at positions of the order, for one stream (StreamReader makes and closes it).

    From call to call the positions of every lane rise; one reader belongs to one thread. The bytes that it holds are
    bounded by `window_bound_bytes`: two windows a lane, including the bytes of batches that the caller has not dropped
    yet. Memory of up to four blocks, kept for the next ones, comes on top (ReusedMemory in shards/storage/ranges.py). A
    sample larger than `most_sample_bytes` is handed over as a fault.

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
        """The bytes that are being read, held, or in batches that are still referred to."""
        return self._held.now

    def drop(self) -> None:
        """Drops all windows."""
        for lane in list(self._lanes.values()):  # copies: the thread that reads may not have noticed yet
            for window in list(lane.windows.values()):
                window.drop()

    def read(self, positions: NDArray[np.int64]) -> RawBatch:
        """Returns the samples at `positions`, in that order.

        If the bytes of a sample are unavailable, its `fault` says why. Raises the errors of an unreachable store.
        """
        asked = self._ask(positions)
        singles = self._ask_for_singles(asked)
        for wanted in asked:
            self._begin_needed(wanted, singles)
        gathered = _Gathered()
        for entry, (number, single) in singles.items():
            gathered.add_single(entry, number, single)
        for wanted in asked:
            _gather(gathered, wanted, singles)
        batch = self._checked(gathered, epochs=positions // self.order.num_samples)
        for wanted in asked:
            if wanted.window:
                wanted.window.hand_over(wanted.places)
        for wanted in {id(wanted.lane): wanted for wanted in asked}.values():  # the last of each lane
            self._move_on(wanted)
        return batch

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
            asked.append(_Wanted(lane=lane, name=name, window=window, entries=entries, places=places))
        return asked

    def _ask_for_singles(self, asked: list[_Wanted]) -> dict[int, tuple[int, LoadedSlice]]:
        """Requests samples whose block has not arrived, for a lane's first batches, all at once. Returns the id and the
        slice of each by its entry."""
        missing: list[tuple[int, int]] = []
        for wanted in asked:
            if wanted.lane.num_reads <= FIRST_READS:
                window, places = wanted.window, wanted.places.tolist()
                ids = self.order.window_samples(wanted.name)[places].tolist()
                each = zip(wanted.entries.tolist(), places, ids, strict=True)
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
                single = self._ask_for_single(number, rows, allowed=allowed)
                if single is not None:
                    found[entry] = number, single
        return found

    def _rows_of_each(self, numbers: list[int]) -> list[SampleRows]:
        return [self.dataset.rows_of(number, 1) for number in numbers]

    def _allowed_singles(self) -> int:
        """Returns the bytes that single reads may hold: a share of two windows of each lane seen so far."""
        if self._allowed[0] != len(self._lanes):
            num_blocks = _WINDOWS_A_LANE * self.order.window_blocks * len(self._lanes)
            of_windows = largest_blocks_bytes(self.dataset.blocks, num_blocks, epochs=2)
            self._allowed = len(self._lanes), of_windows // SINGLE_READS_SHARE
        return self._allowed[1]

    def _ask_for_single(self, number: int, rows: SampleRows, *, allowed: int) -> LoadedSlice | None:
        """Requests a single sample, unless it is too large to be read. Returns None if it would exceed what single
        reads may hold: then it has to wait for its block."""
        shard, _ = locate_row(self.dataset, number)
        single = LoadedSlice(path=self.dataset.shard_path(shard), rows=rows, fetched=None, num_left=1)
        first, size = int(rows.offset[0]), int(rows.size[0])
        if size > self.most_sample_bytes:
            return single
        if self._singles.now + size > allowed:
            return None
        single.fetched = self._singles.fetch(self._tars, single.path, first, first + size, urgent=True)
        return single

    def _begin_needed(self, wanted: _Wanted, singles: Collection[int]) -> None:
        """Begins a window that this batch waits for. Samples that are read singly come first, and the windows of the
        next batches after it (`_move_on`)."""
        if not wanted.window and any(entry not in singles for entry in wanted.entries.tolist()):
            wanted.window = self._begin(wanted.lane, wanted.name, first=int(wanted.places[0]))

    def _begin(self, lane: _Lane, name: WindowId, *, first: int) -> Window:
        window = Window(name=name, size=self.order.window_size(name), first=first, held=HeldBytes(self._held))
        lane.windows[name] = window
        load = partial(window.load, self.dataset, self.order, self._tars)
        self._loaders.submit(load).add_done_callback(window.over)
        return window

    def _checked(self, gathered: "_Gathered", *, epochs: NDArray[np.int64]) -> RawBatch:
        """Returns the batch with an address for each sample that lies within the bytes of its piece. The others are
        read again, one by one, unless they are too large."""
        table, pieces = gathered.table(), gathered.pieces
        bodies = [pieces[number].body for number in table["piece"].tolist()]
        begin, size = table["begin"], table["size"]
        is_there = (begin >= 0) & (size > 0) & (begin + size <= [len(body.data) for body in bodies])
        is_too_large = size > self.most_sample_bytes
        addresses = np.where(is_there & ~is_too_large, begin + [body.address for body in bodies], 0).astype(np.uint64)
        exceptions = dict[int, RawSample]()
        batch = RawBatch(table=table, epochs=epochs, addresses=addresses, pieces=pieces, exceptions=exceptions)
        if addresses.any():
            self.dataset.tar_was_found()
        again: dict[int, Future[RawSample]] = {}
        for place in np.flatnonzero(addresses == 0).tolist():
            sample = batch.sample(place)
            if is_too_large[place]:
                fault = too_large(int(size[place]), most_bytes=self.most_sample_bytes)
                exceptions[place] = faulty(self.dataset, sample, fault)
            else:
                again[place] = self._loaders.submit(partial(refetched, self.dataset, sample), urgent=True)
        exceptions |= {place: mending.result() for place, mending in again.items()}
        return batch

    def _move_on(self, wanted: _Wanted) -> None:
        """Drops windows that are passed, and begins the next one if the lane has room for it."""
        lane, name, first = wanted.lane, wanted.name, int(wanted.places[-1]) + 1
        if first == (wanted.window.size if wanted.window else self.order.window_size(name)):
            name, first = self.order.next_window(name), 0
            lane.pass_before(name)
        while len(lane.windows) < _WINDOWS_A_LANE and lane.has_room():
            while name in lane.windows:  # only as far as needed: the order of the next epoch takes a while
                name, first = self.order.next_window(name), 0
            self._begin(lane, name, first=first)


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
        """Whether it has stopped reading."""
        return self._loaders.is_closed

    @property
    def held_bytes(self) -> int:
        """The bytes that are being read, held, or in batches that are still referred to."""
        return sum(reader.held_bytes for reader in self._readers)

    def counts(self) -> dict[str, float]:
        """Returns the counts by name of TRAFFIC_NAMES: what this stream read and retried so far, index files
        included."""
        return {name: float(value) for name, value in asdict(self._reads.traffic.counts()).items()}

    def dataset(self, dataset: Dataset) -> Dataset:
        """Returns the dataset as this stream reads it."""
        return dataset.read_by(self._reads)

    def samples(
        self, dataset: Dataset, order: SampleOrder, *, most_sample_bytes: int = MAX_IMAGE_BYTES
    ) -> SampleReader:
        """Returns a reader of the dataset's samples in this order; a sample larger than `most_sample_bytes` is a
        fault."""
        tars = self._reads.of(dataset.shard_store)
        reader = SampleReader(
            self.dataset(dataset), order, tars=tars, loaders=self._loaders, most_sample_bytes=most_sample_bytes
        )
        self._readers.append(reader)
        return reader

    def pool(self, limit: int, *, name: str) -> Pool:
        """Returns threads for the stream's other work, which are closed with it."""
        pool = Pool(limit, name=name)
        self._pools.append(pool)
        return pool

    def close(self) -> None:
        """Stops reads and threads within about a second. The thread of a stalled read ends when the read times out."""
        if sys.is_finalizing() or os.getpid() != self._process:
            return  # it closes at exit, or is the parent's: a thread that is gone may hold a lock
        close_all(self._pools)
        for reader in self._readers:
            reader.drop()
