"""Evaluation batches: every sample, or a selection, once over all ranks. A mask tells samples from padding."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.data.batches import Batch, label_matrix, weight_matrix
from pipeline.data.config import Share
from pipeline.data.decode import DecodeError, Pixels
from pipeline.data.transform import evaluation_view
from pipeline.shared_settings import EvaluationTransform
from shards.class_names import class_name, listed
from shards.config import ReadConfig
from shards.dataset import Dataset
from shards.errors import UserError, WillNotSucceedError
from shards.order import BlockSlice
from shards.output.terminal import printable_name
from shards.pool import Pool
from shards.reading.read import StreamReader
from shards.reading.samples import RawSample, locate_row, read_slice, verified

_AHEAD = 2  # batches read and decoded while one is used
_READS = 16  # parallel reads of samples that are not neighbours
_FEW_SLICES = 2

BeforeBatch = Callable[[Exception | None], Callable[[], None]]
"""Called on every rank for each batch that it has read, with the error of reading it, if there is one, so that ranks
can agree to leave an evaluation together. Returns a function that is called before the batch is used. To leave, that
function raises an error; if it returns, the error of the batch is raised."""
Item = TypeVar("Item")


def unasked(_: Exception | None) -> Callable[[], None]:
    """Returns a function that does nothing: a `BeforeBatch` for a rank that does not ask the others."""
    return lambda: None


def taken(batches: Iterator[Item], before_batch: BeforeBatch) -> Iterator[Item]:
    """Yields the batches. Each batch is read before the previous one is yielded, and `before_batch` is called for it.

    So the ranks' agreement about a batch is launched before they use the previous batch, and reading it does not wait
    until the device has done that. A rank that cannot read a batch still takes part in the previous one."""
    following = _read(batches, before_batch)
    while True:
        batch, error, agree = following
        agree()
        if error:
            raise error
        if batch is None:
            return
        following = _read(batches, before_batch)
        yield batch


def _read(
    batches: Iterator[Item], before_batch: BeforeBatch
) -> tuple[Item | None, Exception | None, Callable[[], None]]:
    """Returns the next batch (None: there are no more) or the error of reading it, and what `before_batch` returns."""
    try:
        batch = next(batches, None)
    except Exception as error:
        return None, error, before_batch(error)
    return batch, None, unasked(None) if batch is None else before_batch(None)


def a_batch_late(launched: Iterator[Item]) -> Iterator[Item]:
    """Yields each item only after the next one has been launched, so that the device has work while the host waits for
    the outcome of the first, and uses it."""
    unread: list[Item] = []
    for item in launched:
        yield from unread
        unread = [item]
    yield from unread


def label_map(dataset: Dataset, known: tuple[str, ...]) -> NDArray[np.int64]:
    """Maps every label of the dataset to its number among the `known` names of a model. Raises UserError if one is
    unknown, or if there are none."""
    if not dataset.label_names:
        raise UserError(f"{dataset.url} has no labels to score a model with", todo="give a dataset that has")
    numbers = {class_name(name): number for number, name in enumerate(known)}
    unknown = [name for name in dataset.label_names if name not in numbers]
    if unknown:
        raise UserError(
            f"{dataset.url} has {len(unknown)} classes that the model was not trained on, for example {unknown[0]!r}; "
            f"the model knows {listed(known)}; "
            "give a dataset with its classes, fine-tune it on these, or name them in patchline evaluate --class-map"
        )
    return np.array([numbers[name] for name in dataset.label_names], dtype=np.int64)


def evaluation_batches(
    dataset: Dataset,
    *,
    batch_size: int,
    image_size: int,
    transform: EvaluationTransform,
    share: Share,
    threads: int,
    label_weights: bool = False,
    sample_ids: NDArray[np.int64] | None = None,
) -> Generator[tuple[Batch, torch.Tensor], None, None]:
    """Yields pairs (batch, mask) that hold every sample once over all ranks, with equally many batches on each rank.
    The mask, bool[n], is True for real samples; the others have labels and ids of -1. `label_weights`: whether batches
    have the weights of their labels. `sample_ids`: the samples to yield, in this order; None: all."""
    ids = np.arange(dataset.num_samples, dtype=np.int64) if sample_ids is None else sample_ids
    num_batches = -(-ids.size // (batch_size * share.num_ranks))
    reader = StreamReader(ReadConfig())
    ahead, decoders = reader.pool(_AHEAD, name="evaluate"), reader.pool(max(1, threads), name="decode")
    maker = _Maker(
        dataset=reader.dataset(dataset),
        sample_ids=ids,
        readers=reader.pool(_READS, name="read"),
        batch_size=batch_size,
        image_size=image_size,
        transform=transform,
        label_weights=label_weights,
    )
    coming: deque[Future[tuple[Batch, torch.Tensor]]] = deque()
    try:
        for step in range(num_batches):
            coming.append(ahead.submit(partial(maker.make, step, share, decoders)))
            if len(coming) > _AHEAD:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        reader.close()


@dataclass(frozen=True, kw_only=True)
class _Maker:
    dataset: Dataset
    sample_ids: NDArray[np.int64]
    readers: Pool
    batch_size: int
    image_size: int
    transform: EvaluationTransform
    label_weights: bool

    def make(self, step: int, share: Share, decoders: Pool) -> tuple[Batch, torch.Tensor]:
        """Returns this rank's batch number `step` and its mask."""
        first = (step * share.num_ranks + share.rank) * self.batch_size
        ids = self.sample_ids[first : first + self.batch_size]
        images = np.zeros((self.batch_size, self.image_size, self.image_size, 3), dtype=np.uint8)
        samples = self._read(ids)
        views = [
            decoders.submit(partial(self._view, sample, view)) for sample, view in zip(samples, images, strict=False)
        ]
        for view in views:
            view.result()
        labels = {row: (np.array(one.labels, dtype=np.int64), one.weights) for row, one in enumerate(samples)}
        none = np.full(self.batch_size, -1, dtype=np.int64)
        padded_ids = none.copy()
        padded_ids[: ids.size] = ids
        batch = Batch(
            step=step,
            images=torch.from_numpy(images),
            labels=label_matrix(none, labels),
            sample_ids=torch.from_numpy(padded_ids),
            datasets=torch.zeros(self.batch_size, dtype=torch.int64),
            weights=weight_matrix(none, labels) if self.label_weights else None,
        )
        return batch, torch.arange(self.batch_size) < len(samples)

    def _read(self, ids: NDArray[np.int64]) -> list[RawSample]:
        """Reads the samples with these ids; groups of neighbouring samples are read in parallel."""
        slices = list(_slices(self.dataset, ids))
        if len(slices) <= _FEW_SLICES:
            return [sample for one in slices for sample in read_slice(self.dataset, one)]
        reads = [self.readers.submit(partial(read_slice, self.dataset, one)) for one in slices]
        return [sample for read in reads for sample in read.result()]

    def _view(self, sample: RawSample, view: Pixels) -> None:
        sample = verified(self.dataset, sample)
        if sample.data is None:
            raise self._damaged(sample, sample.fault)
        try:
            evaluation_view(sample, self.transform, out=view, limits=self.dataset.manifest.limits)
        except DecodeError as error:
            raise self._damaged(sample, f"decode: {error}") from error

    def _damaged(self, sample: RawSample, reason: str) -> WillNotSucceedError:
        url, number = self.dataset.url, int(self.dataset.packed_ids(np.array([sample.sample_id]))[0])
        source = self.dataset.source_of(*locate_row(self.dataset, sample.sample_id))
        return WillNotSucceedError(
            f"{url}: sample {number} ({printable_name(source)}): {reason}; an evaluation needs every sample; "
            f"run: patchline verify {url} --deep"
        )


def _slices(dataset: Dataset, ids: NDArray[np.int64]) -> Iterator[BlockSlice]:
    """Cuts the ids, in their order, into runs of samples that are neighbours in one shard."""
    shards = np.searchsorted(dataset.first_sample_ids, ids, side="right")
    cuts = np.flatnonzero((np.diff(ids) != 1) | (np.diff(dataset.packed_ids(ids)) != 1) | (np.diff(shards) != 0)) + 1
    for run in np.split(ids, cuts):
        if run.size:
            yield BlockSlice(first_sample_id=int(run[0]), num_samples=run.size)
