"""Crops and flips, drawn by a counter-based generator keyed by (seed, epoch, sample id): the same on any topology.

The training crop is the paper's: area 5 to 100 %, ratio 3/4 to 4/3, bilinear without antialiasing. Its code draws it by
TensorFlow's sample_distorted_bounding_box (core/kernels/image/sample_distorted_bounding_box_op.cc): the ratio is
uniform; the height is uniform between those of the smallest and the largest area that fit; and if no try gives a
rectangle inside the bounds, the whole image is taken. torchvision's RandomResizedCrop draws differently: the area is
uniform, the ratio is uniform in its logarithm, and tries that do not fit are discarded. At 375 x 500 the mean area is
34 % of the image with the first, 42 % with the second. Both are here; the random numbers are ours in both.

Two more crops cut a random square of the model's size out of a resized image, with every place equally likely:
resize_crop out of a square ("Big Transfer", section 3.3; its input_pipeline_tf2_or_jax.py), short_side_crop out of an
image whose short side was resized (big_vision, pp/ops_image.py: resize_small and random_crop). simple_random is the
second as DeiT III has it (augment.py with --src, by torchvision's Resize and RandomCrop): from an image whose short
side has the model's size, with 4 pixels reflected at each edge.

Evaluation resizes directly (vision_transformer) or resizes the short side and crops the centre (big_vision:
resize_small and central_crop).

The plain resize is OpenCV's INTER_LINEAR: half-pixel centres, torch's interpolate(antialias=False) within 1 grey level
(its weights have 11 bits: on average 0.13 below). Few-shot images are resized to floats that are cut off to whole grey
levels, as in big_vision. It cuts its training crops off, too; here those are rounded. The antialiased resize is
Pillow's crop and resize(BILINEAR): equal to the bit up to Pillow 12; Pillow 13 resizes the height first if it shrinks
more, and may differ by 1 grey level. Bicubic is Pillow's, in the same way as the antialiased bilinear one. The area
filter is in window_resize.py.
"""

import math
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipeline.data.config import AugmentConfig
from pipeline.data.decode import Pixels, image_faults
from pipeline.data.window_resize import area_resize, cover_resize, cut_off_resize, plain_resize
from pipeline.shared_settings import EvaluationTransform, central_short_side
from shards.hashing import CROPS, uniforms

AUGMENT_VERSION = 2
_REFLECTED_PIXELS = 4  # of simple_random
_MOST_WHOLE_PIXELS = 1 << 24  # of a resized image; of a larger one, only the part that is shown is made
_TRIES = 10  # torchvision's number; TensorFlow has 100, but only long, narrow images fail the first
_DRAWS = 4 * _TRIES + 1


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
        draws[chosen] = uniforms(sample_ids[chosen], _DRAWS, key=CROPS.key(seed, int(epoch)))
    return draws


def draw_crop(height: int, width: int, draws: NDArray[np.float64], *, config: AugmentConfig) -> Crop:
    """The crop of an image of this size: all of it where the random part is cut only after the resize."""
    flip = config.flip and float(draws[-1]) < 0.5
    if config.crop == "random_resized":
        return _random_resized_crop(height, width, draws, config=config, flip=flip)
    if config.crop == "inception":
        for entry in range(0, 4 * _TRIES, 4):
            ratio_draw, height_draw, top_draw, left_draw = draws[entry : entry + 4].tolist()
            ratio = config.min_ratio + (config.max_ratio - config.min_ratio) * ratio_draw
            h, w = _inception_sides(height, width, ratio, height_draw, config=config)
            if h:
                top, left = int(top_draw * (height - h)), int(left_draw * (width - w))
                return Crop(top=top, left=left, height=h, width=w, flip=flip)
    return Crop(top=0, left=0, height=height, width=width, flip=flip)


def _inception_sides(height: int, width: int, ratio: float, draw: float, *, config: AugmentConfig) -> tuple[int, int]:
    """(height, width) of the crop of this ratio; (0, 0) if none fits."""
    min_area, max_area = config.min_area * height * width, config.max_area * height * width
    low, high = round(math.sqrt(min_area / ratio)), round(math.sqrt(max_area / ratio))
    if round(high * ratio) > width:
        high = int((width + 0.5 - 1e-7) / ratio)
        high -= round(high * ratio) > width
    high = min(high, height)
    low = min(low, high)
    h = low + int(draw * (high - low + 1))
    h += round(h * ratio) * h < min_area  # sides are whole pixels: one row more may bring the area back above the bound
    h -= round(h * ratio) * h > max_area
    w = round(h * ratio)
    fits = 0 < h <= height and 0 < w <= width and min_area <= h * w <= max_area
    return (h, w) if fits else (0, 0)


