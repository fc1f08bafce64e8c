"""Reads the bytes of a rank's batches, block by block and one window ahead, in the planned order.

Each lane holds its current window and the next one (shards/reading/windows.py has the bound in bytes). The first
batches after a start read single samples by their offset while the windows are still being read, so the time to the
first batch grows neither with the window nor with the position in the epoch.

A StreamReader owns everything that one stream of batches reads in the background. One call opens it, and one closes it.
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
from shards.reading.samples import MOST_SLICE_BYTES, RawSample, faulty, locate_row, refetched, sample_of, too_large
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

FIRST_READS = 8  # the first batches of a lane read missing samples one by one; later ones wait for blocks
_WINDOWS_A_LANE = 2
TRAFFIC_NAMES = tuple(field.name for field in fields(TrafficCounts))


@dataclass(frozen=True, kw_only=True)
class RawBatch:
    """A rank's samples of one batch, in order. `table`: PLACED[n]. `epochs`: the epoch of each sample. `addresses`:
    uint64[n], the address of each sample's bytes, which this object keeps in memory, or 0 if they are unavailable.

    `pieces`: the ranges that were read, by their numbers. `exceptions`: by place in the batch, the samples that were
    read again or must not be read.
    """

    table: NDArray[Any]
    epochs: NDArray[np.int64]
    addresses: NDArray[np.uint64]
    pieces: Mapping[int, ReadPiece]
    exceptions: Mapping[int, RawSample]

    def sample(self, place: int) -> RawSample:
        """Returns the sample at this place of the batch. If its bytes are unavailable, its `fault` says why."""
        if place in self.exceptions:
            return self.exceptions[place]
        row = self.table[place]
        piece, begin = self.pieces[int(row["piece"])], int(row["begin"])
        data = piece.body.data[begin : begin + int(row["size"])] if self.addresses[place] else None
        return sample_of(piece.rows, int(row["row"]), sample_id=int(row["sample_id"]), data=data)

    @property
    def samples(self) -> tuple[RawSample, ...]:
        """All samples of the batch."""
        return tuple(map(self.sample, range(self.table.size)))

    def members_of(self, place: int) -> dict[str, memoryview] | None:
        """Returns the members of a sample by their suffixes, if the reader reads them. Returns None if they are not in
        the bytes that were read."""
        if not self.addresses[place]:
            return None
        row = self.table[place]
        body = self.pieces[int(row["piece"])].body
        places = body.members().get(int(row["begin"]))
        return None if places is None else {name: body.data[begin:end] for name, (begin, end) in places.items()}

    def labels_of(self, place: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Returns the labels of a sample and their weights: either one per label, or none."""
        row = self.table[place]
        rows, number = self.pieces[int(row["piece"])].rows, int(row["row"])
        return rows.labels_of(number), rows.weights_of(number)


@dataclass(kw_only=True)
class _Lane:
    """The windows of one lane: those held, and the bytes of earlier ones that batches may still refer to."""

    windows: dict[WindowId, Window] = field(default_factory=dict)  # in reading order
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
        """Returns whether the lane may begin another window."""
        self.passed = [held for held in self.passed if held.now]
        return len(self.windows) + len(self.passed) < _WINDOWS_A_LANE


@dataclass(kw_only=True, slots=True)
class _Wanted:
    """The samples of a batch that come from one window. `entries`: their places in the batch. `places`: their numbers
    in the window, in ascending order. `end`: the first place that later batches may want, once the batch is read."""

    lane: _Lane
    name: WindowId
    window: Window | None  # None: the window has not been begun
    entries: NDArray[np.int64]
    places: NDArray[np.int64]
    end: int = 0


@dataclass(kw_only=True)
class _Gathered:
    """Collects the samples of a batch. `rows`: rows of PLACED, in the order of adding. `entries`: their places in the
    batch."""

    rows: list[NDArray[np.int64]] = field(default_factory=list)
    entries: list[NDArray[np.int64]] = field(default_factory=list)
    pieces: dict[int, ReadPiece] = field(default_factory=dict)
    first_pieces: list[int] = field(default_factory=list)  # the number of the first piece, for each array in `rows`
    num_pieces: int = 0

    def add_single(self, entry: int, number: int, single: LoadedSlice) -> None:
        """Waits for a single read, and adds its sample."""
        row = placed(single.rows, np.zeros(1, dtype=np.int64), first_sample_id=number)
        row["begin"] -= single.begin
        self.add(np.array([entry]), as_matrix(row), [single])

    def add(self, entries: NDArray[np.int64], rows: NDArray[np.int64], slices: Sequence[LoadedSlice]) -> None:
        """Waits for samples and adds them. Column 0 of `rows` is the number of the sample's piece in `slices`."""
        first = self.num_pieces
        for number in set(rows[:, 0].tolist()):
            self.pieces[first + number] = slices[number].wait()
        self.entries.append(entries)
        self.rows.append(rows)
        self.first_pieces.append(first)
        self.num_pieces += len(slices)

    def table(self) -> NDArray[Any]:
        """Returns all samples as PLACED[n], in the order of the batch."""
        if not self.rows:
            return np.empty(0, dtype=PLACED)
        rows = np.concatenate(self.rows)
        rows[:, 0] += np.repeat(self.first_pieces, [entries.size for entries in self.entries])
        in_order = np.empty_like(rows)
        in_order[np.concatenate(self.entries)] = rows
        return in_order.view(PLACED)[:, 0]


