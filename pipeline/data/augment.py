"""Draws crops and flips, plans which pixels a view shows, and changes its colours.

The draws are counter-based and keyed by (seed, epoch, sample id), so they are the same on any topology.

Crops. The training crop is the paper's: area 5 to 100 %, ratio 3/4 to 4/3, bilinear without antialiasing. The paper's
code draws it with TensorFlow's sample_distorted_bounding_box (core/kernels/image/sample_distorted_bounding_box_op.cc).
There, the ratio is uniform, and the height is uniform between the heights of the smallest and the largest area that
fit. If no try gives a rectangle inside the bounds, the crop is the whole image. torchvision's RandomResizedCrop draws
differently: the area and the logarithm of the ratio are uniform, and tries that do not fit are discarded. At 375 x 500,
the mean area is 34 % of the image with TensorFlow's crop and 42 % with torchvision's. Both crops are implemented here,
with Patchline's own random numbers.

Two more crops cut a random square of the model's size out of a resized image, with every place equally likely.
resize_crop cuts it out of a square ("Big Transfer", section 3.3; its input_pipeline_tf2_or_jax.py). short_side_crop
cuts it out of an image whose short side was resized (big_vision, pp/ops_image.py: resize_small and random_crop).
simple_random is DeiT III's form of short_side_crop (augment.py with --src, by torchvision's Resize and RandomCrop): the
image's short side has the model's size (or `resize_pixels`, if that is more), and 4 pixels are reflected at each edge.

For evaluation, the image is resized directly (vision_transformer), or its short side is resized and the centre is
cropped (big_vision: resize_small and central_crop).

Plans. The crop of the upright image is turned back to the way the image is stored. A JPEG is decoded at 1/2, 1/4 or 1/8
if the crop at that scale still covers the view in both directions. The crop's edges are then rounded to whole pixels of
the decoded image, with halves rounded up.

Colours. 3-Augment and the colour jitter follow DeiT III (Touvron et al., arXiv 2204.07118; augment.py of
facebookresearch/deit). 3-Augment applies one of three operations with equal chances:

    grey        the luma of ITU-R 601-2, in all channels   torchvision's Grayscale(3)
    solarized   values from 128 on are inverted            ImageOps.solarize
    blurred     with a radius from 0.1 to 2 pixels         ImageFilter.GaussianBlur

Then a jitter j changes brightness, contrast and saturation in random order, each by a factor from 1 - j to 1 + j, like
torchvision's ColorJitter. All are Pillow's own operations, which torchvision also calls for Pillow's images, so the
bits are equal.
"""

import math
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from pipeline.data.config import COLOUR_DRAWS, AugmentConfig
from pipeline.data.decode import Pixels, scaled_size
from pipeline.shared_settings import EvaluationTransform, central_short_side
from shards.hashing import CROPS, Purpose, uniforms
from shards.orientation import Turn

AUGMENT_VERSION = 2
_REFLECTED_PIXELS = 4  # at each edge, in simple_random
_TRIES = 10  # torchvision's number; TensorFlow has 100, but only long, narrow images need more than one
_DRAWS = 4 * _TRIES + 1
_DENOMINATORS = (8, 4, 2)
# Smaller views are decoded at full size: simplejpeg could choose another scale that gives the same size.
_LEAST_SCALED = 8
_LEAST_RADIUS, _MOST_RADIUS = 0.1, 2.0
_ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
_ORDERS = tuple(permutations(range(len(_ENHANCERS))))


@dataclass(frozen=True, kw_only=True)
class Crop:
    """A rectangle in the upright image, in pixels, and whether to mirror it."""

    top: int
    left: int
    height: int
    width: int
    flip: bool


def draws_of(
    sample_ids: NDArray[np.int64],
    epochs: NDArray[np.int64],
    *,
    seed: int,
    purpose: Purpose = CROPS,
    num_draws: int = _DRAWS,
) -> NDArray[np.float64]:
    """Returns the uniform draws of every sample of a batch for a purpose: float64[n, num_draws]."""
    draws = np.empty((sample_ids.size, num_draws))
    for epoch in np.unique(epochs) if draws.size else ():
        chosen = epochs == epoch
        draws[chosen] = uniforms(sample_ids[chosen], num_draws, key=purpose.key(seed, int(epoch)))
    return draws


def draw_crop(height: int, width: int, draws: NDArray[np.float64], *, config: AugmentConfig) -> Crop:
    """Returns the crop of an image of this size. It is the whole image if nothing is cut out before the resize, or if
    no try of `inception` fits."""
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
    """Returns (height, width) of the crop of this ratio; (0, 0) if none fits."""
    min_area, max_area = config.min_area * height * width, config.max_area * height * width
    low, high = round(math.sqrt(min_area / ratio)), round(math.sqrt(max_area / ratio))
    if round(high * ratio) > width:
        high = int((width + 0.5 - 1e-7) / ratio)
        high -= round(high * ratio) > width
    high = min(high, height)
    low = min(low, high)
    h = low + int(draw * (high - low + 1))
    h += round(h * ratio) * h < min_area  # rounding may make the area slightly too small; one more row corrects that
    h -= round(h * ratio) * h > max_area
    w = round(h * ratio)
    fits = 0 < h <= height and 0 < w <= width and min_area <= h * w <= max_area
    return (h, w) if fits else (0, 0)


