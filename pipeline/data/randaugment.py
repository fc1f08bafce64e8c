"""RandAugment (Cubuk et al., arXiv 1909.13719) as in big_vision's AugReg recipes.

They use pp/autoaugment.py, which is TensorFlow's EfficientNet code; Pillow's and timm's operations differ. Each of
`num_ops` operations is chosen uniformly from the 16 and always applied. All have the same magnitude m:

    operation                                argument at m                    at 10     at 15     identity at
    AutoContrast, Equalize, Invert           none
    Rotate                                   +- 3 m degrees                   30        45        0
    Posterize                                keeps floor(0.4 m) bits          4         6         20
    Solarize                                 inverts from 25.6 m mod 256      0         128       never
    SolarizeAdd                              adds 11 m below 128              110       165       0
    Color, Contrast, Brightness, Sharpness   factor 0.1 + 0.18 m              1.9       2.8       5
    ShearX, ShearY                           +- 0.03 m                        0.3       0.45      0
    TranslateX, TranslateY                   +- 10 m pixels                   100       150       0
    Cutout                                   a square of 8 m pixels           80        120       0

A sign is + or - with equal chances. Shifts and sizes are in pixels, for the recipes' crops of 224 pixels. Uncovered
pixels become 128.

Where TensorFlow's code and Pillow differ, this file follows TensorFlow's code:
- Solarize's threshold does not fit uint8 from m = 10 on and wraps (issue 110 of big_vision): 10 inverts everything.
- Contrast blends with a grey of height x width / 256, at most 255, instead of the image's mean.
- Grey is 0.2989 R + 0.587 G + 0.114 B, scaled by 255.5 / 255 and cut; Pillow rounds a sum of other weights.
- Sharpness cuts the smoothed value; Pillow rounds it. Both cut blends, and both keep the outermost pixels.
- Rotate, shear and translate take the nearest pixel, halves away from zero; shear keeps the top or left edge in place.
- Posterize keeps at least one bit.

TensorFlow 2.12 gives the same bits on photographs, except for Rotate (2 pixels in 100,000, at ties) and Sharpness (up
to 3 levels, where TensorFlow's fp32 sums fall just below a whole number).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import cv2
import numpy as np
from numpy.typing import NDArray

from pipeline.data.config import DRAWS_PER_OP, RandAugmentConfig
from pipeline.data.decode import Pixels

RANDAUGMENT_VERSION = 1  # part of the position: a run with other pixels is a different run
_FILL = 128
_LEVELS = np.arange(256, dtype=np.float32)
_GREY = np.array([[2989, 5870, 1140]], dtype=np.float32)  # in units of 1 / 10,000
_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], dtype=np.float32)


@dataclass(frozen=True, kw_only=True)
class Strength:
    """How an operation is applied: magnitude, its sign (1 or -1), and Cutout's centre as shares of the image."""

    magnitude: int
    sign: int = 1
    centre: tuple[float, float] = (0.5, 0.5)


def randaugment(pixels: Pixels, draws: NDArray[np.float64], *, config: RandAugmentConfig) -> Pixels:
    """Applies RandAugment to uint8[H, W, 3] pixels and returns uint8[H, W, 3]. The input is not changed; if RandAugment
    is off, it may itself be the result. `draws`, float64[config.num_draws] in [0, 1): for each operation its choice,
    its sign, and the row and column of the centre, which only Cutout uses. Raises ValueError if their number is
    wrong."""
    if draws.shape != (config.num_draws,):
        raise ValueError(f"draws have the shape {draws.shape}, not ({config.num_draws},)")
    operations, pixels = tuple(OPERATIONS.values()), np.ascontiguousarray(pixels)
    for choice, sign, row, column in draws.reshape(config.num_ops, DRAWS_PER_OP).tolist():
        strength = Strength(magnitude=config.magnitude, sign=1 if sign >= 0.5 else -1, centre=(row, column))
        pixels = operations[int(choice * len(operations))](pixels, strength)
    return pixels


