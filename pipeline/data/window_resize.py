"""Resizes a crop and cuts out the part that its viewport shows. If the resized image is large, only that part is
computed.

- The plain resize is OpenCV's INTER_LINEAR, with half-pixel centres. It equals torch's interpolate(antialias=False)
  within 1 grey level. Since its weights have 11 bits, it is 0.13 levels lower on average.
- The antialiased resize is Pillow's BILINEAR, always the width first and then the height. A single call of Pillow gives
  the same bits up to version 12; Pillow 13 resizes the height first if it shrinks more, and may differ by 1 grey level.
  The same holds for the bicubic resize.
- `area_resize`: each output pixel is the average of the input pixels that it covers; a pixel that is covered in part
  counts by that share. This is TensorFlow's tf.image.resize(method="area"), with which big_vision's resize_small
  (pp/ops_image.py) prepares images for short_side_crop and for the central crop of its evaluations. TensorFlow computes
  the average in fp32 and cuts it to whole grey levels. Here, the average is computed exactly, in whole numbers, and
  then cut. The result is the same on any machine. It differs from TensorFlow's only where an average lies within fp32's
  rounding of a whole number. In an enlarged image, an output pixel that covers a part of one input pixel has that
  pixel's value, so enlarged images get blocks. Antialiasing would change nothing.
- `cut_off_resize` is the bilinear resize of big_vision's few-shot images (pp/ops_image.py): it computes what
  TensorFlow's kernel computes, in fp32 and in the same order (core/kernels/image/resize_bilinear_op.cc), and then casts
  to uint8, which cuts off. big_vision cuts off its training crops, too; here, training crops are rounded.
- `plain_resize` and `cover_resize` give exactly the pixels of OpenCV and Pillow. `show` uses them if the whole resized
  image would be large: an image of 1 x 65,500 pixels whose short side becomes 256 would take 13 GB. They repeat the
  arithmetic of view_resize.c, and are slower than either library.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipeline.data.augment import Viewport
from pipeline.data.decode import DecodeError, Pixels, image_faults

_BAND_VALUES = 1 << 22  # the most values in an intermediate result, unless one output column needs more
_MOST_BROAD_VALUES = 1 << 28  # the most values in all covered rows, at the width that is shown
_PLAIN_BITS = 11  # bits of OpenCV's weights
_COVER_BITS = 22  # bits of Pillow's weights
_BICUBIC_A = -0.5  # Pillow's value
_MOST_WHOLE_PIXELS = 1 << 24  # the most pixels of a resized image that is computed as a whole


def show(pixels: Pixels, viewport: Viewport, *, out: Pixels) -> None:
    """Resizes, cuts and mirrors the pixels of a crop into `out`, uint8[height, width, 3]. Raises DecodeError if that
    fails."""
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
            cv2.flip(window, 1, dst=out)  # NumPy's backward copy would take a third of the time of a decode
        else:
            out[...] = window


def _shown(first: int, count: int, num_pixels: int, *, num_reflected: int) -> NDArray[np.int64]:
    """Returns which of an axis' `num_pixels` resized pixels are shown, int64[count]: the `count` pixels from `first`
    on, after `num_reflected` pixels were added at each end by reflection."""
    places = np.arange(first - num_reflected, first - num_reflected + count)
    for k in np.flatnonzero((places < 0) | (places >= num_pixels)).tolist():
        places[k] = cv2.borderInterpolate(int(places[k]), num_pixels, cv2.BORDER_REFLECT_101)
    return places


def _resized(pixels: Pixels, viewport: Viewport, *, rows: slice, columns: slice) -> Pixels:
    """Returns these rows and columns of the resized pixels, without reflected ones."""
    size = (viewport.height, viewport.width)
    if viewport.is_area:
        return area_resize(pixels, size, rows=rows, columns=columns)
    is_pillow = viewport.is_bicubic or viewport.is_antialiased
    # Pillow resizes the width first, so the intermediate image has all input rows.
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
    cv2.setNumThreads(1)  # images are already resized in parallel
    size = (viewport.width, viewport.height)
    return np.asarray(cv2.resize(pixels, size, interpolation=cv2.INTER_LINEAR), dtype=np.uint8)


def _resize_by_pillow(pixels: Pixels, viewport: Viewport, resampling: Image.Resampling) -> Pixels:
    # One direction at a time: Pillow 13 chooses which comes first, and rounds in between.
    image = Image.fromarray(np.ascontiguousarray(pixels))
    broad = image.resize((viewport.width, image.height), resampling)
    return np.asarray(broad.resize((viewport.width, viewport.height), resampling), dtype=np.uint8)


def area_resize(pixels: Pixels, size: tuple[int, int], *, rows: slice, columns: slice) -> Pixels:
    """Resizes `pixels`, uint8[height, width, 3], to `size`, (height, width), and returns these rows and columns of the
    result: uint8[number of rows, number of columns, 3]. Both slices have a start and a stop. Only the pixels that they
    cover are read."""
    num_inputs = pixels.shape[0] * pixels.shape[1]
    down = _Axis(num_inputs=pixels.shape[0], num_outputs=size[0], start=rows.start, stop=rows.stop)
    covered, num_rows = pixels[down.first : down.end], rows.stop - rows.start
    a_column = 3 * -(-pixels.shape[1] // size[1]) * max(num_rows, covered.shape[0])
    step = max(1, _BAND_VALUES // a_column)
    out = np.empty((num_rows, columns.stop - columns.start, 3), dtype=np.uint8)
    for start in range(columns.start, columns.stop, step):
        stop = min(columns.stop, start + step)
        across = _Axis(num_inputs=pixels.shape[1], num_outputs=size[1], start=start, stop=stop)
        band = covered[:, across.first : across.end]
        if 3 * num_rows * band.shape[1] <= _BAND_VALUES:
            sums = across.sums(down.sums(band).transpose(1, 0, 2)).transpose(1, 0, 2)
        else:  # the sums are exact, so the order does not matter
            sums = down.sums(across.sums(band.transpose(1, 0, 2)).transpose(1, 0, 2))
        out[:, start - columns.start : stop - columns.start] = sums // num_inputs
    return out


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """Outputs `start` to `stop - 1` of an axis that is resized.

    Places are counted in units that make every border a whole number: an input is `num_outputs` units long, and an
    output `num_inputs` units.
    """

    num_inputs: int
    num_outputs: int
    start: int
    stop: int

    @property
    def first(self) -> int:
        """The first input that is covered."""
        return self.start * self.num_inputs // self.num_outputs

    @property
    def end(self) -> int:
        """One past the last input that is covered."""
        return -(-self.stop * self.num_inputs // self.num_outputs)

    def sums(self, covered: NDArray[np.integer]) -> NDArray[np.int64]:
        """Returns the sum of what each output covers, int64[stop - start, ...], which is `num_inputs` times its
        average. `covered`: the inputs [first:end]."""
        borders = np.arange(self.start, self.stop + 1, dtype=np.int64) * self.num_inputs
        whole, part = np.divmod(borders - self.first * self.num_outputs, self.num_outputs)
        inside = np.minimum(whole, covered.shape[0] - 1)  # the last border may lie beyond the inputs, with a part of 0
        parts = covered[inside] * part.reshape(-1, *(1 for _ in covered.shape[1:]))
        sums: NDArray[np.int64] = _sums_between(covered, whole) * self.num_outputs + parts[1:] - parts[:-1]
        return sums


def _sums_between(values: NDArray[np.integer], borders: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the sums of values[borders[k]:borders[k + 1]] over the first axis, int64[number of borders - 1, ...]."""
    if values.size <= _BAND_VALUES:
        # [k]: the sum of the first k values.
        before = np.zeros((values.shape[0] + 1, *values.shape[1:]), dtype=np.int64)
        np.cumsum(values, axis=0, dtype=np.int64, out=before[1:])
        return np.asarray(before[borders[1:]] - before[borders[:-1]], dtype=np.int64)
    sums = np.empty((borders.size - 1, *values.shape[1:]), dtype=np.int64)
    for place, (begin, end) in enumerate(pairwise(borders.tolist())):
        np.add.reduce(values[begin:end], axis=0, out=sums[place])
    return sums


