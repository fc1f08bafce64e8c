"""Thumbnails: small, upright, RGB; none for a broken image."""

import io

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from shards.images.resize import MOST_BYTES, MOST_PICTURE_BYTES, PICTURE_SIDE, THUMBNAIL_SIDE, picture, thumbnail
from tests.rigs.images import image_bytes


def encoded(image: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, **options)  # type: ignore[arg-type]
    return file.getvalue()


@pytest.mark.parametrize("length", [60_000, 70_000])
def test_a_long_comment_is_not_copied(length: int) -> None:
    """Pillow writes a PNG's text of that name into the JPEG, and raises if it does not fit."""
    texts = PngInfo()
    texts.add_text("comment", "a" * length)
    data = encoded(Image.new("RGB", (60, 40)), format="PNG", pnginfo=texts)
    for made, most in ((thumbnail(data), MOST_BYTES), (picture(data), MOST_PICTURE_BYTES)):
        assert made is not None
        assert len(made.data) <= most


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (600, 800, (THUMBNAIL_SIDE, 235)),
        (32, 32, (32, 32)),
        (100, 4000, (100, 250)),
        (1, 1, (1, 1)),
    ],
    ids=["made smaller", "never larger", "long ones are cut", "one pixel"],
)
def test_size_of_a_thumbnail(height: int, width: int, expected: tuple[int, int]) -> None:
    made = thumbnail(encoded(Image.new("RGB", (width, height)), format="JPEG"))
    assert made is not None
    assert (made.height, made.width) == (height, width)
    with Image.open(io.BytesIO(made.data)) as small:
        assert (small.format, small.height, small.width) == ("JPEG", *expected)
        assert not small.getexif()


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "I;16", "1", "CMYK"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    image = Image.new("RGB", (8, 8), (200, 200, 200)).convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.fromarray(np.full((8, 8), 200 << 8, np.uint16))
    made = thumbnail(encoded(image, format="JPEG" if mode == "CMYK" else "PNG"))
    assert made is not None
    with Image.open(io.BytesIO(made.data)) as small:
        assert small.mode == "RGB"
        assert np.asarray(small).mean() == pytest.approx(255 if mode == "1" else 200, abs=60 if mode == "1" else 4)


def test_noise_takes_no_more_bytes_than_others() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (176, 440, 3), dtype=np.uint8)
    made = thumbnail(encoded(Image.fromarray(noise), format="PNG"))
    assert made is not None
    assert len(made.data) <= MOST_BYTES
    noise = np.random.default_rng(0).integers(0, 256, (700, 700, 3), dtype=np.uint8)
    made = picture(encoded(Image.fromarray(noise), format="PNG"))
    assert made is not None
    assert len(made.data) <= MOST_PICTURE_BYTES


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (600, 800, (384, PICTURE_SIDE)),
        (32, 32, (32, 32)),
        (100, 4000, (13, PICTURE_SIDE)),
        (1, 2000, (1, PICTURE_SIDE)),
    ],
    ids=["made smaller", "never larger", "long ones are whole", "one pixel high"],
)
def test_a_picture_shows_the_whole_image(height: int, width: int, expected: tuple[int, int]) -> None:
    made = picture(encoded(Image.new("RGB", (width, height)), format="PNG"))
    assert made is not None
    assert (made.height, made.width) == (height, width)
    with Image.open(io.BytesIO(made.data)) as small:
        assert (small.height, small.width) == expected


def test_transparent_pixels_are_white() -> None:
    made = thumbnail(encoded(Image.new("RGBA", (8, 8), (0, 0, 0, 0)), format="PNG"))
    assert made is not None
    assert np.asarray(Image.open(io.BytesIO(made.data))).min() > 250


def test_exif_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    made = thumbnail(encoded(Image.new("RGB", (400, 200)), format="JPEG", exif=exif))
    assert made is not None
    assert (made.height, made.width) == (400, 200)


@pytest.mark.parametrize("data", [b"", b"no image", b"<svg onload=alert(1)>", image_bytes(1)[:200]])
def test_broken_images_have_none(data: bytes) -> None:
    assert thumbnail(data) is None
    assert picture(data) is None
