"""3-Augment and colour jitter as in DeiT III (Touvron et al., arXiv 2204.07118; augment.py of facebookresearch/deit).

One of three, with equal chances:

    grey        the luma of ITU-R 601-2, in all channels   torchvision's Grayscale(3)
    solarized   values from 128 on are inverted            ImageOps.solarize
    blurred     with a radius from 0.1 to 2 pixels         ImageFilter.GaussianBlur

Then, of the jitter j, brightness, contrast and saturation in random order, each by a factor from 1 - j to 1 + j, as
torchvision's ColorJitter. All are Pillow's own operations, which torchvision calls for Pillow's images: equal bits. The
random numbers are ours, keyed by (seed, epoch, sample id).
"""

from itertools import permutations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from pipeline.data.config import COLOUR_DRAWS, AugmentConfig
from pipeline.data.decode import Pixels

_LEAST_RADIUS, _MOST_RADIUS = 0.1, 2.0
_ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
_ORDERS = tuple(permutations(range(len(_ENHANCERS))))


def recoloured(pixels: Pixels, draws: NDArray[np.float64], *, config: AugmentConfig) -> Pixels:
    """uint8[H, W, 3] -> uint8[H, W, 3]; the input is not written to. `draws`: float64[COLOUR_DRAWS] in [0, 1): which of
    the three, the radius, the order, and the three factors."""
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
