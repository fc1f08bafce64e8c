"""Batches of uint8 images in the planned order, decoded and augmented in threads a few steps ahead.

One thread plans: it takes the samples of a step from the reader and hands them to the decoding threads, which write
directly into the batch's buffer. No worker process, no shared memory, no lock file: a killed run leaves nothing.
"""

import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.data.augment import draws_of
from pipeline.data.config import DataConfig, Share
from pipeline.data.decode import DecodeError, Pixels
from pipeline.data.label_matrices import Labels, label_matrix, weight_matrix
from pipeline.data.quarantine import Quarantine
from pipeline.data.randaugment import randaugment
from pipeline.data.skipped import Skipped, data_step_of
from pipeline.data.three_augment import recoloured
from pipeline.data.training_data import TrainingData
from pipeline.data.transform import train_view
from shards.dataset import Dataset
from shards.errors import WillNotSucceedError
from shards.hashing import COLOURS, OPERATIONS, SUBSTITUTES, Purpose, uniforms
from shards.order import SampleOrder
from shards.reading.read import RawSample, SampleReader, read_sample, refetched, verified
from shards.reading.stream_reader import TRAFFIC_NAMES, StreamReader

log = logging.getLogger(__name__)
NUM_VALID_REQUESTS = 2  # a batch's buffer is refilled on the second request after its own
_MAX_SUBSTITUTES = 20
_CHUNKS_A_THREAD = 4  # per batch: few enough to be cheap, many enough to balance the threads
COUNT_NAMES = (*TRAFFIC_NAMES, "samples", "replaced", "held_bytes")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A rank's step: images uint8[n, size, size, 3], labels int64[n, most labels] padded with -1, ids int64[n].

    `images` is a buffer that is reused: it is valid until two more batches have been requested. `datasets` int64[n]:
    each sample's dataset in a mix. `weights` float32[n, most labels]: those of the labels, NO_WEIGHT in the rows of
    samples without weights; None if they are not to be used.
    """

    step: int
    images: torch.Tensor
    labels: torch.Tensor
    sample_ids: NDArray[np.int64]
    datasets: NDArray[np.int64]
    weights: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class _Source:
    """One of the datasets that are read."""

    dataset: Dataset
    reader: SampleReader
    labels: NDArray[np.int64]
    seed: int


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """One sample to decode: its dataset, its bytes and its random draws."""

    source: _Source
    sample: RawSample
    crop_draws: NDArray[np.float64]
    colour_draws: NDArray[np.float64]
    operation_draws: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class _Coming:
    """A batch whose samples are being decoded."""

    step: int
    images: torch.Tensor
    sample_ids: NDArray[np.int64]
    datasets: NDArray[np.int64]
    pieces: list[Future[list[Labels]]]
    has_weights: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether all samples are decoded, and none has failed."""
        return all(map(_has_succeeded, self.pieces))

    def wait(self) -> Batch:
        """The batch once it is complete; raises what a decoding thread raised."""
        found = [labels for piece in self.pieces for labels in piece.result()]
        return Batch(
            step=self.step,
            images=self.images,
            labels=label_matrix(found),
            sample_ids=self.sample_ids,
            datasets=self.datasets,
            weights=weight_matrix(found) if self.has_weights else None,
        )


