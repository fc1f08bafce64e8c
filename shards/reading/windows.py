"""Loads windows of blocks into memory, and bounds the bytes that they hold.

A window (W blocks of one lane) is fetched once, with a range read per block. A block's bytes are dropped when the last
of its samples is handed over, so there is no cache to size or to evict. Samples are views of the block's bytes. The
bytes stay in memory and count as held until the last view is dropped.
"""

import weakref
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shards.dataset import Dataset
from shards.manifest import index_path
from shards.order import BlockSlice, SampleOrder, WindowId
from shards.reading.members import Places, member_places
from shards.reading.samples import BYTES_MISSING, MOST_SLICE_BYTES, locate_row
from shards.sample_rows import NO_WEIGHT, BlockTable, SampleRows, refuse_block_reads
from shards.storage.fork_lock import ForkLock
from shards.storage.ranges import ReusedMemory, StreamStore

SINGLE_READS_SHARE = 8  # at a start, single reads may hold 1/8 of the bytes that windows may hold
# One sample, as a row of an array. Its bytes are the `size` bytes from `begin` on in piece number `piece`, a range that
# was read. `row` is its row in that piece's rows. `label` is its first label, or -1. `has_more_labels`: whether it has
# several labels, or weights. All columns have one type, because NumPy moves such rows five times as fast.
PLACED = np.dtype(
    [
        *((name, np.int64) for name in ("piece", "sample_id", "row", "begin", "size", "crc32")),
        *((name, np.int64) for name in ("height", "width", "orientation", "label", "has_more_labels")),
    ]
)
_OF_INDEX = ("size", "crc32", "height", "width", "orientation")


class HeldBytes:
    """Counts the bytes that are being read or in memory: `now`, and the `most` so far. Every change is also added to
    `whole`, if it is given."""

    def __init__(self, whole: "HeldBytes | None" = None) -> None:
        self._lock, self._whole = ForkLock(reentrant=True), whole  # a thread that holds the lock may free memory
        self.now = self.most = 0

    def add(self, count: int) -> None:
        """Adds `count` bytes, which may be negative."""
        with self._lock:
            self.now += count
            self.most = max(self.most, self.now)
        if self._whole:
            self._whole.add(count)

    def fetch(self, tars: StreamStore, path: str, first: int, end: int, *, urgent: bool = False) -> "Fetched":
        """Requests bytes first..end-1. They are counted from now on until nothing refers to them any more."""
        body: Future[RangeBytes] = Future()
        read = tars.submit(path, first, end, urgent=urgent, reused=True)
        self.add(end - first)
        read.add_done_callback(partial(self._arrived, body, end - first, tars.memory))
        return Fetched(body=body, read=read)

    def _arrived(
        self, body: Future["RangeBytes"], count: int, memory: ReusedMemory, read: Future[bytes | memoryview]
    ) -> None:
        # Must not raise: a traceback would keep the frames of the cancelling thread, and their bytes, in memory.
        error = CancelledError() if read.cancelled() else read.exception()
        if error is not None:
            self.add(-count)
            body.set_exception(error)
            return
        result = read.result()
        data = np.frombuffer(result, dtype=np.uint8)  # an array, because `bytes` cannot have a finalizer
        mapping = result.obj if isinstance(result, memoryview) else None
        weakref.finalize(data, self._freed, count, memory, mapping).atexit = False
        body.set_result(RangeBytes(data.data.toreadonly(), data.__array_interface__["data"][0]))

    def _freed(self, count: int, memory: ReusedMemory, mapping: object) -> None:
        memory.give_back(mapping)
        self.add(-count)


@dataclass(eq=False, slots=True)
class RangeBytes:
    """The bytes of a range, and their address. The address is valid as long as something refers to the bytes."""

    data: memoryview
    address: int
    _members: dict[int, Places] | None = (
        None  # no cached_property: before Python 3.12, one lock is held for all objects
    )

    def members(self) -> dict[int, Places]:
        """Returns the members of the samples, if the range has whole samples: see `member_places`."""
        if self._members is None:
            self._members = member_places(self.data)
        return self._members


NO_BYTES = RangeBytes(memoryview(b""), 0)


