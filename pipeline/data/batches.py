"""Batches of uint8 images in the planned order, decoded and augmented ahead of time in threads.

One thread plans: it takes the samples of a step from the reader and hands them to the decoding threads in small chunks.
Each chunk is one call of the library of crop_decoder.py, which writes directly into the batch's buffer, without the
interpreter lock. Samples that the library leaves out are decoded in Python, one by one. There are no worker processes,
and no sample passes through shared memory or a lock file. The tables that ranks of a host share do: those of the
dataset when they start, and the order of the blocks at each epoch of a large dataset (shards/host_copy.py).
"""

import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.data.augment import draws_of, late_crop_pixels, recoloured
from pipeline.data.config import DataConfig, Share
from pipeline.data.crop_decoder import SAMPLE, view_settings
from pipeline.data.decode import DecodeError, Pixels, image_faults
from pipeline.data.position import Skipped, data_step_of
from pipeline.data.quarantine import Quarantine
from pipeline.data.randaugment import randaugment
from pipeline.data.training_data import TrainingData
from pipeline.data.transform import crop_decoder, train_view, train_views
from shards.dataset import Dataset
from shards.errors import WillNotSucceedError
from shards.hashing import COLOURS, CROPS, OPERATIONS, SUBSTITUTES
from shards.order import SampleOrder
from shards.reading.read import TRAFFIC_NAMES, RawBatch, SampleReader, StreamReader
from shards.reading.samples import RawSample, read_sample, refetched, verified
from shards.sample_rows import NO_WEIGHT

Labels = tuple[NDArray[np.int64], tuple[float, ...]]  # a sample's labels and their weights: one per label, or none
log = logging.getLogger(__name__)
NUM_VALID_REQUESTS = 2  # a batch's buffer is reused from the second request after its own
_MAX_SUBSTITUTES = 20
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


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A rank's share of a step. `images`, uint8[n, size, size, 3], is a reused buffer, valid until two more batches
    have been requested. `labels`, int64[n, most labels], is padded with -1. `sample_ids` is int64[n]. `datasets`,
    int64[n]: the number of each sample's dataset in a mix. `weights`, float32[n, most labels]: the weights of the
    labels, NO_WEIGHT in the rows of samples without weights; None if weights are not used."""

    step: int
    images: torch.Tensor
    labels: torch.Tensor
    sample_ids: NDArray[np.int64]
    datasets: NDArray[np.int64]
    weights: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A dataset that is read. `labels`: maps its labels to the labels of all datasets together."""

    dataset: Dataset
    reader: SampleReader
    labels: NDArray[np.int64]
    seed: int


@dataclass(frozen=True, kw_only=True)
class _Draws:
    """A sample's random draws for its crop, its colours and its operations, each float64[number of draws]."""

    crop: NDArray[np.float64]
    colours: NDArray[np.float64]
    operations: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """The samples of a batch. `table`, SAMPLE[n]: what the library needs to know about each. `sources`, `places` and
    `epochs`, int64[n]: the number of each sample's source, its place among the samples `read` from that source, and its
    epoch. `work_seconds`: the decoding time of each chunk."""

    table: NDArray[Any]
    sources: NDArray[np.int64]
    places: NDArray[np.int64]
    epochs: NDArray[np.int64]
    read: Mapping[int, RawBatch]
    work_seconds: list[float] = field(default_factory=list)

    def sample(self, entry: int) -> RawSample:
        """Returns the sample of this entry."""
        return self.read[int(self.sources[entry])].sample(int(self.places[entry]))