def _autocontrast(pixels: Pixels, _: Strength) -> Pixels:
    tables = np.empty((256, 1, 3), dtype=np.uint8)
    for channel in range(3):
        low, high = (np.float32(end) for end in (pixels[..., channel].min(), pixels[..., channel].max()))
        scale = np.float32(255) / (high - low) if high > low else np.float32(1)
        offset = -low * scale if high > low else np.float32(0)
        tables[:, 0, channel] = _cut(_LEVELS * scale + offset)
    return _look_up(pixels, tables)


def _equalize(pixels: Pixels, _: Strength) -> Pixels:
    tables = np.empty((256, 1, 3), dtype=np.uint8)
    for channel in range(3):
        counts = cv2.calcHist([pixels], [channel], None, [256], [0, 256]).ravel().astype(np.int64)
        step = (int(counts.sum()) - int(counts[counts > 0][-1])) // 255
        below = np.cumsum(counts) - counts
        tables[:, 0, channel] = np.minimum((below + step // 2) // step, 255) if step else np.arange(256)
    return _look_up(pixels, tables)


def _invert(pixels: Pixels, _: Strength) -> Pixels:
    return ~pixels


def _posterize(pixels: Pixels, strength: Strength) -> Pixels:
    shift = min(8 - strength.magnitude * 4 // 10, 7)
    return np.asarray(pixels >> shift << shift, dtype=np.uint8)


def _solarize(pixels: Pixels, strength: Strength) -> Pixels:
    table, threshold = _LEVELS.copy(), strength.magnitude * 256 // 10 % 256
    table[threshold:] = 255 - table[threshold:]
    return _look_up(pixels, table)


def _solarize_add(pixels: Pixels, strength: Strength) -> Pixels:
    table = _LEVELS.copy()
    table[:128] = np.minimum(table[:128] + 11 * strength.magnitude, 255)
    return _look_up(pixels, table)


def _color(pixels: Pixels, strength: Strength) -> Pixels:
    # The sums are whole numbers, exact in fp32, so that every processor gives the same result.
    colours = pixels.astype(np.float32)
    weighted = cv2.transform(colours, _GREY).astype(np.int32)  # at most 9,999 * 255
    grey = (weighted * 511 // 5_100_000).astype(np.float32)
    return _blend(np.asarray(cv2.cvtColor(grey, cv2.COLOR_GRAY2RGB), dtype=np.float32), colours, strength)


def _contrast(pixels: Pixels, strength: Strength) -> Pixels:
    grey = np.float32(min(pixels.shape[0] * pixels.shape[1] // 256, 255))
    return _look_up(pixels, _blend(grey, _LEVELS, strength))


def _brightness(pixels: Pixels, strength: Strength) -> Pixels:
    return _look_up(pixels, _blend(np.float32(0), _LEVELS, strength))


def _sharpness(pixels: Pixels, strength: Strength) -> Pixels:
    smooth = cv2.filter2D(pixels, cv2.CV_16S, _SMOOTH).astype(np.uint16) // 13
    sharp = _blend(smooth.astype(np.float32), pixels.astype(np.float32), strength)
    result = pixels.copy()
    result[1:-1, 1:-1] = sharp[1:-1, 1:-1]
    return result


def _rotate(pixels: Pixels, strength: Strength) -> Pixels:
    angle = math.radians(strength.sign * 3 * strength.magnitude)
    cos, sin = math.cos(angle), math.sin(angle)
    bottom, right = pixels.shape[0] - 1, pixels.shape[1] - 1
    x0 = (right - (cos * right - sin * bottom)) / 2
    y0 = (bottom - (sin * right + cos * bottom)) / 2
    return _nearest(pixels, x_of=(cos, -sin, x0), y_of=(sin, cos, y0))


def _shear_x(pixels: Pixels, strength: Strength) -> Pixels:
    return _nearest(pixels, x_of=(1, strength.sign * 0.03 * strength.magnitude, 0), y_of=(0, 1, 0))


def _shear_y(pixels: Pixels, strength: Strength) -> Pixels:
    return _nearest(pixels, x_of=(1, 0, 0), y_of=(strength.sign * 0.03 * strength.magnitude, 1, 0))


def _translate_x(pixels: Pixels, strength: Strength) -> Pixels:
    return _nearest(pixels, x_of=(1, 0, strength.sign * 10 * strength.magnitude), y_of=(0, 1, 0))


def _translate_y(pixels: Pixels, strength: Strength) -> Pixels:
    return _nearest(pixels, x_of=(1, 0, 0), y_of=(0, 1, strength.sign * 10 * strength.magnitude))


def _cutout(pixels: Pixels, strength: Strength) -> Pixels:
    half = 4 * strength.magnitude
    row, column = (int(share * side) for share, side in zip(strength.centre, pixels.shape[:2], strict=True))
    result = pixels.copy()
    result[max(0, row - half) : row + half, max(0, column - half) : column + half] = _FILL
    return result


def _cut(values: NDArray[np.float32]) -> Pixels:
    return np.clip(values, 0, 255, out=values).astype(np.uint8)  # in place: fresh pages would cost five times as much


def _blend(start: NDArray[np.float32] | np.float32, end: NDArray[np.float32], strength: Strength) -> Pixels:
    """Blends `start` (factor 0) with `end` (factor 1) by the strength's factor, which may be above 1."""
    factor = np.float32(strength.magnitude / 10 * 1.8 + 0.1)
    blended = end - start
    blended *= factor
    blended += start
    return _cut(blended)


def _look_up(pixels: Pixels, table: NDArray[np.uint8] | NDArray[np.float32]) -> Pixels:
    """Replaces each level of the pixels by its entry in `table`, [256] or [256, 1, 3]."""
    return np.asarray(cv2.LUT(pixels, table.astype(np.uint8)), dtype=np.uint8)


def _nearest(pixels: Pixels, *, x_of: tuple[float, float, float], y_of: tuple[float, float, float]) -> Pixels:
    """Takes each pixel (x, y) from the place (x_of . (x, y, 1), y_of . (x, y, 1)), computed in fp32 as in
    TensorFlow."""
    height, width = pixels.shape[:2]
    x_W, y_H1 = _arange(width), _arange(height)[:, None]
    places = np.empty((height, width, 2), dtype=np.int16)  # with int16 places, OpenCV only copies pixels
    for axis, row in enumerate((x_of, y_of)):
        a, b, c = (np.float32(entry) for entry in row)
        position_HW = a * x_W + b * y_H1
        position_HW += c
        position_HW += np.copysign(np.float32(0.5), position_HW)
        places[..., axis] = position_HW  # cut towards 0
    fill = (_FILL, _FILL, _FILL)
    none = np.empty(0, dtype=np.uint16)  # no fractions of a pixel
    moved = cv2.remap(pixels, places, none, cv2.INTER_NEAREST, borderMode=cv2.BORDER_CONSTANT, borderValue=fill)
    return np.asarray(moved, dtype=np.uint8)


def _arange(length: int) -> NDArray[np.float32]:
    return np.arange(length, dtype=np.float32)


Operation = Callable[[Pixels, Strength], Pixels]

OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        "AutoContrast": _autocontrast,
        "Equalize": _equalize,
        "Invert": _invert,
        "Rotate": _rotate,
        "Posterize": _posterize,
        "Solarize": _solarize,
        "Color": _color,
        "Contrast": _contrast,
        "Brightness": _brightness,
        "Sharpness": _sharpness,
        "ShearX": _shear_x,
        "ShearY": _shear_y,
        "TranslateX": _translate_x,
        "TranslateY": _translate_y,
        "Cutout": _cutout,
        "SolarizeAdd": _solarize_add,
    }
)