@dataclass(kw_only=True, slots=True)
class Fetched:
    """A range of a tar that is being read or in memory."""

    body: Future[RangeBytes]
    read: Future[bytes | memoryview]
    _arrived: RangeBytes | None = None

    def wait(self) -> RangeBytes:
        """Waits for the bytes. Returns NO_BYTES if the tar does not have them. Raises the errors of an unreachable
        store."""
        if self._arrived is None:
            try:
                self._arrived = self.body.result()
            except BYTES_MISSING:
                self._arrived = NO_BYTES
        return self._arrived


class ReadPiece(NamedTuple):
    """A range that was read, and the rows of the index for its samples."""

    body: RangeBytes
    rows: SampleRows


@dataclass(kw_only=True)
class LoadedSlice:
    """A slice of a block that is fetched by one range read, of bytes begin..end-1: its rows of the index, and how many
    of its samples have not been handed over."""

    path: str
    rows: SampleRows
    begin: int
    end: int
    fetched: Fetched | None
    num_left: int

    def wait(self) -> ReadPiece:
        """Waits for the bytes, which are NO_BYTES if the tar does not have them. Raises the errors of Fetched.wait."""
        fetched = self.fetched
        return ReadPiece(fetched.wait() if fetched else NO_BYTES, self.rows)

    def drop(self) -> None:
        """Drops the slice's bytes, or stops reading them."""
        fetched, self.fetched = self.fetched, None
        if fetched:
            fetched.read.cancel()


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A window's samples in shuffled order. `rows`: PLACED[n] as a matrix; the rows before the window's `first` are
    zeros. `slices`: the pieces of these rows."""

    rows: NDArray[np.int64]
    slices: tuple[LoadedSlice, ...]

    def rows_of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the rows of samples, given by ascending numbers. Nearly always the numbers are consecutive; then the
        result is a view, because NumPy releases the interpreter lock even for the smallest copy and has to wait for it
        again."""
        if not places.size:
            return self.rows[:0]
        first, last = int(places[0]), int(places[-1])
        return self.rows[first : last + 1] if last - first + 1 == places.size else self.rows[places]

    def drop(self) -> None:
        """Drops the bytes of all slices, including those that are still being read."""
        for one in self.slices:
            one.drop()


