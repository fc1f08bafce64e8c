"""A PNG's colour profile changes no pixel, and its name never reaches standard error."""

import io

import numpy as np
import pytest
from PIL import Image, ImageCms

from pipeline.data.decode import Pixels, decode_stored, without_profile
from tests.rigs.hostile import HOSTILE
from tests.rigs.images import image_bytes, png_with_profile


def pixels(data: bytes) -> Pixels:
    """Of an image of 24 x 32 pixels, as training decodes it."""
    return decode_stored(data, height=24, width=32)


def png(mode: str, *, profile: bytes = b"") -> bytes:
    """A PNG of that mode, with a valid profile or none."""
    with Image.open(io.BytesIO(image_bytes(3))) as image:
        file = io.BytesIO()
        image.convert(mode).save(file, "PNG", **({"icc_profile": profile} if profile else {}))
    return file.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
def test_the_same_pixels_without_a_profile(mode: str) -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    plain, profiled = png(mode), png(mode, profile=profile)
    assert plain != profiled
    assert without_profile(profiled) == without_profile(memoryview(profiled)) == plain
    assert np.array_equal(pixels(profiled), pixels(plain))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(b"plain", id="plain"),
        pytest.param(HOSTILE.encode("latin-1", "replace")[:79], id="hostile"),
        pytest.param(b"x" * 79, id="longest"),
    ],
)
@pytest.mark.parametrize("size", [24, 132, 200])
def test_a_wrong_profile_is_not_mentioned(name: bytes, size: int, capfd: pytest.CaptureFixture[str]) -> None:
    data = png_with_profile(name, size=size)
    assert np.array_equal(pixels(data), pixels(image_bytes(7, image_format="PNG")))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(image_bytes(1), id="JPEG"),
        pytest.param(png("RGB"), id="PNG without a profile"),
        pytest.param(png("RGB")[:20], id="PNG that ends in its header"),
        pytest.param(png("RGB")[:8] + b"\xff\xff\xff\xffabcd", id="a chunk longer than the file"),
    ],
)
def test_other_data_is_as_it_was(data: bytes) -> None:
    assert without_profile(data) is data


def test_a_profile_that_never_ends_and_a_second_one() -> None:
    data = png_with_profile(b"a")
    assert without_profile(data[:60]) == data[:33]
    begin = data.index(b"iCCP") - 4
    chunk = data[begin : data.index(b"IDAT") - 4]
    assert without_profile(data[:begin] + chunk + data[begin:]) == image_bytes(7, image_format="PNG")