def _gather(gathered: _Gathered, wanted: _Wanted, singles: Collection[int]) -> None:
    """Adds the samples that a batch takes from a window, except those that single reads get."""
    entries, places = wanted.entries, wanted.places
    if singles:
        waits = np.array([entry not in singles for entry in entries.tolist()])
        entries, places = entries[waits], places[waits]
    if entries.size and wanted.window:  # if samples are left, `_begin_needed` has begun the window
        contents = wanted.window.wait()
        gathered.add(entries, contents.rows_of(places), contents.slices)


class SampleReader:
    """Reads samples at positions of the order, for one stream. StreamReader creates and closes it.

    The positions of every lane must increase from call to call, and only one thread may use a reader.
    `window_bound_bytes` bounds the bytes that it holds: two windows per lane, including the bytes of batches that the
    caller has not dropped yet. The memory of up to four blocks that is kept for reuse is not counted (ReusedMemory in
    shards/storage/ranges.py). A sample larger than `most_sample_bytes` is returned with a fault.

    `tars` reads the shards. `with_members`: whether the other members of the samples are read, too. The threads of
    `loaders` wait for index files and for samples that are read again.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: SampleOrder,
        *,
        tars: StreamStore,
        loaders: Pool,
        most_sample_bytes: int,
        with_members: bool = False,
    ) -> None:
        self.dataset, self.order, self.most_sample_bytes = dataset, order, most_sample_bytes
        self.with_members = with_members
        self._tars, self._loaders = tars, loaders
        self._held = HeldBytes()
        self._singles = HeldBytes(self._held)
        self._lanes: dict[int, _Lane] = {}
        self._allowed = (0, 0)  # a number of lanes, and the bytes that single reads may then hold

    @property
    def held_bytes(self) -> int:
        """The bytes that are being read, that are held, or that live batches refer to."""
        return self._held.now

    def drop(self) -> None:
        """Drops all windows."""
        for lane in list(self._lanes.values()):  # a copy, because the reading thread may still change the dictionary
            for window in list(lane.windows.values()):
                window.drop()

    def read(self, positions: NDArray[np.int64], *, return_later: NDArray[np.bool_] | None = None) -> RawBatch:
        """Returns the samples at `positions`, in that order. `return_later`, bool[n]: whether the next call has the
        position again, which is possible for a lane's last one; None: none of them.

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
            returns = return_later is not None and bool(return_later[wanted.entries[-1]])
            done = wanted.places[:-1] if returns else wanted.places
            wanted.end = int(wanted.places[-1]) + (0 if returns else 1)
            if wanted.window and done.size:
                wanted.window.hand_over(done)
        for wanted in {id(wanted.lane): wanted for wanted in asked}.values():  # the last window of each lane
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
        """For a lane's first batches, requests at once all samples whose block has not arrived. Returns each sample's
        id and slice, by its place in the batch."""
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
        for load in as_completed(loads):  # so that no sample waits for the rows of another shard
            for (entry, number), rows in zip(loads[load], load.result(), strict=True):
                single = self._ask_for_single(number, rows, allowed=allowed)
                if single is not None:
                    found[entry] = number, single
        return found

    def _rows_of_each(self, numbers: list[int]) -> list[SampleRows]:
        return [self.dataset.rows_of(number, 1) for number in numbers]

    def _allowed_singles(self) -> int:
        """Returns how many bytes single reads may hold: a share of two windows of each lane seen so far."""
        if self._allowed[0] != len(self._lanes):
            num_blocks = _WINDOWS_A_LANE * self.order.window_blocks * len(self._lanes)
            of_windows = largest_blocks_bytes(self.dataset.blocks, num_blocks, epochs=2)
            self._allowed = len(self._lanes), of_windows // SINGLE_READS_SHARE
        return self._allowed[1]

    def _ask_for_single(self, number: int, rows: SampleRows, *, allowed: int) -> LoadedSlice | None:
        """Requests a single sample, unless it is too large to be read. Returns None if single reads would then hold
        more than `allowed` bytes; the sample has to wait for its block."""
        shard, _ = locate_row(self.dataset, number)
        begin, size = int(rows.offset[0]), int(rows.size[0])
        end = begin + size
        if self.with_members:
            around = self.dataset.bytes_around(number, number)
            begin, end = around if around[1] - around[0] <= MOST_SLICE_BYTES else (begin, end)
        path = self.dataset.shard_path(shard)
        single = LoadedSlice(path=path, rows=rows, begin=begin, end=end, fetched=None, num_left=1)
        if size > self.most_sample_bytes:
            return single
        if self._singles.now + end - begin > allowed:
            return None
        single.fetched = self._singles.fetch(self._tars, path, begin, end, urgent=True)
        return single

    def _begin_needed(self, wanted: _Wanted, singles: Collection[int]) -> None:
        """Begins a window if this batch waits for it. Single samples have been requested before; `_move_on` begins the
        later windows."""
        if not wanted.window and any(entry not in singles for entry in wanted.entries.tolist()):
            wanted.window = self._begin(wanted.lane, wanted.name, first=int(wanted.places[0]))

    def _begin(self, lane: _Lane, name: WindowId, *, first: int) -> Window:
        window = Window(
            name=name,
            size=self.order.window_size(name),
            first=first,
            held=HeldBytes(self._held),
            with_members=self.with_members,
        )
        lane.windows[name] = window
        load = partial(window.load, self.dataset, self.order, self._tars)
        self._loaders.submit(load).add_done_callback(window.over)
        return window

    def _checked(self, gathered: "_Gathered", *, epochs: NDArray[np.int64]) -> RawBatch:
        """Returns the batch, with an address for each sample that lies within the bytes of its piece. The other samples
        are read again, one by one, unless they are too large."""
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
        """Drops windows that are no longer needed, and begins the next one if the lane has room for it."""
        lane, name, first = wanted.lane, wanted.name, wanted.end
        if first == (wanted.window.size if wanted.window else self.order.window_size(name)):
            name, first = self.order.next_window(name), 0
            lane.pass_before(name)
        while len(lane.windows) < _WINDOWS_A_LANE and lane.has_room():
            while name in lane.windows:  # no further than needed: computing the next epoch's order takes a while
                name, first = self.order.next_window(name), 0
            self._begin(lane, name, first=first)