def cut_off_resize(pixels: Pixels, size: tuple[int, int], *, rows: slice, columns: slice) -> Pixels:
    """Returns what `area_resize` returns, for a bilinear resize in fp32 that cuts its values off to whole grey
    levels."""
    above, below, down = _neighbours(pixels.shape[0], size[0], rows)
    left, right, across = _neighbours(pixels.shape[1], size[1], columns)
    lines = list[NDArray[np.float32]]()
    for places in (above[:, None], below[:, None]):
        low, high = (pixels[places, shown].astype(np.float32) for shown in (left, right))
        lines.append(low + (high - low) * across[:, None])  # [rows, columns, 3]
    upper, lower = lines
    values: Pixels = (upper + (lower - upper) * down[:, None, None]).astype(np.uint8)
    return values


def _neighbours(
    num_inputs: int, num_outputs: int, chosen: slice
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Returns the inputs below and above the place of each chosen output, and the distance of that place from the lower
    input, float32 in [0, 1). Pixels have half-pixel centres."""
    scale, half = np.float32(num_inputs) / np.float32(num_outputs), np.float32(0.5)
    place = (np.arange(chosen.start, chosen.stop, dtype=np.float32) + half) * scale - half
    first = np.floor(place)
    lowest, highest = np.maximum(first, 0), np.minimum(np.ceil(place), num_inputs - 1)
    return lowest.astype(np.int64), highest.astype(np.int64), place - first


def plain_resize(pixels: Pixels, size: tuple[int, int], *, rows: slice, columns: slice) -> Pixels:
    """Returns what `area_resize` returns, for OpenCV's INTER_LINEAR."""
    down = _pairs(rows, num_inputs=pixels.shape[0], num_outputs=size[0], are_rows=True)
    across = _pairs(columns, num_inputs=pixels.shape[1], num_outputs=size[1], are_rows=False)
    out = np.empty((rows.stop - rows.start, columns.stop - columns.start, 3), dtype=np.uint8)
    for row in range(out.shape[0]):
        halves = [
            (pixels[place][across.low].T * across.low_weight + pixels[place][across.high].T * across.high_weight) >> 4
            for place in (down.low[row], down.high[row])
        ]
        low, high = halves[0] * down.low_weight[row] >> 16, halves[1] * down.high_weight[row] >> 16
        out[row] = ((low + high + 2) >> 2).T
    return out


@dataclass(frozen=True, kw_only=True)
class _Pairs:
    """The two inputs of each output, and their weights of 11 bits. Each array is int64[number of outputs]."""

    low: NDArray[np.int64]
    high: NDArray[np.int64]
    low_weight: NDArray[np.int64]
    high_weight: NDArray[np.int64]


def _pairs(outputs: slice, *, num_inputs: int, num_outputs: int, are_rows: bool) -> _Pairs:
    scale = 1.0 / (num_outputs / num_inputs)
    places = ((np.arange(outputs.start, outputs.stop) + 0.5) * scale - 0.5).astype(np.float32)
    floors = np.floor(places)
    low, shares = floors.astype(np.int64), places - floors
    if not are_rows:  # OpenCV gives a border column all the weight but repeats a border row, which rounds differently
        shares[(low < 0) | (low >= num_inputs - 1)] = 0
    one = np.float32(1 << _PLAIN_BITS)
    return _Pairs(
        low=low.clip(0, num_inputs - 1),
        high=(low + 1).clip(0, num_inputs - 1),
        low_weight=np.rint((np.float32(1) - shares) * one).astype(np.int64),
        high_weight=np.rint(shares * one).astype(np.int64),
    )


def cover_resize(
    pixels: Pixels, size: tuple[int, int], *, rows: slice, columns: slice, is_bicubic: bool = False
) -> Pixels:
    """Returns what `area_resize` returns, for Pillow's resize with BILINEAR or BICUBIC, which resizes the width first
    and rounds to 8 bits in between. Raises DecodeError if the image has too many rows for that."""
    curve, num_columns = (_BICUBIC if is_bicubic else _TRIANGLE), columns.stop - columns.start
    down = [curve.cover(place, pixels.shape[0], size[0]) for place in (rows.start, rows.stop - 1)]
    first, end = down[0].first, down[1].end
    if (end - first) * num_columns * 3 > _MOST_BROAD_VALUES:
        raise DecodeError(f"{end - first} rows are too many to be resized to {num_columns} columns one by one")
    broad = np.empty((end - first, num_columns, 3), dtype=np.uint8)
    for column in range(num_columns):
        cover = curve.cover(columns.start + column, pixels.shape[1], size[1])
        step = max(1, _BAND_VALUES // (3 * (cover.end - cover.first)))
        for top in range(first, end, step):
            band = pixels[top : min(end, top + step), cover.first : cover.end].transpose(1, 0, 2)
            broad[top - first : top - first + step, column] = cover.sum(band)
    out = np.empty((rows.stop - rows.start, num_columns, 3), dtype=np.uint8)
    for row in range(len(out)):
        cover = curve.cover(rows.start + row, pixels.shape[0], size[0])
        out[row] = cover.sum(broad[cover.first - first : cover.end - first])
    return out


@dataclass(frozen=True, kw_only=True)
class _Cover:
    """The inputs `first` to `end - 1`, which an output covers, and their weights of 22 bits, int64[end - first]."""

    first: int
    end: int
    weights: NDArray[np.int64]

    def sum(self, covered: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns the weighted sum of `covered`, uint8[end - first, ...], over its first axis."""
        sums = np.full(covered.shape[1:], 1 << (_COVER_BITS - 1), dtype=np.int64)
        weights = self.weights.reshape(-1, *(1 for _ in covered.shape[1:]))
        step = max(1, _BAND_VALUES // covered[0].size)
        for begin in range(0, len(covered), step):
            sums += (covered[begin : begin + step] * weights[begin : begin + step]).sum(axis=0)
        return (sums >> _COVER_BITS).clip(0, 255).astype(np.uint8)


@dataclass(frozen=True, kw_only=True)
class _Curve:
    """One of Pillow's filters. `weight`: maps distances, float64[n], to weights, float64[n]. `support`: the distance
    from which on weights are 0."""

    weight: Callable[[NDArray[np.float64]], NDArray[np.float64]]
    support: float

    def cover(self, place: int, num_inputs: int, num_outputs: int) -> _Cover:
        """Returns what the output at `place` covers, computed as in precompute_coeffs of Pillow's Resample.c."""
        scale = num_inputs / num_outputs
        stretched = max(scale, 1.0)
        reach, centre = stretched * self.support, (place + 0.5) * scale
        first, end = max(0, int(centre - reach + 0.5)), min(num_inputs, int(centre + reach + 0.5))
        shares = self.weight(np.abs((np.arange(first, end) - centre + 0.5) * (1.0 / stretched)))
        total = float(np.cumsum(shares)[-1])  # summed one after the other; np.sum rounds differently
        weights = (shares / total if total else shares) * (1 << _COVER_BITS)
        # Halves are rounded away from zero, as in normalize_coeffs_8bpc.
        return _Cover(first=first, end=end, weights=np.trunc(weights + np.copysign(0.5, weights)).astype(np.int64))


def _triangle(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(distances < 1.0, 1.0 - distances, 0.0)


def _cubic(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the weights of Keys' cubic convolution."""
    x, a = distances, _BICUBIC_A
    near, far = ((a + 2.0) * x - (a + 3.0)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


_TRIANGLE, _BICUBIC = _Curve(weight=_triangle, support=1.0), _Curve(weight=_cubic, support=2.0)
