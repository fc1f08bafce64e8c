"""Few-shot accuracy of a frozen representation: a linear classifier from a few images of each class.

The classifier is fitted by ridge regression and, as a cross-check, by a linear probe, over several choices of images.
First all ranks compute the representations (`represented`); then one rank computes `measured`, a pure function.

The representation is the input of the model's head. For a ViT it is y of equation 4 (the class token after the last
LayerNorm, or the mean over all tokens), after the hidden layer of pre-training if the model has one: big_vision's
`pre_logits`. With a distillation token it is the mean of this token and the class token, as in timm. For a BiT ResNet
it is the mean over the last map. For a model of masked patches it is the mean over the patches after the last
LayerNorm, since the class token of such a model is not trained.

Each class's samples are ranked by a keyed hash of their ids, and the first k are its k shots. So 5 shots are always
among the 10 shots of the same seed, and the choice does not depend on the order in which samples are read.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.data.batches import Batch
from pipeline.data.config import Share
from pipeline.data.evaluation import BeforeBatch, a_batch_late, evaluation_batches, taken, unasked
from pipeline.evaluation.classifiers import fit_probe, fit_ridge
from pipeline.evaluation.config import FewshotConfig, FewshotImages, FewshotInTraining, FewshotTransform
from pipeline.models.build import Model
from pipeline.models.vit import ViT
from pipeline.ranks.collectives import gather_rows
from pipeline.ranks.streams import ReadBack, read_back, streams_of
from pipeline.ranks.world import World
from pipeline.shared_settings import EvaluationTransform
from shards.dataset import Dataset, open_dataset
from shards.errors import UserError
from shards.hashing import SHOTS, hash_array
from shards.host_copy import LocalRanks
from shards.output.progress import Progress
from shards.output.terminal import printable_name
from shards.part import labels_of, opened_parts, refuse_too_few

Ids = NDArray[np.int64]
_WHAT = "a few-shot measurement"


@dataclass(frozen=True, kw_only=True)
class FewshotData:
    """The shots of each seed, int64[K, most shots] sample ids each, and the test images with their labels."""

    train: Dataset
    test: Dataset
    shots: tuple[Ids, ...]
    test_labels: Ids

    @property
    def train_ids(self) -> Ids:
        """The ids of all samples that are shots for some seed, in ascending order."""
        return np.unique(np.concatenate([one.ravel() for one in self.shots]))


@dataclass(frozen=True, kw_only=True)
class Represented:
    """Features of shots, float32[seeds, K, most shots, D], and of test images, float32[N, D], with their labels."""

    shots: torch.Tensor
    test: torch.Tensor
    test_labels: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class ShotScores:
    """The accuracies for each seed with `shots` images per class. The probe's accuracies are empty if no probe was
    requested."""

    shots: int
    ridge: tuple[float, ...]
    probe: tuple[float, ...] = ()
    probe_l2: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FewshotScores:
    """The scores for each number of shots. `chance`: the share of the most frequent label among the images that are
    measured on. `width`: the width of the representation."""

    num_classes: int
    num_test_images: int
    chance: float
    width: int
    results: tuple[ShotScores, ...]


def open_splits(
    images: FewshotImages | FewshotInTraining, *, group: str, ranks: LocalRanks | None = None
) -> tuple[Dataset, Dataset]:
    """Opens the dataset to take the shots from, and the dataset to measure on: the held-out part of the first,
    `test_url`, or URL-test.

    `group`: the prefix of the flags in messages. `ranks`: the ranks of this host that open the datasets, too. Raises a
    UserError that says where the second was looked for.
    """
    train, held_out = opened_parts(open_dataset(images.url, ranks=ranks), images.subset, images.held_out)
    if held_out and images.test_url:
        raise UserError(f"--{group}.held-out and --{group}.test-url both say what to measure on; give one of them")
    if held_out:
        return train, held_out
    if images.test_url:
        return train, open_dataset(images.test_url, ranks=ranks)
    test_url = f"{images.url.rstrip('/')}-test"
    try:
        return train, open_dataset(test_url, ranks=ranks)
    except UserError as error:
        message = f"no dataset to measure on at {test_url!r}: give it as --{group}.test-url ({error})"
        raise UserError(message) from error


def chosen_data(train: Dataset, test: Dataset, config: FewshotConfig) -> FewshotData:
    """Reads both indices and chooses the shots. Raises UserError for too few images or labels that do not fit."""
    numbers = {name: number for number, name in enumerate(train.label_names)}
    unknown = [name for name in test.label_names if name not in numbers]
    if unknown:
        raise UserError(
            f"{test.url} has {len(unknown)} classes that {train.url} lacks, for example {printable_name(unknown[0])!r};"
            " give the two splits of one dataset"
        )
    labels, most = labels_of(train, what=_WHAT), max(config.shots)
    refuse_too_few(labels, train.label_names, least=most, flag=f"{config.shots_flag} {most}", url=train.url)
    test_labels = labels_of(test, what=_WHAT)
    if not test_labels.size:
        raise UserError(f"{test.url} has no images to measure on; give another dataset")
    return FewshotData(
        train=train,
        test=test,
        shots=tuple(
            chosen_shots(labels, num_classes=len(numbers), shots=most, seed=seed) for seed in range(config.seeds)
        ),
        test_labels=np.array([numbers[name] for name in test.label_names], dtype=np.int64)[test_labels],
    )


def chosen_shots(labels: Ids, *, num_classes: int, shots: int, seed: int) -> Ids:
    """Returns the sample ids of the shots, int64[num_classes, shots]: a row for each class, in the order of the hash.

    `labels`: the label of each sample id, 0 to num_classes - 1. Each class must have at least `shots` samples.
    """
    ids = np.arange(labels.size, dtype=np.int64)
    ranked = np.lexsort((ids, hash_array(ids, key=SHOTS.key(seed)), labels))
    nums = np.bincount(labels, minlength=num_classes)
    firsts = np.cumsum(nums) - nums
    chosen: Ids = ranked[firsts[:, None] + np.arange(shots)]
    return chosen


def transform_of(choice: FewshotTransform, of_weights: EvaluationTransform) -> EvaluationTransform:
    """Returns the transform of a few-shot measurement. Images are turned upright if the run's own evaluations do so."""
    return of_weights if choice == "weights" else EvaluationTransform(mode=choice, exif=of_weights.exif)


