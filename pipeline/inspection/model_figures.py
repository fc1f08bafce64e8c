"""The figures of one model and the numbers in them. If a model lacks the part that a figure shows, the figure is left
out and the reason is logged.

The shift figure shows how much the output changes when an image moves. Convolutions have stability under shifts built
in; a Vision Transformer must learn it. The measure is from Zhang, "Making Convolutional Networks Shift-Invariant Again"
(2019), section 4: how often two shifts of an image get the same class. The cosine similarity of the features before the
head is a finer measure, and exists for any model.

Shape letters: B images, H W rows and columns, L layers, h heads; for shifts W the width of an image with its margin,
S the side that the model takes, N shifts.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.evaluation.fewshot import before_head
from pipeline.evaluation.predictor import Predictor
from pipeline.inspection import figures
from pipeline.inspection.attention import looked_at, uniform_distance
from pipeline.inspection.weight_pictures import levels, patch_filters, picture, principal_components, similarities
from pipeline.models.build import Model
from pipeline.models.vit import ViT
from shards.errors import UserError
from shards.output.progress import Progress

_MOST_SHIFTS = 16
log = logging.getLogger(__name__)
Facts = dict[str, Any]
MOST_SHOWN = 8  # images with their rollout
_MOST_BYTES = 256 << 20  # the most bytes of one layer's attention weights
_MOST_BATCH = 16
_MOST_SHIFTED = 32  # images, each of which is computed up to 17 times
_PAPERS_RATIO = 384 / 224  # the paper's image size in fine-tuning, relative to pre-training


@dataclass(frozen=True, kw_only=True)
class Consistency:
    """How much of the output stays the same at each shift. `similar`: the cosine similarity of the features with the
    features before the shift, float32[N, B]; `is_same`: whether the class is the same, bool[N, B]."""

    similar: torch.Tensor
    is_same: torch.Tensor


def shifts_for(image_size: int, *, stride: int) -> range:
    """Returns the shifts in pixels, from 0 to two patches or half an image, whichever is less. There are at most 17."""
    most = max(1, min(2 * stride, image_size // 2))
    return range(0, most + 1, max(1, -(-most // _MOST_SHIFTS)))


def consistency(model: Model, images_BWW3: torch.Tensor, shifts: range) -> Consistency:
    """Compares each crop of S columns with the first, which begins at the left edge. The rows are the central ones."""
    size = model.config.image_size
    top = (images_BWW3.shape[1] - size) // 2
    similar, is_same = [], []
    with torch.no_grad():
        for shift in shifts:
            crop = images_BWW3[:, top : top + size, shift : shift + size]
            features_BD, logits = before_head(model, crop.contiguous())
            features_BD, classes = features_BD.float(), logits.argmax(dim=-1)
            if shift == 0:
                first_BD, first = features_BD, classes
            similar.append(torch.nn.functional.cosine_similarity(features_BD, first_BD, dim=1))
            is_same.append(classes == first)
    return Consistency(similar=torch.stack(similar).cpu(), is_same=torch.stack(is_same).cpu())


def draw_filters(model: ViT, folder: Path) -> Facts:
    """Writes filters.png and filters.svg."""
    weights_DPP3 = patch_filters(model)
    if weights_DPP3 is None:
        log.info("a hybrid embeds features of its ResNet, so its filters are no pictures")
        return {}
    found = principal_components(weights_DPP3)
    return {
        "filters": {"shares_of_variance": list(found.shares)},
        "files": figures.save(figures.filters(found.filters), folder, "filters"),
    }


def draw_positions(model: ViT, folder: Path, *, resample_to: int) -> Facts:
    """Writes positions.png and positions.svg: the embeddings as learned, and resampled for images of `resample_to`
    pixels (0: the paper's ratio). Raises UserError if `resample_to` is not a multiple of the patch."""
    config, stride = model.config, model.config.stride
    if resample_to % stride:
        lower, upper = resample_to // stride * stride, -(-resample_to // stride) * stride
        sizes = f"{lower} or {upper}" if lower else f"{upper} or a multiple of it"
        raise UserError(f"--resample-to is {resample_to}, not a multiple of the patch ({stride} px); take {sizes}")
    size = resample_to or max(1, round(config.image_size * _PAPERS_RATIO / stride)) * stride
    shown = []
    for what, pixels in (("learned", config.image_size), ("resampled", size)):
        grid = pixels // stride, pixels // stride
        with torch.no_grad():
            table_1ND = model.embed.positions(grid)
        if table_1ND is None:
            log.info("the model adds no position embeddings to its input, so there is no figure of them")
            return {}
        similar = similarities(table_1ND[0].cpu(), grid=grid)
        shown.append((f"{what}: {grid[0]} x {grid[1]} ({pixels} px)", picture(levels(similar))))
    return {
        "positions": {"image_size": config.image_size, "resampled_to": size},
        "files": figures.save(figures.positions(shown), folder, "positions"),
    }


def draw_attention(predictor: Predictor, model: ViT, paths: Sequence[Path], folder: Path) -> Facts:
    """Writes the figures attention_distance and rollout, each as .png and .svg. Raises UserError for an image that
    cannot be used."""
    size, first, maps, distances = predictor.config.image_size, list[np.ndarray](), list[torch.Tensor](), []
    with Progress("attention", len(paths), unit="images", says_end=False) as progress:
        for begin in range(0, len(paths), _batch_size(model)):
            views = [predictor.view(path) for path in paths[begin : begin + _batch_size(model)]]
            images_BHW3 = torch.from_numpy(np.stack(views)).to(predictor.device)
            pixels_LBh, maps_BHW = looked_at(model, images_BHW3)
            distances.append(pixels_LBh)
            if len(first) < MOST_SHOWN:
                first, maps = [*first, *views][:MOST_SHOWN], [*maps, *maps_BHW][:MOST_SHOWN]
            progress.advance(len(views))
    pixels_Lh = torch.cat(distances, dim=1).mean(dim=1)
    if not (pixels_Lh.isfinite().all() and torch.stack(maps).isfinite().all()):
        raise UserError("the model's attention is not finite: its weights are too large or damaged; export them again")
    height, width = model.config.grid
    seen = (1, width) if model.config.attention == "axial" else (height, width)  # axial: a row; columns are as long
    uniform = uniform_distance(seen, stride=model.config.stride)
    drawn = figures.attention_distances(pixels_Lh, image_size=size, uniform=uniform)
    files = figures.save(drawn, folder, "attention_distance")
    files += figures.save(figures.rollouts(np.stack(first), torch.stack(maps)), folder, "rollout")
    return {
        "attention": {"num_images": len(paths), "image_size": size, "mean_distance_pixels": pixels_Lh.tolist()}
        | {"uniform_distance_pixels": uniform},
        "files": files,
    }


def draw_shifts(predictor: Predictor, paths: Sequence[Path], folder: Path) -> Facts:
    """Writes shifts.png and shifts.svg, for the first images. Raises UserError for an image that cannot be used."""
    model, config, paths = predictor.model, predictor.config, paths[:_MOST_SHIFTED]
    stride = config.resnet.stride if config.is_bit and config.resnet else config.stride
    shifts, found = shifts_for(config.image_size, stride=stride), []
    with Progress("shifts", len(paths), unit="images", says_end=False) as progress:
        for begin in range(0, len(paths), _MOST_BATCH):
            views = [predictor.view(path, margin=shifts[-1]) for path in paths[begin : begin + _MOST_BATCH]]
            found.append(consistency(model, torch.from_numpy(np.stack(views)).to(predictor.device), shifts))
            progress.advance(len(views))
    similar_N = torch.cat([one.similar for one in found], dim=1).mean(dim=1)
    same_N = torch.cat([one.is_same for one in found], dim=1).float().mean(dim=1)
    if not similar_N.isfinite().all():
        raise UserError("the model's features are not finite: its weights are too large or damaged; export them again")
    classifies = config.num_classes > 1 and not config.masked_patches
    lines = {"cosine_similarity": similar_N.tolist()} | ({"same_class": same_N.tolist()} if classifies else {})
    drawn = figures.shift_consistency(list(shifts), lines, stride=stride)
    return {
        "shifts": {"num_images": len(paths), "pixels": list(shifts), **lines},
        "files": figures.save(drawn, folder, "shifts"),
    }


def _batch_size(model: ViT) -> int:
    """Returns how many images to compute at a time, so that the attention weights of one layer take at most
    _MOST_BYTES: from 1 to _MOST_BATCH."""
    num_tokens = model.config.num_prefix_tokens + model.config.grid[0] * model.config.grid[1]
    return max(1, min(_MOST_BATCH, _MOST_BYTES // (4 * model.config.size.num_heads * num_tokens**2)))
