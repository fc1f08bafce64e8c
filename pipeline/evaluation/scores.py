"""Computes the accuracy over a whole dataset: every sample is counted exactly once, in sums that the ranks add up.

Also collects images to look at: some that the model gets right, and its most confident mistakes.
"""

import heapq
import io
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from pipeline.data.batches import Batch
from pipeline.data.config import Share
from pipeline.data.evaluation import BeforeBatch, a_batch_late, evaluation_batches, taken, unasked
from pipeline.evaluation.config import EvaluatedData, EvaluationConfig
from pipeline.evaluation.targets import Targets, answers, by_name, counted_labels
from pipeline.models.loss import classification_loss, weighted_targets
from pipeline.ranks.collectives import gather_json, summed
from pipeline.ranks.streams import ReadBack, read_back, streams_of
from pipeline.ranks.world import World
from pipeline.shared_settings import EvaluationTransform, LossName
from shards.dataset import Dataset
from shards.errors import UserError
from shards.hashing import EXAMPLES, hash_array
from shards.output.progress import Progress

_MOST_SIDE = 160  # pixels
_SMALL_SIDE = 64  # pixels; images up to this side are kept without loss
_QUALITY = 88
_BINS = 15  # bins of confidence, as in Guo et al., "On Calibration of Modern Neural Networks", 2017
_MOST_CELLS = 1 << 22  # the most entries of the confusion matrix: enough for 2,000 classes
log = logging.getLogger(__name__)