def represented(
    model: Model,
    data: FewshotData,
    *,
    transform: EvaluationTransform,
    batch_size: int,
    world: World,
    before_batch: BeforeBatch = unasked,
) -> Represented | None:
    """Computes the features of all images, each once.

    This is a collective: all ranks must call it. Returns None except on rank 0. All ranks have the same number of
    batches, and call `before_batch` before each.
    """
    ids = data.train_ids
    every_id = np.arange(data.test.num_samples, dtype=np.int64)
    train_ND, test_ND = (
        features_of(
            model,
            dataset,
            chosen,
            transform=transform,
            batch_size=batch_size,
            world=world,
            before_batch=before_batch,
        )
        for dataset, chosen in ((data.train, ids), (data.test, every_id))
    )
    if not world.is_first:
        return None
    places = torch.from_numpy(np.searchsorted(ids, np.stack(data.shots)))
    return Represented(shots=train_ND[places], test=test_ND, test_labels=torch.from_numpy(data.test_labels))


def features_of(
    model: Model,
    dataset: Dataset,
    sample_ids: NDArray[np.int64],
    *,
    transform: EvaluationTransform,
    batch_size: int,
    world: World,
    before_batch: BeforeBatch = unasked,
) -> torch.Tensor:
    """Returns the features on the CPU of rank 0, float32[N, D], a row for each id, in the order of the ids. Returns an
    empty tensor, [0, 0], on the other ranks.

    This is a collective: all ranks must call it, and they share the work. `batch_size`: the number of images per batch
    on each rank. `before_batch` is explained at BeforeBatch.
    """
    batches = evaluation_batches(
        dataset,
        batch_size=batch_size,
        image_size=model.config.image_size,
        transform=transform,
        share=Share(global_batch=batch_size * world.num_ranks, rank=world.rank, num_ranks=world.num_ranks),
        threads=world.num_threads,
        sample_ids=sample_ids,
    )
    kept = []
    total = sample_ids.size if world.is_first else 0
    with closing(batches), Progress("features", total, unit="images", says_end=False) as progress:
        for rows in a_batch_late(_launched(model, taken(batches, before_batch), world)):
            rows_BD = rows.arrived()  # on all ranks, so that none launches many batches ahead
            if world.is_first:
                kept.append(rows_BD.clone())  # pinned memory is scarce
                progress.advance(min(len(rows_BD), progress.total - progress.done))
    return torch.cat(kept)[: sample_ids.size] if kept else torch.zeros(0, 0)


