"""Batches of uint8 images in the planned order, decoded and augmented ahead of time in threads.

One thread plans: it takes the samples of a step from the reader and hands them to the decoding threads in small chunks.
Each chunk is one call of the library of crop_decoder.py, which writes directly into the batch's buffer, without the
interpreter lock. Samples that the library leaves out are decoded in Python, one by one. There are no worker processes,
and no sample passes through shared memory or a lock file. The tables that ranks of a host share do: those of the
dataset when they start, and the order of the blocks at each epoch of a large dataset (shards/host_copy.py).
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.data.augment import late_crop_pixels
from pipeline.data.config import DataConfig, Share
from pipeline.data.crop_decoder import SAMPLE, view_settings
from pipeline.data.decode import DecodeError, Pixels
from pipeline.data.position import Sizes, Skipped, data_step_of, size_at
from pipeline.data.quarantine import Quarantine
from pipeline.data.samples import (
    Draws,
    Hook,
    Made,
    Sample,
    recolour,
    sample_draws,
    transform_seed,
    usable,
    use_one_torch_thread,
)
from pipeline.data.training_data import TrainingData
from pipeline.data.transform import crop_decoder, train_view, train_views
from shards.dataset import Dataset
from shards.hashing import CROPS, OPERATIONS
from shards.order import SampleOrder, repeated, seed_of_repeat
from shards.reading.read import TRAFFIC_NAMES, RawBatch, SampleReader, StreamReader
from shards.reading.samples import RawSample
from shards.sample_rows import NO_WEIGHT

Labels = tuple[NDArray[np.int64], tuple[float, ...]]  # a sample's labels and their weights: one per label, or none
log = logging.getLogger(__name__)
NUM_VALID_REQUESTS = 2  # a batch's buffer is reused from the second request after its own
_CHUNKS_A_THREAD = 4  # in each batch: few enough to be cheap, many enough to balance the threads
_CALL_SAMPLES = 16  # in a chunk, even of a small batch: handing over a chunk holds the interpreter lock
_AHEAD_CHUNKS_A_THREAD = 2  # in all batches ahead
COUNT_NAMES = (*TRAFFIC_NAMES, "samples", "replaced", "held_bytes")


def label_matrix(single: NDArray[np.int64], others: Mapping[int, Labels]) -> torch.Tensor:
    """Returns the labels of a batch: int64[n, most labels of one sample, at least 1], padded with -1. `single`,
    int64[n]: the label of each sample that has only one label, without a weight, else -1. `others`: all labels of the
    remaining samples, by row."""
    matrix = np.full(_shape(single, others), -1, dtype=np.int64)
    matrix[:, 0] = single
    for row, (own, _) in others.items():
        matrix[row] = -1
        matrix[row, : own.size] = own
    return torch.from_numpy(matrix)


def weight_matrix(single: NDArray[np.int64], others: Mapping[int, Labels]) -> torch.Tensor:
    """Returns the weights of the labels: float32 in the shape of the label matrix, padded with 0. Rows of samples
    without weights are filled with NO_WEIGHT."""
    matrix = np.full(_shape(single, others), NO_WEIGHT, dtype=np.float32)
    for row, (_, weights) in others.items():
        if weights:
            matrix[row] = 0.0
            matrix[row, : len(weights)] = weights
    return torch.from_numpy(matrix)


def _shape(single: NDArray[np.int64], others: Mapping[int, Labels]) -> tuple[int, int]:
    return single.size, max([1, *(own.size for own, _ in others.values())])


def chunk_size(num_samples: int, *, num_threads: int, steps_ahead: int) -> int:
    """Returns how many samples of a batch of `num_samples` a thread decodes in one call. A batch has four chunks for
    each thread, or fewer if they would be small: the threads then work on several of the batches ahead."""
    balanced = -(-num_samples // (_CHUNKS_A_THREAD * num_threads))
    shared = num_samples * steps_ahead // (_AHEAD_CHUNKS_A_THREAD * num_threads)
    return max(balanced, min(_CALL_SAMPLES, shared), 1)


@dataclass(frozen=True, kw_only=True, repr=False)
class Batch:
    """A rank's share of a step. `images`, uint8[n, size, size, 3], is a reused buffer, valid until two more batches
    have been requested; with a transform, it is what was collated from its results, in memory of its own. `labels`,
    int64[n, most labels], is padded with -1. `sample_ids` is int64[n]. `datasets`, int64[n]: the number of each
    sample's dataset in a mix. `weights`, float32[n, most labels]: the weights of the labels, NO_WEIGHT in the rows of
    samples without weights; None if weights are not used. `fields`: the other members that were asked for, each a list
    of n values."""

    step: int
    images: torch.Tensor
    labels: torch.Tensor
    sample_ids: torch.Tensor
    datasets: torch.Tensor
    weights: torch.Tensor | None = None
    fields: Mapping[str, list[Any]] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Returns the types and shapes, such as Batch(step=0, images=uint8[64, 224, 224, 3], ...)."""
        shown = {name: _shown(value) for name, value in vars(self).items() if value is not None and name != "fields"}
        shown |= {f"fields[{name!r}]": f"list[{len(values)}]" for name, values in self.fields.items()}
        return f"Batch({', '.join(f'{name}={value}' for name, value in shown.items())})"


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {_shown(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}[{len(value)}]"
    return repr(value) if isinstance(value, int) else type(value).__name__


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A dataset that is read. `labels`: maps its labels to the labels of all datasets together."""

    dataset: Dataset
    reader: SampleReader
    labels: NDArray[np.int64]
    seed: int


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """The samples of a batch. `table`, SAMPLE[n]: what the library needs to know about each. `sources`, `places`,
    `epochs` and `repeats`, int64[n]: the number of each sample's source, its place among the samples `read` from that
    source, its epoch, and which of its repeats it is. `work_seconds`: the decoding time of each chunk."""

    table: NDArray[Any]
    sources: NDArray[np.int64]
    places: NDArray[np.int64]
    epochs: NDArray[np.int64]
    repeats: NDArray[np.int64]
    read: Mapping[int, RawBatch]
    work_seconds: list[float] = field(default_factory=list)

    def sample(self, entry: int) -> RawSample:
        """Returns the sample of this entry."""
        return self.read[int(self.sources[entry])].sample(int(self.places[entry]))

    def members(self, entry: int) -> Mapping[str, memoryview] | None:
        """Returns the members of this entry's sample; None if they were not read with its block."""
        return self.read[int(self.sources[entry])].members_of(int(self.places[entry]))


class _Entry(NamedTuple):
    """An entry of a batch, and its sample's draws."""

    planned: _Planned
    number: int
    draws: Draws

    @property
    def source(self) -> int:
        """The number of its source."""
        return int(self.planned.sources[self.number])


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """What was made of a chunk of a batch. `labels`: those of samples that were made in Python, by entry. `fields` and
    `results`, one per sample: the fields that were asked for, and what the transform returned."""

    labels: dict[int, Labels]
    fields: list[dict[str, Any]]
    results: list[Any]


@dataclass(frozen=True, kw_only=True)
class _Coming:
    """A batch whose samples are being decoded. `labels`, int64[n]: the only label of each sample, or -1. `others`: all
    labels of samples with several labels or with weights, by row. `pieces`: the chunks. `collated`: what is made of the
    results of a transform, instead of the images."""

    step: int
    images: torch.Tensor
    sample_ids: NDArray[np.int64]
    datasets: NDArray[np.int64]
    labels: NDArray[np.int64]
    others: Mapping[int, Labels]
    pieces: list[Future[_Chunk]]
    work_seconds: list[float]
    has_weights: bool = False
    collated: Future[Any] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all samples are decoded, without an error."""
        return all(map(_has_succeeded, self.pieces)) and (self.collated is None or _has_succeeded(self.collated))

    def wait(self) -> Batch:
        """Waits until the batch is complete, and returns it. Raises what a decoding thread raised."""
        others, chunks = dict(self.others), [piece.result() for piece in self.pieces]
        for chunk in chunks:
            others |= chunk.labels
        fields = [one for chunk in chunks for one in chunk.fields]
        return Batch(
            step=self.step,
            images=self.images if self.collated is None else self.collated.result(),
            labels=label_matrix(self.labels, others),
            sample_ids=torch.from_numpy(self.sample_ids),
            datasets=torch.from_numpy(self.datasets),
            weights=weight_matrix(self.labels, others) if self.has_weights else None,
            fields={name: [one[name] for one in fields] for name in (fields[0] if fields else ())},
        )


class _Pace:
    """Chooses how many decoding threads work. A few threads that work during the whole step disturb the thread that
    launches the step less than all threads in one burst. All threads work until `_NUM_WATCHED` batches in a row were
    complete when they were requested. Then the number is chosen to fit the shortest of these steps, with a margin. If a
    batch is late with fewer threads, that number and smaller ones are not tried again."""

    _NUM_WATCHED = 8  # consecutive batches
    _MARGIN = 1.5

    def __init__(self, most: int) -> None:
        self.most, self.limit = most, most
        self._least = 1
        self._steps: deque[tuple[float, float]] = deque(maxlen=self._NUM_WATCHED)  # seconds of work, and of the step

    def request(self, *, is_complete: bool, work_seconds: float, step_seconds: float) -> None:
        """Sets the limit after a request for a batch. `is_complete`: whether the batch was ready. `work_seconds`: the
        time that all threads together worked on it. `step_seconds`: the time since the last request."""
        if is_complete:
            self._steps.append((work_seconds, step_seconds))
        else:
            self._steps.clear()
            if self.limit < self.most:
                self._least = self.limit + 1
        if len(self._steps) < self._NUM_WATCHED:
            self.limit = self.most
            return
        most_work, shortest = max(work for work, _ in self._steps), min(step for _, step in self._steps)
        needed = math.ceil(self._MARGIN * most_work / shortest) if shortest > 0 else self.most
        self.limit = min(self.most, max(self._least, needed))


class TrainBatches:
    """An endless source of a rank's batches, from any step on. Close it when done.

    While a batch is used, the next `steps_ahead` are read and decoded.
    """

    def __init__(
        self,
        data: TrainingData,
        config: DataConfig,
        *,
        orders: tuple[SampleOrder, ...],
        seed: int,
        image_size: int,
        share: Share,
        quarantine: Quarantine,
        sizes: Sizes = (),
        pin_memory: bool = False,
        hook: Hook | None = None,
    ) -> None:
        self.config, self.seed, self.share, self.quarantine = config, seed, share, quarantine
        self.hook, self._image_size, self._sizes = hook or Hook(), image_size, sizes
        self._mixture = data.mixture(config, seed=seed)
        self._reader = StreamReader(config.reading)
        with_members = bool(self.hook.fields)
        readers = map(partial(self._reader.samples, with_members=with_members), data.datasets, orders)
        self._sources = [
            _Source(
                dataset=reader.dataset,
                reader=reader,
                labels=data.label_maps[number],
                seed=data.seed_of(number, seed),
            )
            for number, reader in enumerate(readers)
        ]
        shape = (share.global_batch // share.num_ranks, image_size, image_size, 3)
        if self.hook.transform:
            shape = (0, image_size, image_size, 3)
        # At a request, the caller still holds the previous batch, and `steps_ahead` batches are being made.
        self._buffers = [
            torch.empty(shape, dtype=torch.uint8, pin_memory=pin_memory)
            for _ in range(config.steps_ahead + NUM_VALID_REQUESTS)
        ]
        self._settings = {
            size: view_settings(config, size=size, resize_pixels=late_crop_pixels(config.augment, size))
            for size in (image_size, *(size for _, size in sizes))
        }
        self._has_warned = False
        self._waiting: deque[Future[_Coming]] = deque()
        self._num_threads = max(1, config.num_threads)
        self._pace = _Pace(self._num_threads)
        self._decoders = self._reader.pool(self._num_threads, name="decode")
        self._decoders.submit(crop_decoder)  # loads and checks the library while the first samples are read
        self._planner = self._reader.pool(1, name="plan")  # one thread, so that steps are read in rising order

    def __call__(self, start_step: int, *, skipped: Skipped = ()) -> Iterator[Batch]:
        """Yields the batches of steps start_step, start_step + 1, ..., without the skipped data steps."""
        waiting = self._waiting = deque()
        last = time.monotonic()
        for step in count(start_step):
            waiting.append(self._planner.submit(partial(self._plan, step, data_step_of(step, skipped))))
            if len(waiting) > self.config.steps_ahead:
                is_complete, now = self.is_ready, time.monotonic()
                coming = waiting.popleft().result()
                batch = coming.wait()
                self._pace.request(
                    is_complete=is_complete, work_seconds=sum(coming.work_seconds), step_seconds=now - last
                )
                if self._decoders.limit != self._pace.limit:
                    self._decoders.limit = self._pace.limit
                last = now
                yield batch

    @property
    def is_ready(self) -> bool:
        """Whether a request for the next batch would neither wait nor fail."""
        return bool(self._waiting) and _has_succeeded(self._waiting[0]) and self._waiting[0].result().is_complete

    def counts(self) -> dict[str, float]:
        """Returns the counts by the names in COUNT_NAMES: requests, bytes, retries and replaced samples so far, and the
        bytes held now."""
        return self._reader.counts() | {
            "samples": self.quarantine.num_read,
            "replaced": self.quarantine.num_replaced,
            "held_bytes": float(self._reader.held_bytes),
        }

    def close(self) -> None:
        """Stops reads and threads within about a second. If a read stalls, its thread ends when the read times out."""
        self._reader.close()

    def _plan(self, step: int, data_step: int) -> _Coming:
        """Takes the samples of a data step from the readers and hands them to the decoding threads."""
        share = self.share
        order = self._sources[0].reader.order
        positions = order.positions(data_step, share.global_batch, share.rank, share.num_ranks)
        taken = repeated(
            positions,
            step=data_step,
            batch_size=share.global_batch,
            lanes=order.lanes,
            repeats=self.config.augment.repeats,
        )
        datasets, own = self._mixture.split(taken.positions)
        places, read = np.zeros_like(positions), dict[int, RawBatch]()
        for number, source in enumerate(self._sources):
            entries = np.flatnonzero(datasets == number)
            if not entries.size:
                continue
            if self.config.augment.repeats == 1:
                places[entries], read[number] = np.arange(entries.size), source.reader.read(own[entries])
            else:  # each sample is read once
                once, firsts, places[entries] = np.unique(own[entries], return_index=True, return_inverse=True)
                read[number] = source.reader.read(once, return_later=taken.return_later[entries[firsts]])
        planned = self._planned(datasets, places, taken.numbers, read)
        labels, others = self._labels(planned)
        self._say_unused_weights(planned, others)
        images = _in_size(self._buffers[step % len(self._buffers)], size_at(step, self._sizes, last=self._image_size))
        views = images.numpy()
        size = chunk_size(positions.size, num_threads=self._num_threads, steps_ahead=self.config.steps_ahead)
        chunks = [range(first, min(first + size, positions.size)) for first in range(0, positions.size, size)]
        if self.hook.transform:
            pieces = [self._decoders.submit(partial(self._transform_all, planned, chunk)) for chunk in chunks]
            collated = self._collated(pieces)
        else:
            each = [(chunk, views[chunk.start : chunk.stop]) for chunk in chunks]
            pieces = [self._decoders.submit(partial(self._fill_all, planned, chunk, some)) for chunk, some in each]
            collated = None
        return _Coming(
            step=step,
            images=images,
            sample_ids=planned.table["sample_id"].copy(),
            datasets=datasets,
            labels=labels,
            others=others,
            pieces=pieces,
            work_seconds=planned.work_seconds,
            has_weights=self.config.label_weights,
            collated=collated,
        )

    def _planned(
        self,
        datasets: NDArray[np.int64],
        places: NDArray[np.int64],
        repeats: NDArray[np.int64],
        read: Mapping[int, RawBatch],
    ) -> _Planned:
        """Returns the samples of all datasets in the order of the batch."""
        epochs, table = np.empty(datasets.size, dtype=np.int64), np.empty(datasets.size, dtype=SAMPLE)
        for number, raw in read.items():
            entries = datasets == number
            own = places[entries]
            for name in ("sample_id", "crc32", "height", "width", "orientation"):
                table[name][entries] = raw.table[name][own]
            table["data"][entries], table["num_bytes"][entries] = raw.addresses[own], raw.table["size"][own]
            epochs[entries] = raw.epochs[own]
            for epoch, repeat in set(zip(epochs[entries].tolist(), repeats[entries].tolist(), strict=True)):
                chosen = entries & (epochs == epoch) & (repeats == repeat)
                seed = seed_of_repeat(self._sources[number].seed, repeat)
                table["crop_key"][chosen] = CROPS.key(seed, epoch)
                table["operation_key"][chosen] = OPERATIONS.key(seed, epoch)
        return _Planned(table=table, sources=datasets, places=places, epochs=epochs, repeats=repeats, read=read)

    def _labels(self, planned: _Planned) -> tuple[NDArray[np.int64], dict[int, Labels]]:
        """Returns the labels of the samples, in the form of `_Coming.labels` and `_Coming.others`."""
        labels, others = np.full(planned.sources.size, -1, dtype=np.int64), dict[int, Labels]()
        for number, raw in planned.read.items():
            known, entries = self._sources[number].labels, np.flatnonzero(planned.sources == number)
            places = planned.places[entries]
            own = raw.table["label"][places]
            labels[entries[own >= 0]] = known[own[own >= 0]]
            for entry in np.flatnonzero(raw.table["has_more_labels"][places]).tolist():
                of_sample, weights = raw.labels_of(int(places[entry]))
                others[int(entries[entry])] = known[list(of_sample)], weights
        return labels, others

    def _say_unused_weights(self, planned: _Planned, others: Mapping[int, Labels]) -> None:
        """Warns once if labels have weights that are not used."""
        if self.share.rank != 0 or self.config.label_weights or self._has_warned:
            return
        found = next((entry for entry, (_, weights) in others.items() if weights), None)
        if found is not None:
            self._has_warned = True
            where = self._sources[int(planned.sources[found])].dataset.url
            log.warning("labels of %s have weights, which are not used: --data.label-weights uses them", where)

    def _fill_all(self, planned: _Planned, chunk: range, views: NDArray[np.uint8]) -> _Chunk:
        """Makes the views of a chunk in one call of the library. Samples that it leaves out are made one by one in
        Python."""
        self._check_open()
        began = time.monotonic()
        self.quarantine.count(len(views))
        are_done = train_views(planned.table[chunk.start : chunk.stop], self._settings[views.shape[1]], out=views)
        found, fields = dict[int, Labels](), list[dict[str, Any]]()
        is_finished = self.config.augment.num_colour_draws == 0 and not self.hook.fields
        left = np.flatnonzero(~are_done) if is_finished else np.arange(len(views))
        for one in self._entries(planned, chunk.start + left):
            view = views[one.number - chunk.start]
            done = self._done(one, view) if are_done[one.number - chunk.start] else None
            if done is None:
                self._check_open()
                found[one.number], made = self._usable(one, partial(self._view, one, view))
            fields.append(made if done is None else done)
        planned.work_seconds.append(time.monotonic() - began)
        return _Chunk(labels=found, fields=fields if self.hook.fields else [], results=[])

    def _done(self, one: _Entry, view: Pixels) -> dict[str, Any] | None:
        """Completes a view that the library has made: changes its colours, if Pillow does. Returns the fields of its
        sample, or None if they or the colours fail."""
        try:
            if self.config.augment.num_colour_draws:  # otherwise the library has applied RandAugment, too
                recolour(view, one.draws, config=self.config)
            return self._fields(one, None)
        except DecodeError:
            return None

    def _view(self, one: _Entry, view: Pixels, dataset: Dataset, sample: RawSample) -> dict[str, Any]:
        """Decodes, crops and recolours a sample into `view`, and returns its fields. Raises DecodeError."""
        train_view(sample, one.draws.crop, config=self.config.augment, out=view, limits=dataset.manifest.limits)
        recolour(view, one.draws, config=self.config)
        return self._fields(one, sample)

    def _transform_all(self, planned: _Planned, chunk: range) -> _Chunk:
        """Calls the transform for every sample of a chunk."""
        use_one_torch_thread()
        began = time.monotonic()
        self.quarantine.count(len(chunk))
        found, fields, results = dict[int, Labels](), list[dict[str, Any]](), list[Any]()
        for one in self._entries(planned, np.arange(chunk.start, chunk.stop)):
            self._check_open()
            found[one.number], (own, result) = self._usable(one, partial(self._made, one))
            fields.append(own)
            results.append(result)
        planned.work_seconds.append(time.monotonic() - began)
        return _Chunk(labels=found, fields=fields if self.hook.fields else [], results=results)

    def _made(self, one: _Entry, dataset: Dataset, sample: RawSample) -> tuple[dict[str, Any], Any]:
        """Returns the fields of a sample and what the transform makes of it. Raises DecodeError."""
        source, fields = self._sources[one.source], self._fields(one, sample)
        epoch, repeat = int(one.planned.epochs[one.number]), int(one.planned.repeats[one.number])
        made = self.hook.made(
            Sample(
                sample,
                labels=tuple(source.labels[list(sample.labels)].tolist()),
                fields=fields,
                draws=one.draws,
                seed=transform_seed(sample.sample_id, epoch, seed=seed_of_repeat(source.seed, repeat)),
                image_size=self._image_size,
                config=self.config,
                limits=dataset.manifest.limits,
            )
        )
        return fields, made

    def _collated(self, pieces: list[Future[_Chunk]]) -> Future[Any]:
        """Returns what is collated from the results of all chunks of a batch, by the thread that finishes the last."""
        collated, lock, left = Future[Any](), threading.Lock(), [len(pieces)]

        def finish(_: Future[_Chunk]) -> None:
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            try:
                collated.set_result(
                    self.hook.collated([result for piece in pieces for result in piece.result().results])
                )
            except BaseException as error:  # the loop raises it, an interrupt of a cancelled chunk included
                collated.set_exception(error)

        for piece in pieces:
            piece.add_done_callback(finish)
        return collated

    def _fields(self, one: _Entry, sample: RawSample | None) -> dict[str, Any]:
        """Returns the fields of the entry's own sample (None: as it was read with its block), or of a `sample` that was
        read again or is a substitute. Raises DecodeError."""
        if not self.hook.fields:
            return {}
        own = int(one.planned.table["sample_id"][one.number])
        is_as_planned = sample is None or (sample.sample_id == own and not sample.source)
        members = one.planned.members(one.number) if is_as_planned else None
        if members is None:
            return self.hook.read_from(self._sources[one.source].dataset, sample.sample_id if sample else own)
        return self.hook.read(members)

    def _entries(self, planned: _Planned, numbers: NDArray[np.int64]) -> list[_Entry]:
        """Returns these entries of a batch with their draws, in rising order."""
        found = list[_Entry]()
        kinds = zip(planned.sources[numbers].tolist(), planned.repeats[numbers].tolist(), strict=True)
        for source, repeat in set(kinds):
            chosen = numbers[(planned.sources[numbers] == source) & (planned.repeats[numbers] == repeat)]
            ids, seed = planned.table["sample_id"][chosen], seed_of_repeat(self._sources[source].seed, repeat)
            draws = sample_draws(ids, planned.epochs[chosen], seed=seed, config=self.config)
            found += map(_Entry, [planned] * chosen.size, chosen.tolist(), draws)
        return sorted(found, key=lambda one: one.number)

    def _check_open(self) -> None:
        if self._reader.is_closed:
            raise CancelledError("the batches are closed")

    def _usable(self, one: _Entry, make: Callable[[Dataset, RawSample], Made]) -> tuple[Labels, Made]:
        """Returns the labels of the entry's sample, or of its substitute, and what `make` makes of it."""
        source, sample = self._sources[one.source], one.planned.sample(one.number)
        sample, made = usable(
            source.dataset, sample, make, seed=self.seed, quarantine=self.quarantine, check_open=self._check_open
        )
        return (source.labels[list(sample.labels)], sample.weights), made


def _in_size(buffer: torch.Tensor, size: int) -> torch.Tensor:
    """Returns a view of the beginning of a buffer, uint8[n, h, w, 3], with images of size x size."""
    if size == buffer.shape[1]:
        return buffer
    num_images = len(buffer)
    return buffer.flatten()[: num_images * size * size * 3].view(num_images, size, size, 3)


def _has_succeeded(task: Future[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
