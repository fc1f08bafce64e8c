"""A plan's box is the crop, wherever it lies in the image as stored, and at every scale it covers the view."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.augment import Box, Crop, Viewport, largest_denominator, plan_view
from pipeline.data.decode import scaled_size, turn_of, turned
from shards.orientation import TURNS

WINDOW = Viewport(height=8, width=8)


@given(data=st.data(), orientation=st.sampled_from(list(TURNS)), height=st.integers(1, 30), width=st.integers(1, 30))
def test_the_box_turned_is_the_crop_of_the_turned_image(
    data: st.DataObject, orientation: int, height: int, width: int
) -> None:
    stored = np.arange(height * width * 3, dtype=np.int64).reshape(height, width, 3).astype(np.uint8)
    turn = turn_of(orientation)
    upright = turned(stored, turn)
    top, left = (data.draw(st.integers(0, side - 1)) for side in upright.shape[:2])
    rows, columns = (
        data.draw(st.integers(1, upright.shape[0] - top)),
        data.draw(st.integers(1, upright.shape[1] - left)),
    )
    crop = Crop(top=top, left=left, height=rows, width=columns, flip=False)
    box = plan_view((height, width), turn, crop, WINDOW, denominator=1).box
    part = stored[box.top : box.top + box.height, box.left : box.left + box.width]
    np.testing.assert_array_equal(turned(part, turn), upright[top : top + rows, left : left + columns])


@given(
    data=st.data(),
    orientation=st.sampled_from(list(TURNS)),
    size=st.integers(1, 40),
    height=st.integers(1, 700),
    width=st.integers(1, 700),
)
def test_the_scaled_box_covers_the_view_and_is_inside(
    data: st.DataObject, orientation: int, size: int, height: int, width: int
) -> None:
    turn = turn_of(orientation)
    upright_height, upright_width = (width, height) if turn.is_exchanged else (height, width)
    top, left = data.draw(st.integers(0, upright_height - 1)), data.draw(st.integers(0, upright_width - 1))
    crop = Crop(
        top=top,
        left=left,
        height=data.draw(st.integers(1, upright_height - top)),
        width=data.draw(st.integers(1, upright_width - left)),
        flip=False,
    )
    denominator = largest_denominator(crop, height=size, width=size)
    assert denominator in (1, 2, 4, 8)
    box = plan_view((height, width), turn, crop, WINDOW, denominator=denominator).box
    scaled_height, scaled_width = scaled_size(height, width, denominator)
    assert 0 <= box.top < box.top + box.height <= scaled_height
    assert 0 <= box.left < box.left + box.width <= scaled_width
    if denominator > 1:
        assert min(box.height, box.width) >= size
    elif size >= 8:
        assert min(crop.height, crop.width) < 2 * size, "half the size would do"


@pytest.mark.parametrize(
    ("height", "width", "size", "denominator"),
    [
        pytest.param(447, 900, 224, 1, id="one direction would not be covered"),
        pytest.param(448, 448, 224, 2, id="just covered"),
        pytest.param(895, 4000, 224, 2, id="still half"),
        pytest.param(896, 4000, 224, 4, id="a quarter"),
        pytest.param(1792, 1792, 224, 8, id="an eighth"),
        pytest.param(9999, 9999, 224, 8, id="no less than an eighth"),
        pytest.param(9999, 9999, 7, 1, id="a tiny view"),
    ],
)
def test_the_smallest_scale_that_covers_the_view(height: int, width: int, size: int, denominator: int) -> None:
    crop = Crop(top=0, left=0, height=height, width=width, flip=False)
    assert largest_denominator(crop, height=size, width=size) == denominator


@pytest.mark.parametrize(
    ("top", "height", "expected"),
    [
        pytest.param(100, 200, Box(top=50, left=0, height=100, width=50), id="whole"),
        pytest.param(101, 200, Box(top=51, left=0, height=100, width=50), id="halves up"),
        pytest.param(100, 201, Box(top=50, left=0, height=101, width=50), id="the far side likewise"),
        pytest.param(0, 401, Box(top=0, left=0, height=201, width=50), id="up to an odd end"),
    ],
)
def test_sides_are_rounded_in_the_scaled_image(top: int, height: int, expected: Box) -> None:
    crop = Crop(top=top, left=0, height=height, width=100, flip=False)
    assert plan_view((401, 300), turn_of(1), crop, WINDOW, denominator=2).box == expected
