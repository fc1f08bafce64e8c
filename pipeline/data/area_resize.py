"""The area filter: each output pixel is the average of the input pixels that it covers, parts of pixels by their share.

TensorFlow's tf.image.resize(method="area"), with which big_vision's resize_small (pp/ops_image.py) prepares images for
short_side_crop and for the central crop of its evaluations. There the average is computed in fp32 and cut to whole grey
levels; here it is exact, in whole numbers, and then cut: the same on any machine, and equal to TensorFlow's but for
averages that lie within fp32's rounding of a whole number. Where an image is enlarged, an output pixel that covers a
part of one input pixel has its value: enlarged images get blocks. Antialiasing would change nothing.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.data.decode import Pixels

_BAND_VALUES = 1 << 22  # the most that are summed up at once, as int64: 34 MB


def area_resize(pixels: Pixels, size: tuple[int, int], *, rows: slice, columns: slice) -> Pixels:
    """These rows and columns, with a start and a stop, of the image resized to `size`, (height, width): uint8[number of
    rows, number of columns, 3]. Only what they cover of `pixels`, uint8[height, width, 3], is read."""
    down = _Axis(num_inputs=pixels.shape[0], num_outputs=size[0], start=rows.start, stop=rows.stop)
    across = _Axis(num_inputs=pixels.shape[1], num_outputs=size[1], start=columns.start, stop=columns.stop)
    covered = pixels[down.first : down.end, across.first : across.end]
    width = max(1, _BAND_VALUES // (3 * covered.shape[0]))
    bands = [down.sums(covered[:, left : left + width]) for left in range(0, covered.shape[1], width)]
    # [columns covered, rows, 3] -> [columns, rows, 3] -> [rows, columns, 3]
    sums = across.sums(np.concatenate(bands, axis=1).transpose(1, 0, 2)).transpose(1, 0, 2)
    return np.asarray(sums // (pixels.shape[0] * pixels.shape[1]), dtype=np.uint8)


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """Outputs `start` to `stop` of an axis that is resized.

    Places are counted in units of which an input has `num_outputs`, and an output as many as there are inputs: every
    border is a whole number.
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
        """Behind the last input that is covered."""
        return -(-self.stop * self.num_inputs // self.num_outputs)

    def sums(self, covered: NDArray[np.integer]) -> NDArray[np.int64]:
        """Sums, over values[first:end], what each output covers, int64[stop - start, ...]: `num_inputs` times its
        average."""
        borders = np.arange(self.start, self.stop + 1, dtype=np.int64) * self.num_inputs
        whole, part = np.divmod(borders - self.first * self.num_outputs, self.num_outputs)
        before = np.zeros((covered.shape[0] + 1, *covered.shape[1:]), dtype=np.int64)  # the sum of all before each
        np.cumsum(covered, axis=0, dtype=np.int64, out=before[1:])
        inside = np.minimum(whole, covered.shape[0] - 1)  # the last border may lie behind the last input: its part is 0
        shares = part.reshape(-1, *(1 for _ in covered.shape[1:]))
        integral: NDArray[np.int64] = before[whole] * self.num_outputs + covered[inside] * shares
        return integral[1:] - integral[:-1]