class Counts:
    """Sums in float64 over images. `num_groups`: the number of the dataset's labels. `num_classes`: the number of the
    model's classes.

    An image with several labels counts for each of them, and as right if the highest logit is one of its targets.
    Images without a target are counted, but not scored. `loss`: the sum over images with a target.
    """

    def __init__(self, *, num_groups: int, num_classes: int) -> None:
        self.images, self.scored, self.right, self.right_in_five, self.loss = torch.zeros(5, dtype=torch.float64)
        self.of_group = torch.zeros(2, num_groups, dtype=torch.float64)  # images, right ones
        self.of_bin = torch.zeros(3, _BINS, dtype=torch.float64)  # images, summed confidence, right ones
        cells = num_groups * num_classes
        # For each pair of a label and an answer: all images, and those that are right. With ReaL's lists or several
        # labels, only some images of a pair may be right.
        self.confusion, self.confusion_right = torch.zeros(2, cells if cells <= _MOST_CELLS else 0, dtype=torch.float64)
        self.num_groups, self.num_classes = num_groups, num_classes

    def add(
        self, logits_BK: torch.Tensor, targets_BL: torch.Tensor, groups_BL: torch.Tensor, *, confidence_B: torch.Tensor
    ) -> None:
        """Adds images whose right classes are `targets_BL`, padded with -1, and whose labels are `groups_BL`."""
        said_B, is_scored_B, right_B = answers(logits_BK, targets_BL)
        self.images += len(targets_BL)
        self.scored += is_scored_B.sum()
        best_B5 = logits_BK.topk(min(5, self.num_classes), dim=1).indices
        in_five_B = (best_B5[:, :, None] == targets_BL[:, None, :]).flatten(start_dim=1).any(dim=1) & is_scored_B
        self.right += right_B.sum()
        self.right_in_five += (in_five_B | right_B).sum()
        bins_B = (confidence_B * _BINS).nan_to_num(nan=0.0).clamp(0, _BINS - 1).long()[is_scored_B]
        weighted = torch.stack([torch.ones_like(confidence_B), confidence_B, right_B.to(confidence_B.dtype)])
        self.of_bin.index_add_(1, bins_B, weighted[:, is_scored_B].double())
        images, places = torch.nonzero((groups_BL >= 0) & is_scored_B[:, None], as_tuple=True)
        groups = groups_BL[images, places]
        counted = torch.stack([torch.ones(len(images)), right_B[images].float()]).double()
        self.of_group.index_add_(1, groups, counted)
        if self.confusion.numel():
            cells = groups * self.num_classes + said_B[images]
            self.confusion.index_add_(0, cells, torch.ones(len(cells), dtype=torch.float64))
            self.confusion_right.index_add_(0, cells, right_B[images].double())

    def over_ranks(self, device: torch.device) -> None:
        """Adds up the sums of all ranks, on every rank. This is a collective: all ranks must call it."""
        scalars, tables = ("images", "scored", "right", "right_in_five", "loss"), ("of_group", "of_bin")
        names = (*scalars, *tables, "confusion", "confusion_right")
        parts = [getattr(self, name) for name in names]
        total = summed(torch.cat([part.reshape(-1) for part in parts]), device=device)
        for name, part, own in zip(names, parts, torch.split(total, [part.numel() for part in parts]), strict=True):
            setattr(self, name, own.reshape(part.shape))

    def chance(self) -> float:
        """Returns the accuracy of giving the same answer for all images: the share of the most frequent label."""
        return float(self.of_group[0].max() / self.scored)

    def mean_per_class(self) -> float:
        """Returns the mean over the labels of each label's share of right images; NaN if no label has images."""
        images, right = self.of_group
        return float((right[images > 0] / images[images > 0]).mean()) if bool((images > 0).any()) else math.nan

    def calibration_error(self) -> float:
        """Returns the expected calibration error: the mean distance between confidence and accuracy, over bins of
        confidence."""
        images, confidence, right = self.of_bin
        return float((confidence - right).abs().sum() / images.sum())

    def of_classes(self, labels: Sequence[str], classes: Sequence[str]) -> dict[str, Any]:
        """Returns the numbers of images and of right answers for each label of the dataset, and the confusion matrix,
        with [label, class, images] for each entry that is not 0.

        `confusion_right` is the same for right answers only. Labels and classes are given as indices in `labels` and
        `classes`. There is no matrix if it would have more than 4 million entries.
        """
        images, right = (part.long().tolist() for part in self.of_group)
        found: dict[str, Any] = {"labels": list(labels), "images": images, "right": right}
        if not self.confusion.numel():
            return found
        found |= {"classes": list(classes)}
        return found | {name: self._cells(getattr(self, name)) for name in ("confusion", "confusion_right")}

    def _cells(self, matrix: torch.Tensor) -> list[list[int]]:
        matrix = matrix.reshape(self.num_groups, self.num_classes).long()
        places = matrix.nonzero()
        cells: list[list[int]] = torch.cat([places, matrix[places[:, :1], places[:, 1:]]], dim=1).tolist()
        return cells


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The scores of a model on a dataset.

    `num_images`: the number of images with a label, on which the scores are based; `num_unlabeled`: the number of other
    images. `accuracy`: the share of images whose highest logit is one of their labels; `top5`: the share with a label
    among the five highest. `mean_per_class`: the mean of the accuracies of the dataset's labels, the usual score of
    Pets and Flowers. `calibration_error`: the expected calibration error in 15 bins. `chance`: the share of the most
    frequent label, which is the accuracy of a model that always answers it. `loss`: the mean loss of the images with a
    label.

    If the loss is not finite, some logit was not, and the scores mean nothing.
    """

    num_images: int
    num_unlabeled: int
    accuracy: float
    top5: float
    mean_per_class: float
    calibration_error: float
    chance: float
    loss: float

    def values(self, prefix: str) -> dict[str, float]:
        """Returns the scores by their names in the metrics, with `prefix` before each name."""
        names = ("accuracy", "loss", "top5", "mean_per_class", "calibration_error", "chance")
        return {f"{prefix}{name}": float(getattr(self, name)) for name in names}


@dataclass(frozen=True, kw_only=True)
class Example:
    """An image and the model's answer. `labels`: the labels of the image, as the dataset's numbers; `said`: the class
    with the highest logit, whose probability is `confidence`."""

    sample_id: int
    labels: tuple[int, ...]
    said: int
    confidence: float
    is_right: bool


class Examples:
    """Collects examples: the `num` (0: none) mistakes with the highest confidence, and `num` right answers, chosen by a
    keyed hash of the sample id.

    The images are the same for any number of ranks, unless rounding changes which mistake is more confident.
    """

    def __init__(self, num: int) -> None:
        self._num = num
        self._right: list[Example] = []
        self._wrong: list[Example] = []

    def add(
        self,
        sample_ids: torch.Tensor,
        logits_BK: torch.Tensor,
        targets_BL: torch.Tensor,
        groups_BL: torch.Tensor,
        *,
        confidence_B: torch.Tensor,
    ) -> None:
        """Adds the images of a batch, as `Counts.add` does. Images without a target are left out."""
        if not self._num:
            return
        said_B, is_scored_B, is_right_B = answers(logits_BK, targets_BL)
        found = [
            Example(
                sample_id=int(sample_ids[at]),
                labels=tuple(number for number in groups_BL[at].tolist() if number >= 0),
                said=int(said_B[at]),
                confidence=float(confidence_B[at]),
                is_right=bool(is_right_B[at]),
            )
            for at in is_scored_B.nonzero()[:, 0].tolist()
        ]
        self._keep(found)

    def over_ranks(self, device: torch.device) -> None:
        """Chooses among the examples of all ranks, on every rank. This is a collective: all ranks must call it."""
        if not self._num:
            return
        of_ranks = gather_json([asdict(one) for one in self.chosen()], device=device)
        self._right, self._wrong = [], []
        self._keep([Example(**{**one, "labels": tuple(one["labels"])}) for rank in of_ranks for one in rank])

    def chosen(self) -> list[Example]:
        """Returns the right answers, then the mistakes, the most confident first."""
        return [*self._right, *self._wrong]

    def _keep(self, found: list[Example]) -> None:
        right = [*self._right, *(one for one in found if one.is_right)]
        wrong = [*self._wrong, *(one for one in found if not one.is_right)]
        hashes = hash_array(np.array([one.sample_id for one in right], dtype=np.int64), key=EXAMPLES.key(0)).tolist()
        by_hash = dict(zip([one.sample_id for one in right], hashes, strict=True))
        self._right = heapq.nsmallest(self._num, right, key=lambda one: (by_hash[one.sample_id], one.sample_id))
        self._wrong = heapq.nsmallest(self._num, wrong, key=lambda one: (-one.confidence, one.sample_id))


def evaluate(
    model: nn.Module,
    dataset: Dataset,
    config: EvaluationConfig | EvaluatedData,
    *,
    labels: tuple[str, ...],
    loss: LossName,
    world: World,
    label_weights: bool = False,
    before_batch: BeforeBatch = unasked,
    targets: Targets | None = None,
    examples: Examples | None = None,
) -> tuple[Scores, Counts]:
    """Scores a model that maps uint8[B, H, W, 3] to logits of the classes `labels`. Returns the scores, and the counts
    from which they are computed, the same on every rank. This is a collective: all ranks must call it.

    `targets`: returns the right classes of each image; None: its labels, found by name among the model's. Raises
    UserError if the dataset then has a label that the model lacks, or if no image has a label. `label_weights`: compute
    the loss from the labels' weights; a label of weight 0 does not count. `before_batch` is explained at BeforeBatch.
    `examples`: collects images of this rank.
    """
    targets = targets or by_name(dataset, labels)
    batches = evaluation_batches(
        dataset,
        batch_size=config.batch_size,
        image_size=model_image_size(model),
        transform=config.transform,
        share=Share(global_batch=config.batch_size * world.num_ranks, rank=world.rank, num_ranks=world.num_ranks),
        threads=world.num_threads,
        label_weights=label_weights,
    )
    total = dataset.num_samples if world.is_first else 0
    counts = Counts(num_groups=len(dataset.label_names), num_classes=len(labels))
    with closing(batches), Progress("evaluate", total, unit="images", says_end=False) as progress:
        for batch, mask_B, logits in a_batch_late(_launched(model, taken(batches, before_batch), world)):
            _count((counts, examples or Examples(0)), batch, mask_B, logits.arrived()[mask_B], targets, loss=loss)
            if world.is_first:
                progress.advance(min(int(mask_B.sum()) * world.num_ranks, progress.total - progress.done))
    counts.over_ranks(world.device)
    return _scores(counts, dataset, world), counts


def _scores(counts: Counts, dataset: Dataset, world: World) -> Scores:
    num, loss = int(counts.scored), float(counts.loss / counts.scored)
    if not num:
        raise UserError(f"no image of {dataset.url} has a label that counts: there is nothing to score")
    if world.is_first and not math.isfinite(loss):
        log.warning("the model's logits are not finite (NaN or infinite) for some images: its scores mean nothing")
    return Scores(
        num_images=num,
        num_unlabeled=int(counts.images) - num,
        accuracy=float(counts.right) / num,
        top5=float(counts.right_in_five) / num,
        mean_per_class=counts.mean_per_class(),
        calibration_error=counts.calibration_error(),
        chance=counts.chance(),
        loss=loss,
    )


def model_image_size(model: nn.Module) -> int:
    """Returns the side in pixels that a model of ours was built for."""
    config = getattr(model, "config", None)
    if config is None:
        raise TypeError(f"{type(model).__name__} has no config; evaluate models from pipeline.models")
    return int(config.image_size)


def _launched(
    model: nn.Module, batches: Iterator[tuple[Batch, torch.Tensor]], world: World
) -> Iterator[tuple[Batch, torch.Tensor, ReadBack]]:
    """Launches the model on each batch. Yields the batch, its mask, and all its logits on their way to the host."""
    streams = streams_of(world.device)
    for batch, mask_B in batches:
        with torch.no_grad():
            logits_BK = model(streams.pinned(batch.images).to(world.device, non_blocking=True)).float()
        yield batch, mask_B, read_back(logits_BK, streams)


def _count(
    kept: tuple[Counts, Examples],
    batch: Batch,
    mask_B: torch.Tensor,
    logits_BK: torch.Tensor,
    targets: Targets,
    *,
    loss: LossName,
) -> None:
    """Adds this rank's images of a batch. `logits_BK`: those of its real images."""
    counts, examples = kept
    right_BL, groups_BL = targets(batch)[mask_B], counted_labels(batch)[mask_B]
    if not len(right_BL):
        return
    is_scored_B = (right_BL >= 0).any(dim=1)
    if is_scored_B.any():
        sought = _first_ones_first(right_BL)
        if batch.weights is not None:
            sought = weighted_targets(right_BL, batch.weights[mask_B], logits_BK.shape[1], name=loss)
        mean = classification_loss(logits_BK[is_scored_B], sought[is_scored_B], name=loss)
        counts.loss += int(is_scored_B.sum()) * float(mean)
    if not logits_BK.isfinite().all():  # a logit of -inf could leave the loss finite
        counts.loss += math.nan
    odds_BK = logits_BK.softmax(dim=1) if loss == "softmax" else logits_BK.sigmoid()
    confidence_B = odds_BK.amax(dim=1)
    counts.add(logits_BK, right_BL, groups_BL, confidence_B=confidence_B)
    examples.add(batch.sample_ids, logits_BK, right_BL, groups_BL, confidence_B=confidence_B)