def _random_resized_crop(
    height: int, width: int, draws: NDArray[np.float64], *, config: AugmentConfig, flip: bool
) -> Crop:
    """Returns the first of ten random crops that fits, else the largest centred crop of an allowed ratio."""
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
    """A view of a crop. The crop is resized to height x width, and `num_reflected` pixels are reflected at each edge;
    the output shows the part of the result that begins at (top, left). `is_cut_off`: whether bilinear values are
    truncated to whole grey levels instead of rounded."""

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
    """Returns the viewport on a crop that was drawn with the same draws. It shows the whole resized crop, or a random
    square of it."""
    height, width, num_reflected = size, size, 0
    least = late_crop_pixels(config, size)
    if config.crop == "resize_crop":
        height, width = least, least
    elif config.crop == "short_side_crop":
        height, width = short_side_resized(crop.height, crop.width, short_side=least)
    elif config.crop == "simple_random":
        least, num_reflected = max(size, config.resize_pixels), _REFLECTED_PIXELS
        short = min(crop.height, crop.width)
        height, width = int(least * crop.height / short), int(least * crop.width / short)  # as in torchvision's Resize
    top_draw, left_draw = draws[2:4].tolist()  # the draws that place inception's first try
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
    """Returns the side in pixels to which resize_crop and short_side_crop resize an image before they cut the random
    square."""
    return max(size, config.resize_pixels or round(size * 448 / 384))


def short_side_resized(height: int, width: int, *, short_side: int) -> tuple[int, int]:
    """Returns (height, width) of an image whose short side is resized to `short_side`. The other side is rounded as in
    big_vision's resize_small: in fp32, with halves rounded to even."""
    factor = np.float32(short_side) / np.float32(min(height, width))
    resized = [max(short_side, int(np.rint(np.float32(side) * factor))) for side in (height, width)]
    return resized[0], resized[1]


def evaluation_viewport(height: int, width: int, transform: EvaluationTransform, *, size: int) -> Viewport:
    """Returns the viewport of the evaluation transform on a whole image of height x width pixels. With Pillow's
    filters, sides and margins are rounded as in torchvision's Resize and CenterCrop, so that weights have the same
    scores in timm. With other filters, they are rounded as in big_vision, where an odd margin is always rounded down at
    the top and left."""
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


@dataclass(frozen=True, kw_only=True)
class Box:
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True, kw_only=True)
class ViewPlan:
    """The plan of a view. The stored image, stored_height x stored_width, is decoded at 1 / denominator. The box is cut
    out of the result, turned upright, and shown through the viewport."""

    stored_height: int
    stored_width: int
    denominator: int
    box: Box
    turn: Turn
    viewport: Viewport


def plan_view(size: tuple[int, int], turn: Turn, crop: Crop, viewport: Viewport, *, denominator: int) -> ViewPlan:
    """Returns the plan for a crop of the upright image. `size` is (height, width) as stored."""
    box = _scaled(_stored_box(crop, turn, size), size, denominator)
    return ViewPlan(
        stored_height=size[0], stored_width=size[1], denominator=denominator, box=box, turn=turn, viewport=viewport
    )


def largest_denominator(crop: Crop, *, height: int, width: int) -> int:
    """Returns 8, 4, 2 or 1: the largest denominator of a scale at which a JPEG's crop still covers a view of height x
    width."""
    if min(height, width) < _LEAST_SCALED:
        return 1
    return next((f for f in _DENOMINATORS if crop.height >= f * height and crop.width >= f * width), 1)


def _stored_box(crop: Crop, turn: Turn, size: tuple[int, int]) -> Box:
    height, width = size[::-1] if turn.is_exchanged else size
    top = height - crop.top - crop.height if turn.is_upside_down else crop.top
    left = width - crop.left - crop.width if turn.is_leftright else crop.left
    if turn.is_exchanged:
        return Box(top=left, left=top, height=crop.width, width=crop.height)
    return Box(top=top, left=left, height=crop.height, width=crop.width)


def _scaled(box: Box, size: tuple[int, int], denominator: int) -> Box:
    if denominator == 1:
        return box
    half, (height, width) = denominator // 2, scaled_size(*size, denominator)
    top, left = (box.top + half) // denominator, (box.left + half) // denominator
    bottom = min(height, (box.top + box.height + half) // denominator)
    right = min(width, (box.left + box.width + half) // denominator)
    return Box(top=top, left=left, height=bottom - top, width=right - left)


def recoloured(pixels: Pixels, draws: NDArray[np.float64], *, config: AugmentConfig) -> Pixels:
    """Applies 3-Augment and the colour jitter to uint8[H, W, 3] pixels, and returns uint8[H, W, 3]. The input is not
    changed. `draws`, float64[COLOUR_DRAWS] in [0, 1): one each for the choice of 3-Augment's operation, the radius and
    the order, and three for the factors. Raises ValueError if their number is wrong."""
    if draws.shape != (COLOUR_DRAWS,):
        raise ValueError(f"draws have the shape {draws.shape}, not ({COLOUR_DRAWS},)")
    choice, radius, order, *factors = draws.tolist()
    image = Image.fromarray(np.ascontiguousarray(pixels))
    if config.three_augment:
        image = _one_of_three(image, int(3 * choice), radius=_LEAST_RADIUS + (_MOST_RADIUS - _LEAST_RADIUS) * radius)
    if config.color_jitter:
        for number in _ORDERS[int(len(_ORDERS) * order)]:
            factor = 1 + config.color_jitter * (2 * factors[number] - 1)
            image = _ENHANCERS[number](image).enhance(factor)
    return np.asarray(image, dtype=np.uint8)


def _one_of_three(image: Image.Image, number: int, *, radius: float) -> Image.Image:
    if number == 0:
        return image.convert("L").convert("RGB")
    if number == 1:
        return ImageOps.solarize(image)
    return image.filter(ImageFilter.GaussianBlur(radius))