@dataclass(kw_only=True)
class Window:
    """A window of `size` samples that a thread loads. Only samples from number `first` on are loaded, because a start
    may be in the middle of a window. `with_members`: whether the other members of the samples are read, too."""

    name: WindowId
    size: int
    first: int
    held: HeldBytes
    with_members: bool = False
    contents: Future[Contents] = field(default_factory=Future)
    dropped: bool = False
    _loaded: Contents | None = None
    _handed_over: list[NDArray[np.int64]] = field(default_factory=list)

    @property
    def loaded(self) -> Contents | None:
        """The contents if they are loaded, else None."""
        if self._loaded is None and self.contents.done() and not self.contents.exception():
            self._loaded = self.contents.result()
        return self._loaded

    def wait(self) -> Contents:
        """Waits for the contents. Raises the error that prevented them."""
        return self.loaded or self.contents.result()

    def load(self, dataset: Dataset, order: SampleOrder, tars: StreamStore) -> None:
        """Reads the rows of the index, requests the blocks that are still needed, and sets `contents`."""
        found: Contents | None = None
        try:
            found = self._plan(dataset, order)
            for one in found.slices:
                if one.num_left and not self.dropped:
                    one.fetched = self.held.fetch(tars, one.path, one.begin, one.end)
        except Exception as error:
            if found:
                found.drop()  # the future keeps the error, whose traceback keeps this frame
            with suppress(InvalidStateError):  # `over` may have set an error already
                self.contents.set_exception(error)
        else:
            with suppress(InvalidStateError):
                self.contents.set_result(found)
            if self.dropped:
                self.drop()  # again, for bytes that were requested after the first drop

    def over(self, load: Future[None]) -> None:
        """Passes an error or a cancellation of `load` on to the callers that wait for the contents, for example if the
        pool was closed before it ran."""
        error = CancelledError() if load.cancelled() else load.exception()
        if error is not None:
            with suppress(InvalidStateError):
                self.contents.set_exception(error)

    def drop(self) -> None:
        """Drops the window's bytes, including those that are still being read."""
        self.dropped = True
        if self.loaded:
            self.loaded.drop()

    def hand_over(self, places: NDArray[np.int64]) -> None:
        """Records that these samples were handed over. Drops slices that have none left."""
        self._handed_over.append(places)
        if not (found := self.loaded):
            return  # all samples came from single reads; a later call counts them
        for some in self._handed_over:
            counted = some if some[0] >= self.first else some[some >= self.first]
            for number in found.rows_of(counted)[:, 0].tolist():
                one = found.slices[number]
                one.num_left -= 1
                if one.num_left == 0:
                    one.drop()
        self._handed_over = []

    def arrived(self, place: int) -> bool:
        """Returns whether sample number `place` of the window has arrived."""
        if place < self.first or not (found := self.loaded):
            return False
        fetched = found.slices[found.rows[place, 0]].fetched
        return fetched is not None and fetched.body.done()

    def _plan(self, dataset: Dataset, order: SampleOrder) -> Contents:
        blocks = order.window_slices(self.name)
        ids = np.concatenate([block.ids() for block in blocks])
        shuffled = order.shuffle(self.name, ids)
        starts = np.cumsum([0] + [block.num_samples for block in blocks])
        in_block = np.searchsorted(starts, shuffled, side="right") - 1
        in_block[: self.first] = -1
        table, slices = np.zeros(ids.size, dtype=PLACED), list[LoadedSlice]()
        for number, block in enumerate(blocks):
            places = np.flatnonzero(in_block == number)
            wanted = shuffled[places] - starts[number]
            low, high = (int(wanted.min()), int(wanted.max())) if wanted.size else (0, 0)
            path, rows = _needed_rows(dataset, block, low, high)
            begins = rows.reads()
            if self.with_members:  # the members of samples that follow each other lie in one stretch
                packed = dataset.packed_ids(block.first_sample_id + low + np.arange(rows.size.size))
                begins = np.concatenate([[0], np.flatnonzero(np.diff(packed) != 1) + 1])
            bounds = list(zip(begins.tolist(), [*begins[1:].tolist(), rows.size.size], strict=True))
            ranges = [self._range(dataset, rows, block.first_sample_id + low, *bound) for bound in bounds]
            of_read = np.searchsorted(begins, wanted - low, side="right") - 1
            own = placed(rows, wanted - low, first_sample_id=block.first_sample_id + low)
            own["piece"] = len(slices) + of_read
            own["begin"] -= np.array([first for first, _ in ranges], dtype=np.int64)[of_read]
            own["row"] -= begins[of_read]
            table[places] = own
            num_left = np.bincount(of_read, minlength=begins.size)
            for (first, end), (begin, stop), num in zip(bounds, ranges, num_left, strict=True):
                some = rows if begins.size == 1 else rows.slice(first, end)
                slices.append(LoadedSlice(path=path, rows=some, begin=begin, end=stop, fetched=None, num_left=int(num)))
        return Contents(rows=as_matrix(table), slices=tuple(slices))

    def _range(self, dataset: Dataset, rows: SampleRows, first_sample_id: int, first: int, end: int) -> tuple[int, int]:
        """Returns (first byte, end byte) of the read of rows first..end-1. `first_sample_id` is that of row 0."""
        images = int(rows.offset[first]), int(rows.offset[end - 1] + rows.size[end - 1])
        if not self.with_members:
            return images
        around = dataset.bytes_around(first_sample_id + first, first_sample_id + end - 1)
        return around if around[1] - around[0] <= MOST_SLICE_BYTES else images


def as_matrix(table: NDArray[Any]) -> NDArray[np.int64]:
    """Views PLACED[n] as int64[n, columns], in the same memory."""
    return table.view(np.int64).reshape(table.size, -1)


