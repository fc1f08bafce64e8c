"""What models, data and training share: names of files, devices, losses, and how images are prepared for an evaluation.

This module does not import torch, because the command line imports it.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from shards.config_values import Range, refuse_wrong_values
from shards.errors import UserError

RECORD_FILE, METRICS_FILE = "job.yaml", "metrics.jsonl"  # in a run's folder
SCORES_FOLDER, SCORES_FILE = "scores", "scores.json"  # of evaluations, in a run's folder
# cuda:0 to cuda:7 are GPUs of this machine, for one rank; cuda gives each rank a GPU of its own.
Device = Literal["auto", "cpu", "cuda", "cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4", "cuda:5", "cuda:6", "cuda:7"]
LossName = Literal["softmax", "sigmoid"]
ClassWeights = Literal["equal", "balanced"]
Recomputed = Literal["off", "selective", "full"]  # how much of a block the backward pass computes again
# How an image is resized. bilinear: as the paper's code does or, with antialiasing, as Pillow does. area: every output
# pixel is the average of the pixels that it covers, as big_vision resizes before a crop. bicubic: as Pillow does.
ResizeFilter = Literal["bilinear", "area", "bicubic"]


@dataclass(frozen=True, kw_only=True)
class EvaluationTransform:
    """How an image is resized and cropped to the model's size, without randomness."""

    mode: Literal["resize", "central_crop", "fewshot"] = "resize"
    """resize: straight to the model's size; central_crop: resize the short side, then cut out the centre; fewshot:
    resize to a larger square, then cut out the centre, as big_vision's few-shot evaluation, which cuts plain bilinear
    values off to whole grey levels."""
    short_side: Annotated[int, Range(0, zero="256/224 of the model's size")] = 0
    """Pixels of the short side, or of the square, before the centre is cut out; at least the model's size; 0: 256/224
    of it, the paper's proportion."""
    antialias: bool = False
    """Average over all pixels that an output pixel covers, as in training."""
    filter: ResizeFilter = "bilinear"
    """How the image is resized: bilinear, area (big_vision's: the average of all pixels that an output pixel covers;
    enlarged images get blocks), or bicubic (Pillow's, which antialiases by itself)."""
    border: Annotated[int, Range(0, 64)] = 0
    """Pixels to cut off at each side first: ObjectNet's images have a red border, and others cut off 2 or 3 pixels."""
    exif: bool = True
    """Turn images upright by their EXIF orientation; the paper's code does not. `predict` always does."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="transform.")
        refuse_antialiased_area(antialias=self.antialias, resize_filter=self.filter, where="transform.")


def central_short_side(transform: EvaluationTransform, image_size: int) -> int:
    """Returns the pixels of the short side after resizing, before the centre of `image_size` pixels is cut out."""
    return max(image_size, transform.short_side or round(image_size * 256 / 224))


def refuse_antialiased_area(*, antialias: bool, resize_filter: ResizeFilter, where: str) -> None:
    """Raises UserError if antialiasing is on for a filter that always averages, since it would have no effect."""
    if antialias and resize_filter != "bilinear":
        raise UserError(
            f"{where}antialias is on with {where}filter {resize_filter}, which averages by itself; switch "
            f"{where}antialias off, or set {where}filter to bilinear"
        )
