"""Accuracy over a whole dataset: every sample exactly once over all ranks."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import nn

from pipeline.collectives import sums
from pipeline.config_values import LossName
from pipeline.data.batches import Batch
from pipeline.data.config import Share
from pipeline.data.evaluation import evaluation_batches, label_map
from pipeline.evaluation.config import EvaluationConfig
from pipeline.models.loss import classification_loss, weighted_targets
from pipeline.world import World
from shards.dataset import Dataset
from shards.progress import Progress

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """`accuracy`: share of images whose highest logit is one of their labels. `loss`: mean over images.

    A loss that is not finite says that some logit was not, and that the accuracy means nothing.
    """

    num_images: int
    accuracy: float
    loss: float


def evaluate(
    model: nn.Module,
    dataset: Dataset,
    config: EvaluationConfig,
    *,
    labels: tuple[str, ...],
    loss: LossName,
    world: World,
    label_weights: bool = False,
    before_batch: Callable[[], None] = lambda: None,
) -> Scores:
    """Scores of a model that maps uint8[B, H, W, 3] to logits of the classes `labels`. Collective over all ranks.

    Labels are matched by name, so a dataset may lack some of the model's classes; UserError if it has others.
    `label_weights`: the loss is of targets by the labels' weights, and a label of weight 0 does not count as one.
    `before_batch` is called before each batch, equally often on every rank, and may raise.
    """
    image_size = model_image_size(model)
    numbers = torch.from_numpy(label_map(dataset, labels))
    share = Share(global_batch=config.batch_size * world.num_ranks, rank=world.rank, num_ranks=world.num_ranks)
    batches = evaluation_batches(
        dataset,
        batch_size=config.batch_size,
        image_size=image_size,
        transform=config.transform,
        share=share,
        threads=world.num_threads,
        label_weights=label_weights,
    )
    total = dataset.num_samples if world.is_first else 0
    with closing(batches), Progress("evaluate", total, unit="images", says_end=False) as progress:
        counts = _count(model, _renumbered(batches, numbers, before_batch), progress, loss=loss, world=world)
    num, right, summed = sums(counts, device=world.device)
    if world.is_first and not math.isfinite(summed):
        log.warning("the model's logits are not finite (NaN or infinite) for some images: its scores mean nothing")
    return Scores(num_images=int(num), accuracy=right / num, loss=summed / num)


def model_image_size(model: nn.Module) -> int:
    """The side in pixels that a model of ours was built for."""
    config = getattr(model, "config", None)
    if config is None:
        raise TypeError(f"{type(model).__name__} has no config; evaluate models from pipeline.models")
    return int(config.image_size)


def _renumbered(
    batches: Iterator[tuple[Batch, torch.Tensor]], numbers: torch.Tensor, before_batch: Callable[[], None]
) -> Iterator[tuple[Batch, torch.Tensor]]:
    """The batches with the model's label numbers; padding stays -1."""
    for batch, mask_B in batches:
        before_batch()
        is_label_BL = batch.labels >= 0
        if batch.weights is not None:
            is_label_BL &= batch.weights != 0
        labels_BL = torch.where(is_label_BL, numbers[batch.labels.clamp(min=0)], -1)
        yield replace(batch, labels=labels_BL), mask_B


def _count(
    model: nn.Module,
    batches: Iterator[tuple[Batch, torch.Tensor]],
    progress: Progress,
    *,
    loss: LossName,
    world: World,
) -> list[float]:
    """This rank's [images, right ones, summed loss]."""
    num = right = summed = 0.0
    with torch.no_grad():
        for batch, mask_B in batches:
            logits_BK = model(batch.images.to(world.device)).float().cpu()[mask_B]
            labels_BL = batch.labels[mask_B]
            count = int(mask_B.sum())
            if count:
                num += count
                right += float((logits_BK.argmax(dim=1, keepdim=True) == labels_BL).any(dim=1).sum())
                targets = labels_BL
                if batch.weights is not None:
                    targets = weighted_targets(labels_BL, batch.weights[mask_B], logits_BK.shape[1], name=loss)
                summed += count * float(classification_loss(logits_BK, targets, name=loss))
                if not logits_BK.isfinite().all():  # of which -inf could leave the loss finite
                    summed = math.nan
            if world.is_first:
                progress.advance(min(count * world.num_ranks, progress.total - progress.done))
    return [num, right, summed]
