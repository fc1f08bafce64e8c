"""Accuracy over a whole dataset: every sample exactly once over all ranks."""

import logging
import math
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import nn

from pipeline.config_values import LossName
from pipeline.data.batches import Batch
from pipeline.data.config import Share
from pipeline.data.evaluation import BeforeBatch, evaluation_batches, raised, taken
from pipeline.evaluation.config import EvaluatedData, EvaluationConfig
from pipeline.evaluation.counts import Counts
from pipeline.evaluation.examples import Examples
from pipeline.evaluation.targets import Targets, by_name, counted_labels
from pipeline.models.loss import classification_loss, weighted_targets
from pipeline.ranks.world import World
from shards.dataset import Dataset
from shards.errors import UserError
from shards.output.progress import Progress

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """`num_images`: images with a label, of which the scores are; `num_unlabeled`: the others. `accuracy`: share of
    images whose highest logit is one of their labels; `top5`: of those with a label among the five highest.
    `mean_per_class`: mean of the accuracies of the dataset's labels, as some score Pets and Flowers.
    `calibration_error`: expected calibration error in 15 bins. `chance`: share of the most frequent label, which is the
    accuracy of a model that always answers it. `loss`: mean over the same images.

    A loss that is not finite says that some logit was not, and that the scores mean nothing.
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
        """The values for a line of metrics."""
        names = ("accuracy", "loss", "top5", "mean_per_class", "calibration_error", "chance")
        return {f"{prefix}{name}": float(getattr(self, name)) for name in names}


def evaluate(
    model: nn.Module,
    dataset: Dataset,
    config: EvaluationConfig | EvaluatedData,
    *,
    labels: tuple[str, ...],
    loss: LossName,
    world: World,
    label_weights: bool = False,
    before_batch: BeforeBatch = raised,
    targets: Targets | None = None,
    examples: Examples | None = None,
) -> tuple[Scores, Counts]:
    """Scores of a model that maps uint8[B, H, W, 3] to logits of the classes `labels`, and what they are made of, the
    same on every rank. Collective over all ranks.

    `targets`: what is right for an image; else its labels by name, of which a dataset may lack some, but has no others
    (UserError, also if no image has a label). `label_weights`: the loss is of targets by the labels' weights; of weight
    0, a label is none. `before_batch`: see BeforeBatch. `examples`: of this rank's images.
    """
    targets = targets or by_name(dataset, labels)
    batches = _batches(model, dataset, config, world=world, label_weights=label_weights)
    total = dataset.num_samples if world.is_first else 0
    counts = Counts(num_groups=len(dataset.label_names), num_classes=len(labels))
    with closing(batches), Progress("evaluate", total, unit="images", says_end=False) as progress:
        for batch, mask_B in taken(batches, before_batch):
            _count((counts, examples or Examples(0)), model, batch, mask_B, targets, loss=loss, world=world)
            if world.is_first:
                progress.advance(min(int(mask_B.sum()) * world.num_ranks, progress.total - progress.done))
    counts.over_ranks(world.device)
    return _scores(counts, dataset, world), counts


def _batches(
    model: nn.Module, dataset: Dataset, config: EvaluationConfig | EvaluatedData, *, world: World, label_weights: bool
) -> Generator[tuple[Batch, torch.Tensor], None, None]:
    return evaluation_batches(
        dataset,
        batch_size=config.batch_size,
        image_size=model_image_size(model),
        transform=config.transform,
        share=Share(global_batch=config.batch_size * world.num_ranks, rank=world.rank, num_ranks=world.num_ranks),
        threads=world.num_threads,
        label_weights=label_weights,
    )


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
    """The side in pixels that a model of ours was built for."""
    config = getattr(model, "config", None)
    if config is None:
        raise TypeError(f"{type(model).__name__} has no config; evaluate models from pipeline.models")
    return int(config.image_size)


def _count(
    kept: tuple[Counts, Examples],
    model: nn.Module,
    batch: Batch,
    mask_B: torch.Tensor,
    targets: Targets,
    *,
    loss: LossName,
    world: World,
) -> None:
    """Adds this rank's images of a batch."""
    counts, examples = kept
    with torch.no_grad():
        logits_BK = model(batch.images.to(world.device)).float().cpu()[mask_B]
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
    if not logits_BK.isfinite().all():  # of which -inf could leave the loss finite
        counts.loss += math.nan
    odds_BK = logits_BK.softmax(dim=1) if loss == "softmax" else logits_BK.sigmoid()
    confidence_B = odds_BK.amax(dim=1)
    counts.add(logits_BK, right_BL, groups_BL, confidence_B=confidence_B)
    examples.add(batch.sample_ids, logits_BK, right_BL, groups_BL, confidence_B=confidence_B)


def _first_ones_first(right_BL: torch.Tensor) -> torch.Tensor:
    """Each image's targets in their order, before the padding: softmax takes the first, and a class map may have none
    for an image's first label."""
    return right_BL.gather(1, (right_BL < 0).int().argsort(dim=1, stable=True))
