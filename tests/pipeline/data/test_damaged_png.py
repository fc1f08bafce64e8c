"""A PNG's colour profile changes no pixel, and nothing that a damaged PNG says reaches standard error."""

import contextlib
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms

from pipeline.data.decode import DecodeError, Pixels, decode_stored
from shards.output.terminal import command_output
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


def with_chunk(kind: bytes, content: bytes, *, crc: int | None = None) -> bytes:
    """A PNG with one chunk more before its pixels."""
    data = image_bytes(7, image_format="PNG")
    at = data.index(b"IDAT") - 4
    crc = zlib.crc32(kind + content) if crc is None else crc
    return data[:at] + struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc) + data[at:]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(with_chunk(b"sBIT", b"\xff\xff\xff"), id="more significant bits than there are"),
        pytest.param(with_chunk(b"cHRM", bytes(32)), id="chromaticities of zero"),
        pytest.param(with_chunk(b"gAMA", bytes(4)), id="a gamma of zero"),
        pytest.param(with_chunk(b"bKGD", b"\1"), id="a background that is too short"),
        pytest.param(with_chunk(b"tIME", b"\xff" * 7), id="a time that does not exist"),
        pytest.param(with_chunk(b"eXIf", b"hello"), id="EXIF of another kind"),
        pytest.param(with_chunk(b"tEXt", HOSTILE.encode("latin-1", "replace")), id="hostile text"),
        pytest.param(with_chunk(b"acTL", b"\xff" * 8), id="an animation of too many frames"),
        pytest.param(with_chunk(b"tRNS", b"\0"), id="a transparent colour that is too short"),
        pytest.param(with_chunk(b"gAMA", bytes(4), crc=1), id="a wrong checksum"),
        pytest.param(with_chunk(b"QQQQ", b"?"), id="a critical chunk that nobody knows"),
        pytest.param(image_bytes(7, image_format="PNG")[:-40], id="pixels that end early"),
        pytest.param(image_bytes(7, image_format="PNG").replace(b"IDAT", b"IDAU"), id="no pixels"),
    ],
)
def test_a_damaged_png_is_decoded_or_refused_in_silence(data: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with command_output(), contextlib.suppress(DecodeError):
        assert pixels(data).shape == (24, 32, 3)
    assert capfd.readouterr() == ("", "")