class StreamReader:
    """Reads one or several datasets for one stream, and owns the stream's connections, threads and counters.

    Call `close` when done. Callers that are waiting for a read then get a CancelledError at once.
    """

    def __init__(self, config: ReadConfig) -> None:
        self._reads = RangeReads(config)
        # Threads that wait for index files and for samples that are read again. The same number is reserved for urgent
        # reads, which a batch is waiting for.
        self._loaders = Pool(config.connections, name="rows", reserve=config.connections)
        self._pools = [*self._reads.pools, self._loaders]
        self._readers: list[SampleReader] = []
        self._process = os.getpid()

    @property
    def is_closed(self) -> bool:
        """Whether the reader has been closed."""
        return self._loaders.is_closed

    @property
    def held_bytes(self) -> int:
        """The bytes that are being read, that are held, or that live batches refer to."""
        return sum(reader.held_bytes for reader in self._readers)

    def counts(self) -> dict[str, float]:
        """Returns what this stream has read and retried so far, including index files, by the names in
        TRAFFIC_NAMES."""
        return {name: float(value) for name, value in asdict(self._reads.traffic.counts()).items()}

    def dataset(self, dataset: Dataset) -> Dataset:
        """Returns the dataset, read through this stream."""
        return dataset.read_by(self._reads)

    def samples(
        self,
        dataset: Dataset,
        order: SampleOrder,
        *,
        most_sample_bytes: int = MAX_IMAGE_BYTES,
        with_members: bool = False,
    ) -> SampleReader:
        """Returns a reader of the dataset's samples in this order. A sample larger than `most_sample_bytes` has a
        fault. `with_members`: whether the other members of the samples are read, too."""
        tars = self._reads.of(dataset.shard_store, lost=dataset.lost_tars)
        reader = SampleReader(
            self.dataset(dataset),
            order,
            tars=tars,
            loaders=self._loaders,
            most_sample_bytes=most_sample_bytes,
            with_members=with_members,
        )
        self._readers.append(reader)
        return reader

    def pool(self, limit: int, *, name: str) -> Pool:
        """Returns a pool of threads for the stream's other work, which is closed with the stream."""
        pool = Pool(limit, name=name)
        self._pools.append(pool)
        return pool

    def close(self) -> None:
        """Stops reads and threads within about a second. The thread of a stalled read ends when the read times out."""
        if sys.is_finalizing() or os.getpid() != self._process:
            return  # at exit, or in a forked child: a thread that does not exist here may hold a lock
        close_all(self._pools)
        for reader in self._readers:
            reader.drop()
