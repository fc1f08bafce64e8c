"""Evaluation batches: every sample exactly once over all ranks, with a mask where the last batch is short."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.data.augment import EvaluationTransform, evaluation_view
from pipeline.data.batches import Batch, Share, label_matrix, most_labels
from pipeline.data.decode import DecodeError, Pixels, decode_rgb
from shards.dataset import Dataset
from shards.errors import UserError, WillNotSucceedError
from shards.order import BlockPart
from shards.read import RawSample, checked_sample, read_part


def label_map(dataset: Dataset, known: tuple[str, ...]) -> NDArray[np.int64]:
    """For every label of the dataset its number among the `known` names of a model; UserError where one is unknown."""
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
) -> Iterator[tuple[Batch, torch.Tensor]]:
    """Every sample exactly once over all ranks, in equally many batches a rank: (batch, bool[n] mask of real ones)."""
    num_batches = -(-dataset.num_samples // (batch_size * share.num_ranks))
    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="decode") as pool:
        for step in range(num_batches):
            first = (step * share.num_ranks + share.rank) * batch_size
            ids = np.arange(first, min(first + batch_size, dataset.num_samples), dtype=np.int64)
            images = np.zeros((batch_size, image_size, image_size, 3), dtype=np.uint8)
            samples = [sample for part in _parts(dataset, ids) for sample in _read_checked(dataset, part)]
            views = [images[entry] for entry in range(len(samples))]
            list(pool.map(lambda sample, view: _evaluate_one(sample, transform, view, url=dataset.url), samples, views))
            labels = torch.full((batch_size, most_labels(samples)), -1, dtype=torch.int64)
            if samples:
                labels[: len(samples)] = label_matrix(samples)
            batch = Batch(step=step, images=torch.from_numpy(images), labels=labels, sample_ids=ids)
            yield batch, torch.arange(batch_size) < len(samples)


def _evaluate_one(sample: RawSample, transform: EvaluationTransform, view: Pixels, *, url: str) -> None:
    if sample.data is None:
        raise _damaged(sample, sample.fault, url=url)
    try:
        evaluation_view(decode_rgb(sample.data, orientation=sample.orientation), transform, out=view)
    except DecodeError as error:
        raise _damaged(sample, f"decode: {error}", url=url) from error


def _damaged(sample: RawSample, reason: str, *, url: str) -> WillNotSucceedError:
    where = f"{url}: sample {sample.sample_id} ({sample.source})"
    return WillNotSucceedError(
        f"{where}: {reason}; an evaluation needs every sample; run: patchline verify {url} --deep"
    )


def _parts(dataset: Dataset, ids: NDArray[np.int64]) -> Iterator[BlockPart]:
    """Consecutive ids as runs that lie in one shard."""
    shards = np.searchsorted(dataset.first_sample_ids, ids, side="right")
    for shard in np.unique(shards):
        own = ids[shards == shard]
        yield BlockPart(block=-1, first_sample_id=int(own[0]), num_samples=own.size)


def _read_checked(dataset: Dataset, part: BlockPart) -> list[RawSample]:
    bodies = read_part(dataset, part)
    return [checked_sample(dataset, part.first_sample_id + i, body) for i, body in enumerate(bodies)]