def _launched(model: Model, batches: Iterator[tuple[Batch, torch.Tensor]], world: World) -> Iterator[ReadBack]:
    """Launches the model on each batch. Yields the features of all ranks' images, on their way to the host."""
    streams = streams_of(world.device)
    for batch, _ in batches:
        images = streams.pinned(batch.images).to(world.device, non_blocking=True)
        with torch.no_grad():
            rows_BD = gather_rows(before_head(model, images)[0].float())
        yield read_back(rows_BD, streams)


def before_head(model: Model, images_BHW3: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the input of the head, [B, D], and the model's output. With a distillation token, this is the mean of
    both heads' inputs, as in timm's forward_head. The whole model is called, since ZeRO-3 gathers parameters for the
    modules that are called."""
    kept: list[torch.Tensor] = []
    second = model.head_dist if isinstance(model, ViT) else None
    heads = [model.head] if second is None else [model.head, second]
    hooks = [head.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0])) for head in heads]
    try:
        output = model(images_BHW3)
    finally:
        for hook in hooks:
            hook.remove()
    if len(kept) > 1:
        return torch.stack(kept).mean(dim=0), output
    return kept[0].mean(dim=1) if kept[0].dim() == 3 else kept[0], output


def measured(found: Represented, config: FewshotConfig, *, device: torch.device) -> FewshotScores:
    """Returns the accuracies for each number of shots and each seed. This function is pure."""
    num_seeds, num_classes, _, width = found.shots.shape
    test_ND, test_labels_N = found.test.to(device), found.test_labels.to(device)
    with Progress("classifiers", num_seeds * len(config.shots), unit="fits", says_end=False) as progress:
        results = [
            _scores(
                found.shots[:, :, :shots].to(device), (test_ND, test_labels_N), config=config, advance=progress.advance
            )
            for shots in config.shots
        ]
    return FewshotScores(
        num_classes=num_classes,
        num_test_images=len(test_labels_N),
        chance=float(found.test_labels.bincount().max()) / len(test_labels_N),
        width=width,
        results=tuple(results),
    )


def _scores(
    seeds: torch.Tensor, test: tuple[torch.Tensor, torch.Tensor], *, config: FewshotConfig, advance: Callable[[], None]
) -> ShotScores:
    """Returns the scores with one number of shots. `seeds` holds the features for each seed: float32[seeds, K, shots,
    D]."""
    _, num_classes, shots, _ = seeds.shape
    labels_N = torch.arange(num_classes, device=seeds.device).repeat_interleave(shots)
    ridge, probe, strengths = [], [], []
    for features_KSD in seeds:
        classifier = fit_ridge(features_KSD.flatten(0, 1), labels_N, num_classes=num_classes, l2=config.l2)
        ridge.append(classifier.accuracy(*test))
        if config.probe:
            classifier, l2 = fit_probe(features_KSD)
            probe.append(classifier.accuracy(*test))
            strengths.append(l2)
        advance()
    return ShotScores(shots=shots, ridge=tuple(ridge), probe=tuple(probe), probe_l2=tuple(strengths))


def mean_and_deviation(accuracies: tuple[float, ...]) -> tuple[float, float]:
    """Returns the mean and the sample standard deviation over seeds. The deviation is 0 for one seed."""
    return statistics.fmean(accuracies), statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
