"""Crops and flips, drawn by a counter-based generator keyed by (seed, epoch, sample id): the same on any topology.

The training crop is the inception crop of the paper's code: area 5 to 100 %, ratio 3/4 to 4/3, bilinear without
antialiasing; evaluation resizes directly (vision_transformer) or resizes the short side and crops the centre.
"""

import math
from dataclasses import dataclass
from typing import Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from pipeline.data.decode import Pixels
from shards.errors import UserError
from shards.hashing import derive_key, uniforms

AUGMENT_VERSION = 1
_TRIES = 10  # as TensorFlow's sample_distorted_bounding_box and torchvision's RandomResizedCrop
_DRAWS = 4 * _TRIES + 1
_PURPOSE = 3


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """`crop`: inception, or none (a plain resize). Areas are shares of the image; `flip` mirrors half of the images."""

    crop: Literal["inception", "none"] = "inception"
    min_area: float = 0.05
    max_area: float = 1.0
    min_ratio: float = 3 / 4
    max_ratio: float = 4 / 3
    flip: bool = True

    def __post_init__(self) -> None:
        if not (0 < self.min_area <= self.max_area <= 1 and 0 < self.min_ratio <= self.max_ratio):
            raise UserError(f"allowed are areas 0 < min <= max <= 1 and ratios 0 < min <= max: {self}")


@dataclass(frozen=True, kw_only=True)
class EvaluationTransform:
    """`resize`: straight to the model's size. `central_crop`: short side to `short_side` pixels, then the centre
    (0: the size times 256/224, the paper's proportion)."""

    mode: Literal["resize", "central_crop"] = "resize"
    short_side: int = 0


@dataclass(frozen=True, kw_only=True)
class Crop:
    """A rectangle in the upright image, in pixels, and whether to mirror it."""

    top: int
    left: int
    height: int
    width: int
    flip: bool


def draws_of(sample_ids: NDArray[np.int64], epochs: NDArray[np.int64], *, seed: int) -> NDArray[np.float64]:
    """Uniform draws of every sample of a batch: float64[n, draws a sample]."""
    draws = np.empty((sample_ids.size, _DRAWS))
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        draws[chosen] = uniforms(sample_ids[chosen], _DRAWS, key=derive_key(seed, int(epoch), _PURPOSE))
    return draws


def draw_crop(height: int, width: int, draws: NDArray[np.float64], *, config: AugmentConfig) -> Crop:
    """The crop of an image of this size: the first of ten tries that fits, else the largest centred one."""
    flip = config.flip and float(draws[-1]) < 0.5
    if config.crop == "none":
        return Crop(top=0, left=0, height=height, width=width, flip=flip)
    low, high = math.log(config.min_ratio), math.log(config.max_ratio)
    for area_draw, ratio_draw, top_draw, left_draw in draws[:-1].reshape(_TRIES, 4).tolist():
        area = height * width * (config.min_area + (config.max_area - config.min_area) * area_draw)
        ratio = math.exp(low + (high - low) * ratio_draw)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(top_draw * (height - h + 1)), int(left_draw * (width - w + 1))
            return Crop(top=top, left=left, height=h, width=w, flip=flip)
    w = min(width, max(1, round(height * config.max_ratio)))
    h = min(height, max(1, round(width / config.min_ratio)))
    return Crop(top=(height - h) // 2, left=(width - w) // 2, height=h, width=w, flip=flip)


def apply_crop(pixels: Pixels, crop: Crop, *, out: Pixels) -> None:
    """Cuts, resizes (bilinear, no antialiasing) and mirrors into `out`, uint8[size, size, 3]."""
    part = pixels[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
    resized = resize(part, height=out.shape[0], width=out.shape[1])
    out[...] = resized[:, ::-1] if crop.flip else resized


def evaluation_view(pixels: Pixels, transform: EvaluationTransform, *, out: Pixels) -> None:
    """The evaluation transform of one image into `out`, uint8[size, size, 3]."""
    size = out.shape[0]
    if transform.mode == "resize":
        out[...] = resize(pixels, height=size, width=size)
        return
    short = transform.short_side or round(size * 256 / 224)
    scale = short / min(pixels.shape[0], pixels.shape[1])
    height, width = max(size, round(pixels.shape[0] * scale)), max(size, round(pixels.shape[1] * scale))
    resized = resize(pixels, height=height, width=width)
    top, left = (height - size) // 2, (width - size) // 2
    out[...] = resized[top : top + size, left : left + size]


def resize(pixels: Pixels, *, height: int, width: int) -> Pixels:
    """Bilinear, half-pixel centres, no antialiasing: torch's interpolate(antialias=False)."""
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(cv2.resize(pixels, (width, height), interpolation=cv2.INTER_LINEAR), dtype=np.uint8)