def _random_resized_crop(
    height: int, width: int, draws: NDArray[np.float64], *, config: AugmentConfig, flip: bool
) -> Crop:
    """The first of ten tries that fits, else the largest centred one."""
    low, high = math.log(config.min_ratio), math.log(config.max_ratio)
    for entry in range(0, 4 * _TRIES, 4):
        area_draw, ratio_draw, top_draw, left_draw = draws[entry : entry + 4].tolist()
        area = height * width * (config.min_area + (config.max_area - config.min_area) * area_draw)
        ratio = math.exp(low + (high - low) * ratio_draw)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(top_draw * (height - h + 1)), int(left_draw * (width - w + 1))
            return Crop(top=top, left=left, height=h, width=w, flip=flip)
    w = min(width, max(1, round(height * config.max_ratio)))
    h = min(height, max(1, round(width / config.min_ratio)))
    return Crop(top=(height - h) // 2, left=(width - w) // 2, height=h, width=w, flip=flip)


@dataclass(frozen=True, kw_only=True)
class Viewport:
    """A crop is resized to height x width, and `num_reflected` pixels are reflected at each edge; the output shows the
    part of that which begins at (top, left). `is_cut_off`: bilinear values are cut off to whole grey levels, not
    rounded."""

    height: int
    width: int
    top: int = 0
    left: int = 0
    is_mirrored: bool = False
    is_antialiased: bool = False
    is_area: bool = False
    is_bicubic: bool = False
    is_cut_off: bool = False
    num_reflected: int = 0


def training_viewport(crop: Crop, draws: NDArray[np.float64], *, config: AugmentConfig, size: int) -> Viewport:
    """The viewport on a crop that was drawn with the same draws: all of it, or a random square of the resized image."""
    height, width, num_reflected = size, size, 0
    least = late_crop_pixels(config, size)
    if config.crop == "resize_crop":
        height, width = least, least
    elif config.crop == "short_side_crop":
        height, width = short_side_resized(crop.height, crop.width, short_side=least)
    elif config.crop == "simple_random":
        least, num_reflected = max(size, config.resize_pixels), _REFLECTED_PIXELS
        short = min(crop.height, crop.width)
        height, width = int(least * crop.height / short), int(least * crop.width / short)  # as torchvision's Resize
    top_draw, left_draw = draws[2:4].tolist()  # as inception's first try
    return Viewport(
        height=height,
        width=width,
        top=int(top_draw * (height + 2 * num_reflected - size + 1)),
        left=int(left_draw * (width + 2 * num_reflected - size + 1)),
        is_mirrored=crop.flip,
        is_antialiased=config.antialias,
        is_area=config.filter == "area",
        is_bicubic=config.filter == "bicubic",
        num_reflected=num_reflected,
    )


def late_crop_pixels(config: AugmentConfig, size: int) -> int:
    """To how many pixels resize_crop and short_side_crop resize an image before the random square is cut."""
    return max(size, config.resize_pixels or round(size * 448 / 384))


def short_side_resized(height: int, width: int, *, short_side: int) -> tuple[int, int]:
    """(height, width) of an image whose short side is resized to `short_side`, as big_vision's resize_small rounds the
    other one: in fp32, halves to even."""
    factor = np.float32(short_side) / np.float32(min(height, width))
    resized = [max(short_side, int(np.rint(np.float32(side) * factor))) for side in (height, width)]
    return resized[0], resized[1]


def evaluation_viewport(height: int, width: int, transform: EvaluationTransform, *, size: int) -> Viewport:
    """The viewport of the evaluation transform on a whole image of height x width pixels.

    Pillow's filters round as torchvision's Resize and CenterCrop, so that weights score alike in timm; the others as
    big_vision: the centre of an odd rest lies half a pixel to another side.
    """
    is_torchvision = transform.filter == "bicubic" or transform.antialias
    short = central_short_side(transform, size)
    if transform.mode == "resize":
        height, width = size, size
    elif transform.mode == "fewshot":
        height, width = short, short
    elif is_torchvision:
        height, width = (int(short * side / min(height, width)) for side in (height, width))
    else:
        height, width = short_side_resized(height, width, short_side=short)
    top, left = ((side - size) / 2 for side in (height, width))
    return Viewport(
        height=height,
        width=width,
        top=round(top) if is_torchvision else int(top),
        left=round(left) if is_torchvision else int(left),
        is_antialiased=transform.antialias,
        is_area=transform.filter == "area",
        is_bicubic=transform.filter == "bicubic",
        is_cut_off=transform.mode == "fewshot" and transform.filter == "bilinear" and not transform.antialias,
    )


def show(pixels: Pixels, viewport: Viewport, *, out: Pixels) -> None:
    """Resizes, cuts and mirrors the pixels of a crop into `out`, uint8[height, width, 3]. Raises DecodeError."""
    with image_faults():
        rows = _shown(viewport.top, out.shape[0], viewport.height, num_reflected=viewport.num_reflected)
        columns = _shown(viewport.left, out.shape[1], viewport.width, num_reflected=viewport.num_reflected)
        top, left = int(rows.min()), int(columns.min())
        window = _resized(
            pixels, viewport, rows=slice(top, int(rows.max()) + 1), columns=slice(left, int(columns.max()) + 1)
        )
        if viewport.num_reflected:
            window = window[(rows - top)[:, None], columns - left]
        if viewport.is_mirrored:
            cv2.flip(window, 1, dst=out)  # numpy, copying pixels backwards, would take a third of the time of a decode
        else:
            out[...] = window


def _shown(first: int, count: int, num_pixels: int, *, num_reflected: int) -> NDArray[np.int64]:
    """Which of an axis' `num_pixels` resized pixels are shown, int64[count]: those from `first` on, after
    `num_reflected` were reflected at each end."""
    places = np.arange(first - num_reflected, first - num_reflected + count)
    for k in np.flatnonzero((places < 0) | (places >= num_pixels)).tolist():
        places[k] = cv2.borderInterpolate(int(places[k]), num_pixels, cv2.BORDER_REFLECT_101)
    return places


def _resized(pixels: Pixels, viewport: Viewport, *, rows: slice, columns: slice) -> Pixels:
    """These rows and columns of the resized pixels, before any are reflected."""
    size = (viewport.height, viewport.width)
    if viewport.is_area:
        return area_resize(pixels, size, rows=rows, columns=columns)
    is_pillow = viewport.is_bicubic or viewport.is_antialiased
    # Pillow resizes the width first.
    most_rows = max(viewport.height, pixels.shape[0]) if is_pillow else viewport.height
    is_large = most_rows * viewport.width > max(_MOST_WHOLE_PIXELS, pixels.shape[0] * pixels.shape[1])
    if is_pillow:
        if is_large:
            return cover_resize(pixels, size, rows=rows, columns=columns, is_bicubic=viewport.is_bicubic)
        resampling = Image.Resampling.BICUBIC if viewport.is_bicubic else Image.Resampling.BILINEAR
        return _resize_by_pillow(pixels, viewport, resampling)[rows, columns]
    if viewport.is_cut_off:
        return cut_off_resize(pixels, size, rows=rows, columns=columns)
    if is_large:
        return plain_resize(pixels, size, rows=rows, columns=columns)
    return _resize_plain(pixels, viewport)[rows, columns]


def _resize_plain(pixels: Pixels, viewport: Viewport) -> Pixels:
    if pixels.shape[:2] == (viewport.height, viewport.width):
        return pixels
    cv2.setNumThreads(1)  # parallelism is over images
    size = (viewport.width, viewport.height)
    return np.asarray(cv2.resize(pixels, size, interpolation=cv2.INTER_LINEAR), dtype=np.uint8)


def _resize_by_pillow(pixels: Pixels, viewport: Viewport, resampling: Image.Resampling) -> Pixels:
    # One direction at a time: Pillow 13 chooses which comes first, and rounds in between.
    image = Image.fromarray(np.ascontiguousarray(pixels))
    broad = image.resize((viewport.width, image.height), resampling)
    return np.asarray(broad.resize((viewport.width, viewport.height), resampling), dtype=np.uint8)