def _first_ones_first(right_BL: torch.Tensor) -> torch.Tensor:
    """Returns each image's targets in their order, with all padding after them. Softmax takes the first target, and a
    class map may have none for an image's first label."""
    return right_BL.gather(1, (right_BL < 0).int().argsort(dim=1, stable=True))


def pictures(
    dataset: Dataset, sample_ids: list[int], *, image_size: int, transform: EvaluationTransform, threads: int
) -> list[tuple[str, bytes]]:
    """Returns what the model sees of each sample, as a small image file: (media type, bytes). It is not collective."""
    batches = evaluation_batches(
        dataset,
        batch_size=max(1, len(sample_ids)),
        image_size=image_size,
        transform=transform,
        share=Share(global_batch=max(1, len(sample_ids)), rank=0, num_ranks=1),
        threads=threads,
        sample_ids=np.array(sample_ids, dtype=np.int64),
    )
    with closing(batches):
        return [_encoded(image) for batch, mask_B in batches for image in batch.images[mask_B].numpy()]


def _encoded(image_HW3: NDArray[np.uint8]) -> tuple[str, bytes]:
    """Encodes an image as PNG if it is small, else as JPEG of at most 160 pixels a side."""
    image, file = Image.fromarray(image_HW3), io.BytesIO()
    if max(image.size) <= _SMALL_SIDE:
        image.save(file, "PNG")
        return "image/png", file.getvalue()
    image.thumbnail((_MOST_SIDE, _MOST_SIDE))
    image.save(file, "JPEG", quality=_QUALITY)
    return "image/jpeg", file.getvalue()