@dataclass(frozen=True, kw_only=True)
class _Coming:
    """A batch whose samples are being decoded. `labels`, int64[n]: the only label of each sample, or -1. `others`: all
    labels of samples with several labels or with weights, by row. Each of the `pieces` returns the labels of the
    samples that it decoded in Python."""

    step: int
    images: torch.Tensor
    sample_ids: NDArray[np.int64]
    datasets: NDArray[np.int64]
    labels: NDArray[np.int64]
    others: Mapping[int, Labels]
    pieces: list[Future[dict[int, Labels]]]
    work_seconds: list[float]
    has_weights: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether all samples are decoded, without an error."""
        return all(map(_has_succeeded, self.pieces))

    def wait(self) -> Batch:
        """Waits until the batch is complete, and returns it. Raises what a decoding thread raised."""
        others = dict(self.others)
        for piece in self.pieces:
            others |= piece.result()
        return Batch(
            step=self.step,
            images=self.images,
            labels=label_matrix(self.labels, others),
            sample_ids=self.sample_ids,
            datasets=self.datasets,
            weights=weight_matrix(self.labels, others) if self.has_weights else None,
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
        pin_memory: bool = False,
    ) -> None:
        self.config, self.seed, self.share, self.quarantine = config, seed, share, quarantine
        self._mixture = data.mixture(config, seed=seed)
        self._reader = StreamReader(config.reading)
        readers = map(self._reader.samples, data.datasets, orders)
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
        # At a request, the caller still holds the previous batch, and `steps_ahead` batches are being made.
        self._buffers = [
            torch.empty(shape, dtype=torch.uint8, pin_memory=pin_memory)
            for _ in range(config.steps_ahead + NUM_VALID_REQUESTS)
        ]
        pixels = late_crop_pixels(config.augment, image_size)
        self._settings = view_settings(config, size=image_size, resize_pixels=pixels)
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
        datasets, own = self._mixture.split(positions)
        places, read = np.zeros_like(positions), dict[int, RawBatch]()
        for number, source in enumerate(self._sources):
            entries = np.flatnonzero(datasets == number)
            if entries.size:
                places[entries], read[number] = np.arange(entries.size), source.reader.read(own[entries])
        planned = self._planned(datasets, places, read)
        labels, others = self._labels(planned)
        self._say_unused_weights(planned, others)
        images = self._buffers[step % len(self._buffers)]
        views = images.numpy()
        size = chunk_size(positions.size, num_threads=self._num_threads, steps_ahead=self.config.steps_ahead)
        pieces = [
            self._decoders.submit(partial(self._fill_all, planned, first, views[first : first + size]))
            for first in range(0, positions.size, size)
        ]
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
        )

    def _planned(
        self, datasets: NDArray[np.int64], places: NDArray[np.int64], read: Mapping[int, RawBatch]
    ) -> _Planned:
        """Returns the samples of all datasets in the order of the batch."""
        epochs, table = np.empty(datasets.size, dtype=np.int64), np.empty(datasets.size, dtype=SAMPLE)
        for number, raw in read.items():
            entries = datasets == number
            for name in ("sample_id", "crc32", "height", "width", "orientation"):
                table[name][entries] = raw.table[name]
            table["data"][entries], table["num_bytes"][entries] = raw.addresses, raw.table["size"]
            epochs[entries] = raw.epochs
            for epoch in set(raw.epochs.tolist()):
                chosen = entries & (epochs == epoch)
                table["crop_key"][chosen] = CROPS.key(self._sources[number].seed, epoch)
                table["operation_key"][chosen] = OPERATIONS.key(self._sources[number].seed, epoch)
        return _Planned(table=table, sources=datasets, places=places, epochs=epochs, read=read)

    def _labels(self, planned: _Planned) -> tuple[NDArray[np.int64], dict[int, Labels]]:
        """Returns the labels of the samples, in the form of `_Coming.labels` and `_Coming.others`."""
        labels, others = np.full(planned.sources.size, -1, dtype=np.int64), dict[int, Labels]()
        for number, raw in planned.read.items():
            known, entries = self._sources[number].labels, np.flatnonzero(planned.sources == number)
            own = raw.table["label"]
            labels[entries[own >= 0]] = known[own[own >= 0]]
            for place in np.flatnonzero(raw.table["has_more_labels"]).tolist():
                of_sample, weights = raw.labels_of(place)
                others[int(entries[place])] = known[list(of_sample)], weights
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

    def _fill_all(self, planned: _Planned, first: int, views: NDArray[np.uint8]) -> dict[int, Labels]:
        """Makes the views of the samples from `first` on, in one call of the library. Samples that it leaves out are
        made one by one in Python; their labels are returned, by entry."""
        self._check_open()
        began = time.monotonic()
        self.quarantine.count(len(views))
        are_done = train_views(planned.table[first : first + len(views)], self._settings, out=views)
        has_colours = self.config.augment.num_colour_draws > 0
        found = dict[int, Labels]()
        left = np.arange(len(views)) if has_colours else np.flatnonzero(~are_done)
        for entry, draws in self._draws_of(planned, first + left).items():
            self._check_open()
            number = entry - first
            source = self._sources[int(planned.sources[entry])]
            if not (are_done[number] and self._is_recoloured(views[number], draws)):
                used = self._fill(source, planned.sample(entry), draws, views[number])
                found[entry] = source.labels[list(used.labels)], used.weights
        planned.work_seconds.append(time.monotonic() - began)
        return found

    def _draws_of(self, planned: _Planned, entries: NDArray[np.int64]) -> dict[int, _Draws]:
        """Returns the draws of these samples of a batch, by entry."""
        found = dict[int, _Draws]()
        for number in set(planned.sources[entries].tolist()):
            chosen, seed = entries[planned.sources[entries] == number], self._sources[number].seed
            ids, epochs = planned.table["sample_id"][chosen], planned.epochs[chosen]
            crops = draws_of(ids, epochs, seed=seed)
            num_colours, num_operations = self.config.augment.num_colour_draws, self.config.randaugment.num_draws
            colours = draws_of(ids, epochs, seed=seed, purpose=COLOURS, num_draws=num_colours)
            operations = draws_of(ids, epochs, seed=seed, purpose=OPERATIONS, num_draws=num_operations)
            for entry, crop, colour, operation in zip(chosen.tolist(), crops, colours, operations, strict=True):
                found[entry] = _Draws(crop=crop, colours=colour, operations=operation)
        return found

    def _recolour(self, view: Pixels, draws: _Draws) -> None:
        """Applies 3-Augment, the colour jitter and RandAugment, if they are on. Raises DecodeError."""
        with image_faults():
            if self.config.augment.num_colour_draws:
                view[...] = recoloured(view, draws.colours, config=self.config.augment)
            if self.config.randaugment.num_ops:
                view[...] = randaugment(view, draws.operations, config=self.config.randaugment)

    def _is_recoloured(self, view: Pixels, draws: _Draws) -> bool:
        try:
            self._recolour(view, draws)
        except DecodeError:
            return False
        return True

    def _check_open(self) -> None:
        if self._reader.is_closed:
            raise CancelledError("the batches are closed")

    def _fill(self, source: _Source, sample: RawSample, draws: _Draws, view: Pixels) -> RawSample:
        """Writes the view of the sample into `view` and returns the sample. An unusable sample is replaced by a
        substitute, which depends only on the seed and the sample's id. Raises WillNotSucceedError if _MAX_SUBSTITUTES
        in a row are unusable."""
        url, original = source.dataset.url, sample.sample_id
        for number in range(_MAX_SUBSTITUTES + 1):
            sample = self._view(source.dataset, sample, draws, view)
            if not sample.fault:
                return sample
            if number == _MAX_SUBSTITUTES:
                break
            self._check_open()
            substitute = SUBSTITUTES.key(self.seed, original, number) % source.dataset.num_samples
            was, now = source.dataset.packed_ids(np.array([sample.sample_id, substitute])).tolist()
            named = replace(sample, sample_id=was)
            is_lost = source.dataset.has_lost(sample.sample_id)
            self.quarantine.replace(named, url=url, substitute=now, is_first=number == 0, is_lost=is_lost)
            sample = read_sample(source.dataset, substitute)
        raise WillNotSucceedError(
            f"{_MAX_SUBSTITUTES} substitutes in a row could not be used in {url}; run: patchline verify {url} --deep"
        )

    def _view(self, dataset: Dataset, sample: RawSample, draws: _Draws, view: Pixels) -> RawSample:
        """Decodes, crops and recolours a sample into `view`, and returns the sample. If that fails, its bytes are read
        again once. An unusable sample is returned with a `fault`."""
        sample = verified(dataset, sample)
        for is_second in (False, True):
            if sample.data is None:
                return sample
            try:
                train_view(
                    sample,
                    draws.crop,
                    config=self.config.augment,
                    out=view,
                    limits=dataset.manifest.limits,
                )
                self._recolour(view, draws)
            except DecodeError as error:
                sample = replace(sample, fault=f"decode: {error}") if is_second else refetched(dataset, sample)
            else:
                return sample
        return sample


def _has_succeeded(task: Future[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
