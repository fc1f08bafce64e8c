"""What is transparent lies on white, exactly, whatever kind of image says so and in whatever way."""

import io

import numpy as np
import pytest
from PIL import Image

from shards.images.config import Resize
from shards.images.image_header import read_header
from shards.images.resize import fitted, flattened
from tests.rigs.transparent import SIDE, TRANSPARENT


@pytest.mark.parametrize("kind", TRANSPARENT)
def test_transparent_pixels_become_white(kind: str) -> None:
    data, expected = TRANSPARENT[kind]
    with Image.open(io.BytesIO(data)) as image:
        flat = flattened(image)
    assert flat.mode in ("L", "RGB")
    np.testing.assert_array_equal(np.asarray(flat.convert("RGB")), expected)


@pytest.mark.parametrize("kind", TRANSPARENT)
def test_bands_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.images.resize._BAND_PIXELS", 3 * SIDE)
    test_transparent_pixels_become_white(kind)


@pytest.mark.parametrize("kind", TRANSPARENT)
def test_a_resized_copy_lies_on_white_too(kind: str) -> None:
    data, expected = TRANSPARENT[kind]
    copy, _ = fitted(data, read_header(data), Resize(short_side=SIDE // 2, quality=95))
    with Image.open(io.BytesIO(copy)) as image:
        found = np.asarray(image.convert("RGB")).astype(int)
    inside = (slice(None), [0, 1, 6, 7])  # away from the edge between the halves, which the filter blurs
    assert np.abs(found[inside] - expected[::2, ::2].astype(int)[inside]).max() <= 12


def test_an_opaque_image_is_returned_as_it_is() -> None:
    for mode in ("L", "RGB"):
        image = Image.new(mode, (4, 3), "red")
        assert flattened(image) is image


def test_orientation_is_kept_for_who_turns_it() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.new("RGBA", (6, 4), (0, 0, 0, 0)).save(file, "PNG", exif=exif)
    with Image.open(file) as image:
        assert flattened(image).getexif()[0x0112] == 6
