"""The area filter against its definition in fractions, OpenCV's fp32 one and Pillow's box filter; windows of the other
filters against the libraries' whole images."""

from fractions import Fraction

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from pipeline.data import window_resize as module
from pipeline.data.window_resize import area_resize, cover_resize, plain_resize


def noise(seed: int, height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size=(height, width, 3), dtype=np.uint8)


def whole(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    return area_resize(pixels, size, rows=slice(0, size[0]), columns=slice(0, size[1]))


def shares(num_inputs: int, num_outputs: int) -> list[list[Fraction]]:
    """For each output, how much of each input it covers."""
    scale = Fraction(num_inputs, num_outputs)
    return [
        [
            max(Fraction(0), min(scale * (o + 1), Fraction(i + 1)) - max(scale * o, Fraction(i)))
            for i in range(num_inputs)
        ]
        for o in range(num_outputs)
    ]


def by_definition(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    height, width, _ = pixels.shape
    down, across = (np.array(shares(*pair), dtype=object) for pair in ((height, size[0]), (width, size[1])))
    covered = Fraction(height * width, size[0] * size[1])
    sums = np.einsum("yh,hwc,xw->yxc", down, pixels.astype(int).astype(object), across, optimize=True)
    average = [int(value / covered) for value in sums.reshape(-1)]
    return np.array(average, dtype=np.uint8).reshape(*size, 3)


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 99),
)
def test_each_pixel_is_the_average_of_what_it_covers_cut_to_whole_levels(
    height: int, width: int, size: tuple[int, int], seed: int
) -> None:
    pixels = noise(seed, height, width)
    np.testing.assert_array_equal(whole(pixels, size), by_definition(pixels, size))


@pytest.mark.parametrize(
    ("from_size", "to_size"),
    [
        pytest.param((375, 500), (256, 341), id="smaller, as an evaluation does"),
        pytest.param((75, 100), (448, 597), id="larger"),
        pytest.param((3, 900), (48, 14_400), id="a strip, larger"),
        pytest.param((900, 3), (200, 1), id="a tall strip, smaller"),
        pytest.param((1, 1), (40, 40), id="one pixel"),
    ],
)
def test_it_is_opencvs_in_fp32_within_its_rounding(from_size: tuple[int, int], to_size: tuple[int, int]) -> None:
    pixels = noise(3, *from_size)
    floats = cv2.resize(pixels.astype(np.float32), to_size[::-1], interpolation=cv2.INTER_AREA).reshape(*to_size, 3)
    difference = floats - whole(pixels, to_size)
    assert difference.min() > -0.01
    assert difference.max() < 1.01


def test_it_is_pillows_box_filter_within_a_level() -> None:
    pixels = noise(4, 150, 200)
    expected = np.asarray(Image.fromarray(pixels).resize((80, 60), Image.Resampling.BOX)).astype(int)
    difference = expected - whole(pixels, (60, 80))
    # Pillow's box takes whole pixels, ours their shares: the same where the scale is a whole number.
    assert np.abs(difference.mean()) < 1
    halved = np.asarray(Image.fromarray(pixels).resize((100, 75), Image.Resampling.BOX)).astype(int)
    assert set(np.unique(halved - whole(pixels, (75, 100)))) <= {0, 1}, "rounded there, cut here"


def test_a_small_image_enlarged_by_a_whole_number_has_blocks() -> None:
    """CIFAR at 448 px: every pixel becomes 14 x 14, as in big_vision."""
    pixels = noise(5, 32, 32)
    np.testing.assert_array_equal(whole(pixels, (448, 448)), pixels.repeat(14, axis=0).repeat(14, axis=1))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), height=st.integers(1, 60), width=st.integers(1, 60))
def test_a_window_is_cut_from_the_whole(data: st.DataObject, height: int, width: int) -> None:
    pixels = noise(height, height, width)[::-1]  # a turned image is a view like this
    size = data.draw(st.tuples(st.integers(1, 80), st.integers(1, 80)))
    starts = [data.draw(st.integers(0, length - 1)) for length in size]
    rows, columns = (
        slice(start, data.draw(st.integers(start + 1, length))) for start, length in zip(starts, size, strict=True)
    )
    np.testing.assert_array_equal(
        area_resize(pixels, size, rows=rows, columns=columns), whole(pixels, size)[rows, columns]
    )


