"""NumPy's steps and Pillow's give the same upright image, the one that Pillow makes of the tag."""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from shards.orientation import TURNS


@pytest.mark.parametrize("orientation", TURNS)
def test_every_turn_is_what_the_tag_means(orientation: int) -> None:
    stored = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(stored).save(file, "PNG", exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(file)))
    turn = TURNS[orientation]
    image = Image.fromarray(stored)
    assert np.array_equal(np.asarray(image if turn.transpose is None else image.transpose(turn.transpose)), expected)
    upright = stored.transpose(1, 0, 2) if turn.is_exchanged else stored
    upright = upright[::-1] if turn.is_upside_down else upright
    assert np.array_equal(upright[:, ::-1] if turn.is_leftright else upright, expected)


def test_there_are_eight() -> None:
    assert list(TURNS) == list(range(1, 9))