def placed(rows: SampleRows, chosen: NDArray[np.int64], *, first_sample_id: int) -> NDArray[Any]:
    """Returns the chosen rows as PLACED[n]. `first_sample_id`: the id of the sample in the first of `rows`. All samples
    are placed in piece 0, which is taken to begin where the shard begins."""
    table = np.zeros(chosen.size, dtype=PLACED)
    table["sample_id"], table["row"], table["begin"] = first_sample_id + chosen, chosen, rows.offset[chosen]
    for name in _OF_INDEX:
        table[name] = getattr(rows, name)[chosen]
    ends = rows.label_ends
    begins, nums = ends[chosen], ends[chosen + 1] - ends[chosen]
    has_one = nums > 0
    table["label"] = -1
    table["label"][has_one] = rows.label_values[begins[has_one]]
    table["has_more_labels"] = nums > 1
    if rows.weight_values.size:
        table["has_more_labels"][has_one] |= rows.weight_values[begins[has_one]] != NO_WEIGHT
    return table


def _needed_rows(dataset: Dataset, block: BlockSlice, low: int, high: int) -> tuple[str, SampleRows]:
    """Returns the path of a block's tar, and the block's rows `low` to `high`."""
    shard, _ = locate_row(dataset, block.first_sample_id)
    rows = dataset.rows_of(block.first_sample_id + low, high - low + 1)
    with dataset.naming(index_path(shard)):
        refuse_block_reads(dataset.blocks, rows, block.first_sample_id + low)
    return dataset.shard_path(shard), rows


def lanes_of_rank(lanes: int, *, batch_size: int, num_ranks: int) -> int:
    """Returns the most lanes that a rank reads. If ranks share lanes, that is more than its share of the lanes."""
    of_lane, of_rank = batch_size // lanes, batch_size // num_ranks
    return of_rank // of_lane if of_rank % of_lane == 0 else min(lanes, -(-of_rank // of_lane) + 1)


def window_bound_bytes(
    blocks: BlockTable, order: SampleOrder, *, batch_size: int, num_ranks: int, batches_in_use: int
) -> int:
    """Returns an upper bound of the bytes that a rank's SampleReader holds or reads (`held_bytes`).

    A lane holds two windows of W blocks each: the window after next is begun only when the earlier one has been freed.
    If the batches in use span more than a whole window, blocks of that window are added: at most those that fit into a
    lane's samples in `batches_in_use` + 1 batches (those handed over but not dropped, and the one being read). The sum
    is over the largest blocks of the dataset, each once per epoch that may be held at a time. Single reads at a start
    add at most an eighth.
    """
    lanes = lanes_of_rank(order.lanes, batch_size=batch_size, num_ranks=num_ranks)
    lane_samples = max(1, order.num_samples // order.lanes)
    in_use = (batches_in_use + 1) * (batch_size // order.lanes)  # consecutive samples of a lane in these batches
    epochs = 2 + (in_use + 2 * order.window_blocks * int(order.block_sizes.max())) // lane_samples
    within = _most_slices_within(order, in_use - 2, epochs=epochs)
    epochs = min(epochs, 3 + within)  # a window lies in one epoch, and lanes are at most an epoch apart
    num_slices = lanes * (2 * order.window_blocks + within)
    of_windows = largest_blocks_bytes(blocks, num_slices, epochs=epochs)
    return of_windows + of_windows // SINGLE_READS_SHARE


def _most_slices_within(order: SampleOrder, num_samples: int, *, epochs: int) -> int:
    """Returns the most slices of blocks that can lie entirely within `num_samples` consecutive samples, counting only
    windows that also lie entirely within them."""
    if num_samples < 1:
        return 0
    sizes = order.block_sizes
    smallest = np.sort(np.partition(sizes, min(num_samples, sizes.size) - 1)[:num_samples])
    whole = int(np.searchsorted(np.cumsum(np.repeat(smallest, epochs)), num_samples, side="right"))
    # Each end of a lane cuts a block. A lane's first window lies within the samples only if its whole blocks do.
    cut = 2 if whole >= order.window_blocks - 1 else 1
    return min(num_samples, whole + cut * (1 + num_samples * order.lanes // order.num_samples))


def largest_blocks_bytes(blocks: BlockTable, count: int, *, epochs: int) -> int:
    """Returns the bytes of the `count` largest blocks, if each block may be held `epochs` times."""
    sizes = blocks.most_bytes
    num = min(sizes.size, -(-count // epochs))
    top = np.sort(np.partition(sizes, sizes.size - num)[sizes.size - num :])[::-1]
    return int(np.repeat(top, epochs)[:count].sum())