def test_bands_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = noise(6, 40, 70)
    expected = whole(pixels, (30, 31))
    monkeypatch.setattr(module, "_BAND_VALUES", 3 * 30 * 9)
    np.testing.assert_array_equal(whole(pixels, (30, 31)), expected)


@pytest.mark.parametrize("value", [0, 1, 100, 255])
def test_one_colour_stays_itself(value: int) -> None:
    """In fp32, an average of 100 may come out as 99.99999."""
    pixels = np.full((37, 53, 3), value, dtype=np.uint8)
    assert set(np.unique(whole(pixels, (29, 61)))) == {value}


def test_a_window_of_a_very_long_image_costs_no_more_than_itself() -> None:
    """The whole would be 448 x 9 million pixels, 12 GB."""
    pixels = noise(7, 1, 20_000)
    middle = slice(4_480_000, 4_480_384)
    shown = area_resize(pixels, (448, 8_960_000), rows=slice(0, 384), columns=middle)
    assert shown.shape == (384, 384, 3)
    np.testing.assert_array_equal(shown[0, 0], pixels[0, 10_000])


@pytest.mark.parametrize("size", [(7, 5), (1, 300), (300, 1)])
def test_the_area_of_a_line_is_summed_along_it_first(size: tuple[int, int]) -> None:
    """In the other order, 448 rows of sums for each of its pixels would be held: 2 GB for this one."""
    line = noise(8, 1, 200_000)
    for pixels, to in ((line, size), (line.transpose(1, 0, 2), size[::-1])):
        np.testing.assert_array_equal(whole(pixels, to), by_definition_of_a_line(pixels, to))


def by_definition_of_a_line(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """The average of what each output covers of an image that is one pixel high or wide."""
    is_upright = pixels.shape[1] == 1
    values, outputs = pixels.reshape(-1, 3).astype(np.int64), size[0] if is_upright else size[1]
    before = np.concatenate([np.zeros((1, 3), dtype=np.int64), values.cumsum(axis=0)])
    borders = np.arange(outputs + 1) * len(values)
    whole_inputs, part = np.divmod(borders, outputs)
    integral = before[whole_inputs] * outputs + values[np.minimum(whole_inputs, len(values) - 1)] * part[:, None]
    line = ((integral[1:] - integral[:-1]) // len(values)).astype(np.uint8)
    other = size[1] if is_upright else size[0]
    return np.stack([line] * other, axis=1 if is_upright else 0)


def whole_by_opencv(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    return np.asarray(cv2.resize(pixels, size[::-1], interpolation=cv2.INTER_LINEAR), dtype=np.uint8)


def whole_by_pillow(pixels: NDArray[np.uint8], size: tuple[int, int], how: Image.Resampling) -> NDArray[np.uint8]:
    image = Image.fromarray(np.ascontiguousarray(pixels))
    return np.asarray(image.resize((size[1], image.height), how).resize(size[::-1], how), dtype=np.uint8)


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    from_size=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    size=st.tuples(st.integers(1, 200), st.integers(1, 200)),
)
def test_windows_are_the_libraries_own_to_the_bit(
    data: st.DataObject, from_size: tuple[int, int], size: tuple[int, int]
) -> None:
    pixels = noise(sum(from_size), *from_size)
    starts = [data.draw(st.integers(0, length - 1)) for length in size]
    rows, columns = (
        slice(start, data.draw(st.integers(start + 1, length))) for start, length in zip(starts, size, strict=True)
    )
    found = plain_resize(pixels, size, rows=rows, columns=columns)
    np.testing.assert_array_equal(found, whole_by_opencv(pixels, size)[rows, columns])
    for is_bicubic, how in ((False, Image.Resampling.BILINEAR), (True, Image.Resampling.BICUBIC)):
        found = cover_resize(pixels, size, rows=rows, columns=columns, is_bicubic=is_bicubic)
        np.testing.assert_array_equal(found, whole_by_pillow(pixels, size, how)[rows, columns])
