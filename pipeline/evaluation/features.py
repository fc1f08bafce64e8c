"""Frozen representations of images: what a model computes before its head.

For a ViT y of equation 4 (the class token after the last LayerNorm, or the mean over all tokens), after the hidden
layer of pre-training if the model has one: big_vision's `pre_logits`. For a BiT ResNet the mean over its last map. For
a model of masked patches the mean over its patches after the last LayerNorm: its class token is not trained.
"""

from contextlib import closing

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.data.config import Share
from pipeline.data.evaluation import BeforeBatch, evaluation_batches, raised, taken
from pipeline.evaluation_transform import EvaluationTransform
from pipeline.models.build import Model
from pipeline.ranks.collectives import gather_rows
from pipeline.ranks.world import World
from shards.dataset import Dataset
from shards.output.progress import Progress


def features_of(
    model: Model,
    dataset: Dataset,
    sample_ids: NDArray[np.int64],
    *,
    transform: EvaluationTransform,
    batch_size: int,
    world: World,
    before_batch: BeforeBatch = raised,
) -> torch.Tensor:
    """float32[N, D] on the CPU of rank 0, a row for each id, in their order; [0, 0] on the other ranks.

    Collective over all ranks, which share the work. `batch_size`: images per batch on each rank. `before_batch`: see
    BeforeBatch.
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
    with closing(batches), Progress("features", total, unit="images", says_end=False) as progress, torch.no_grad():
        for batch, _ in taken(batches, before_batch):
            rows_BD = gather_rows(represented(model, batch.images.to(world.device))[0].float())
            if world.is_first:
                kept.append(rows_BD.cpu())
                progress.advance(min(len(rows_BD), progress.total - progress.done))
    return torch.cat(kept)[: sample_ids.size] if kept else torch.zeros(0, 0)


def represented(model: Model, images_BHW3: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, D], what goes into the head, and the model's output. The whole model is called: ZeRO-3 gathers parameters for
    the modules that are called."""
    kept: list[torch.Tensor] = []
    hook = model.head.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    try:
        output = model(images_BHW3)
    finally:
        hook.remove()
    return kept[0].mean(dim=1) if kept[0].dim() == 3 else kept[0], output