class TrainBatches:
    """A rank's batches from any step, without end. Close it when done.

    While one is used, `steps_ahead` more are read and decoded.
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
        # When a batch is requested, the caller still has the one before, and `steps_ahead` are being made.
        self._buffers = [
            torch.empty(shape, dtype=torch.uint8, pin_memory=pin_memory)
            for _ in range(config.steps_ahead + NUM_VALID_REQUESTS)
        ]
        self._has_warned = False
        self._waiting: deque[Future[_Coming]] = deque()
        self._num_threads = max(1, config.num_threads)
        self._decoders = self._reader.pool(self._num_threads, name="decode")
        self._planner = self._reader.pool(1, name="plan")  # one: steps are read in rising order

    def __call__(self, start_step: int, *, skipped: Skipped = ()) -> Iterator[Batch]:
        """Batches of steps start_step, start_step + 1, ..., without the skipped data steps."""
        waiting = self._waiting = deque()
        for step in count(start_step):
            waiting.append(self._planner.submit(partial(self._plan, step, data_step_of(step, skipped))))
            if len(waiting) > self.config.steps_ahead:
                yield waiting.popleft().result().wait()

    @property
    def is_ready(self) -> bool:
        """Whether a request for the next batch would neither wait nor fail."""
        return bool(self._waiting) and _has_succeeded(self._waiting[0]) and self._waiting[0].result().is_complete

    def counts(self) -> dict[str, float]:
        """The counts by name of COUNT_NAMES: requests, bytes, retries and replaced samples so far, and the bytes held
        now."""
        return self._reader.counts() | {
            "samples": self.quarantine.num_read,
            "replaced": self.quarantine.num_replaced,
            "held_bytes": float(self._reader.held_bytes),
        }

    def close(self) -> None:
        """Stops reads and threads within about a second. The thread of a stalled read ends when the read times out."""
        self._reader.close()

    def _plan(self, step: int, data_step: int) -> _Coming:
        """Takes the samples of a data step from the readers and hands them to the decoding threads."""
        share = self.share
        order = self._sources[0].reader.order
        positions = order.positions(data_step, share.global_batch, share.rank, share.num_ranks)
        datasets, own = self._mixture.split(positions)
        planned: list[_Planned | None] = [None] * positions.size
        for number, source in enumerate(self._sources):
            entries = np.flatnonzero(datasets == number)
            if entries.size:
                for entry, item in zip(entries.tolist(), self._planned(source, own[entries]), strict=True):
                    planned[entry] = item
        items = [item for item in planned if item is not None]
        self._say_unused_weights(items)
        images = self._buffers[step % len(self._buffers)]
        views = images.numpy()
        size = -(-len(items) // (_CHUNKS_A_THREAD * self._num_threads))
        pieces = [
            self._decoders.submit(partial(self._fill_all, items[first : first + size], views[first : first + size]))
            for first in range(0, len(items), size)
        ]
        ids = np.array([item.sample.sample_id for item in items], dtype=np.int64)
        return _Coming(
            step=step,
            images=images,
            sample_ids=ids,
            datasets=datasets,
            pieces=pieces,
            has_weights=self.config.label_weights,
        )

    def _say_unused_weights(self, items: list[_Planned]) -> None:
        """One warning if labels have weights that are not used."""
        is_first = self.share.rank == 0 and not (self.config.label_weights or self._has_warned)
        found = next((item for item in items if item.sample.weights), None) if is_first else None
        if found:
            self._has_warned = True
            where = found.source.dataset.url
            log.warning("labels of %s have weights, which are not used: --data.label-weights uses them", where)

    def _planned(self, source: _Source, positions: NDArray[np.int64]) -> list[_Planned]:
        raw = source.reader.read(positions)
        ids = np.array([sample.sample_id for sample in raw.samples], dtype=np.int64)
        crops = draws_of(ids, raw.epochs, seed=source.seed)
        colours = _draws(COLOURS, self.config.augment.num_colour_draws, ids, raw.epochs, seed=source.seed)
        operations = _draws(OPERATIONS, self.config.randaugment.num_draws, ids, raw.epochs, seed=source.seed)
        return [
            _Planned(source=source, sample=sample, crop_draws=crop, colour_draws=colour, operation_draws=operation)
            for sample, crop, colour, operation in zip(raw.samples, crops, colours, operations, strict=True)
        ]

    def _fill_all(self, items: list[_Planned], views: NDArray[np.uint8]) -> list[Labels]:
        self.quarantine.count(len(items))
        labels = []
        for item, view in zip(items, views, strict=True):
            self._check_open()
            labels.append(self._fill(item, view))
        return labels

    def _check_open(self) -> None:
        if self._reader.is_closed:
            raise CancelledError("the batches are closed")

    def _fill(self, item: _Planned, view: Pixels) -> Labels:
        """Writes the pixels of the sample or of its substitute, a function of the sample's id; returns its labels."""
        source, sample = item.source, item.sample
        url, original = source.dataset.url, item.sample.sample_id
        for number in range(_MAX_SUBSTITUTES + 1):
            sample = self._view(sample, item, view)
            if not sample.fault:
                if self.config.augment.num_colour_draws:
                    view[...] = recoloured(view, item.colour_draws, config=self.config.augment)
                if self.config.randaugment.num_ops:
                    view[...] = randaugment(view, item.operation_draws, config=self.config.randaugment)
                return source.labels[list(sample.labels)], sample.weights
            if number == _MAX_SUBSTITUTES:
                break
            self._check_open()
            substitute = SUBSTITUTES.key(self.seed, original, number) % source.dataset.num_samples
            was, now = source.dataset.packed_ids(np.array([sample.sample_id, substitute])).tolist()
            named = replace(sample, sample_id=was)
            self.quarantine.replace(named, url=url, substitute=now, is_first=number == 0)
            sample = read_sample(source.dataset, substitute)
        raise WillNotSucceedError(
            f"{_MAX_SUBSTITUTES} substitutes in a row could not be used in {url}; run: patchline verify {url} --deep"
        )

    def _view(self, sample: RawSample, item: _Planned, view: Pixels) -> RawSample:
        """Decodes and crops into `view`; bytes that fail are read again once. An unusable sample has a `fault`."""
        dataset, sample = item.source.dataset, verified(item.source.dataset, sample)
        for is_second in (False, True):
            if sample.data is None:
                return sample
            try:
                train_view(sample, item.crop_draws, config=self.config.augment, out=view)
            except DecodeError as error:
                sample = replace(sample, fault=f"decode: {error}") if is_second else refetched(dataset, sample)
            else:
                return sample
        return sample


def _draws(
    purpose: Purpose, num_draws: int, ids: NDArray[np.int64], epochs: NDArray[np.int64], *, seed: int
) -> NDArray[np.float64]:
    """float64[n, num_draws]; [n, 0] if what they are for is off."""
    draws = np.empty((ids.size, num_draws))
    for epoch in np.unique(epochs) if draws.size else ():
        key = purpose.key(seed, int(epoch))
        draws[epochs == epoch] = uniforms(ids[epochs == epoch], num_draws, key=key)
    return draws


def _has_succeeded(task: Future[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
