"""Evaluation batches: every sample exactly once over all ranks, with a mask where the last batch is short."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.data.batches import Batch
from pipeline.data.config import Share
from pipeline.data.decode import DecodeError, Pixels
from pipeline.data.label_matrices import label_matrix, weight_matrix
from pipeline.data.transform import evaluation_view
from pipeline.evaluation_transform import EvaluationTransform
from shards.dataset import Dataset
from shards.errors import UserError, WillNotSucceedError
from shards.order import BlockSlice
from shards.pool import Pool
from shards.read import RawSample, locate_row, read_slice, verified
from shards.read_config import ReadConfig
from shards.stream_reader import StreamReader

_AHEAD = 2  # batches read and decoded while one is used


def label_map(dataset: Dataset, known: tuple[str, ...]) -> NDArray[np.int64]:
    """For every label of the dataset, its number among the `known` names of a model; UserError if one is unknown."""
    numbers = {name: number for number, name in enumerate(known)}
    unknown = [name for name in dataset.label_names if name not in numbers]
    if unknown:
        raise UserError(
            f"{dataset.url} has {len(unknown)} classes that the model was not trained on, for example {unknown[0]!r}; "
            f"the model knows {', '.join(known[:5])}{', ...' if len(known) > 5 else ''}"
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
) -> Generator[tuple[Batch, torch.Tensor], None, None]:
    """Every sample once over all ranks, in equally many batches per rank: (batch, bool[n] mask of real samples).
    `label_weights`: batches have the weights of their labels."""
    num_batches = -(-dataset.num_samples // (batch_size * share.num_ranks))
    reader = StreamReader(ReadConfig())
    ahead, decoders = reader.pool(_AHEAD, name="evaluate"), reader.pool(max(1, threads), name="decode")
    maker = _Maker(
        dataset=reader.dataset(dataset),
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
    batch_size: int
    image_size: int
    transform: EvaluationTransform
    label_weights: bool

    def make(self, step: int, share: Share, decoders: Pool) -> tuple[Batch, torch.Tensor]:
        """This rank's batch number `step`, with its mask."""
        first = (step * share.num_ranks + share.rank) * self.batch_size
        ids = np.arange(first, min(first + self.batch_size, self.dataset.num_samples), dtype=np.int64)
        images = np.zeros((self.batch_size, self.image_size, self.image_size, 3), dtype=np.uint8)
        samples = [sample for one in _slices(self.dataset, ids) for sample in read_slice(self.dataset, one)]
        views = [
            decoders.submit(partial(self._view, sample, view)) for sample, view in zip(samples, images, strict=False)
        ]
        for view in views:
            view.result()
        labels = [(np.array(sample.labels, dtype=np.int64), sample.weights) for sample in samples]
        labels += [(np.array([], dtype=np.int64), ())] * (self.batch_size - len(samples))
        batch = Batch(
            step=step,
            images=torch.from_numpy(images),
            labels=label_matrix(labels),
            sample_ids=ids,
            datasets=np.zeros_like(ids),
            weights=weight_matrix(labels) if self.label_weights else None,
        )
        return batch, torch.arange(self.batch_size) < len(samples)

    def _view(self, sample: RawSample, view: Pixels) -> None:
        sample = verified(self.dataset, sample)
        if sample.data is None:
            raise self._damaged(sample, sample.fault)
        try:
            evaluation_view(sample, self.transform, out=view)
        except DecodeError as error:
            raise self._damaged(sample, f"decode: {error}") from error

    def _damaged(self, sample: RawSample, reason: str) -> WillNotSucceedError:
        url, number = self.dataset.url, sample.sample_id
        source = self.dataset.source_of(*locate_row(self.dataset, number))
        return WillNotSucceedError(
            f"{url}: sample {number} ({source}): {reason}; an evaluation needs every sample; "
            f"run: patchline verify {url} --deep"
        )


def _slices(dataset: Dataset, ids: NDArray[np.int64]) -> Iterator[BlockSlice]:
    """Consecutive ids as runs that lie in one shard."""
    shards = np.searchsorted(dataset.first_sample_ids, ids, side="right")
    for shard in np.unique(shards):
        own = ids[shards == shard]
        yield BlockSlice(first_sample_id=int(own[0]), num_samples=own.size)
