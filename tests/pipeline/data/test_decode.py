"""Every kind of image becomes uint8 RGB of its own size; what is no image is a DecodeError and nothing else."""

import io
import struct
import zlib

import cv2
import numpy as np
import pytest
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageOps

from pipeline.data.decode import DecodeError, decode_rgb
from shards.images.exif import ORIENTATIONS
from shards.images.image_header import read_header
from tests.rigs.images import image_bytes

HEIGHT, WIDTH = 30, 44


def smooth_rgb() -> NDArray[np.uint8]:
    """uint8[30, 44, 3]: gradients, which lossy formats keep within a few levels."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    return np.stack([y * 8, x * 5, 255 - y * 4], axis=2).astype(np.uint8)


def encoded(image: Image.Image, image_format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format=image_format, **options)
    return file.getvalue()


RGB = Image.fromarray(smooth_rgb())
GREY = RGB.convert("L")
PALETTE = RGB.quantize(64)
ALPHA = Image.fromarray(np.dstack([smooth_rgb(), np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH).astype(np.uint8)]))
DEEP = np.linspace(0, 65535, HEIGHT * WIDTH).reshape(HEIGHT, WIDTH).astype(np.uint16)


@pytest.mark.parametrize(
    ("data", "expected", "tolerance"),
    [
        pytest.param(encoded(RGB, "JPEG", quality=95), RGB, 12, id="JPEG"),
        pytest.param(encoded(RGB, "JPEG", quality=95, progressive=True), RGB, 12, id="progressive JPEG"),
        pytest.param(encoded(GREY, "JPEG", quality=95), GREY.convert("RGB"), 6, id="greyscale JPEG"),
        pytest.param(encoded(RGB.convert("CMYK"), "JPEG", quality=95), RGB, 12, id="CMYK JPEG"),
        pytest.param(encoded(RGB, "PNG"), RGB, 0, id="PNG"),
        pytest.param(encoded(GREY, "PNG"), GREY.convert("RGB"), 0, id="greyscale PNG"),
        pytest.param(encoded(PALETTE, "PNG"), PALETTE.convert("RGB"), 0, id="palette PNG"),
        pytest.param(encoded(ALPHA, "PNG"), RGB, 0, id="alpha is dropped, colours stay"),
        pytest.param(encoded(RGB, "WEBP", lossless=True), RGB, 0, id="lossless WebP"),
        pytest.param(encoded(RGB, "WEBP", quality=95), RGB, 16, id="WebP"),
        pytest.param(
            encoded(Image.fromarray(DEEP), "PNG"),
            Image.fromarray((DEEP // 256).astype(np.uint8)).convert("RGB"),
            1,
            id="16-bit PNG: the upper byte, not clipped",
        ),
    ],
)
def test_images_become_rgb(data: bytes, expected: Image.Image, tolerance: int) -> None:
    pixels = decode_rgb(data, orientation=1)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (HEIGHT, WIDTH, 3)
    assert np.abs(pixels.astype(int) - np.asarray(expected).astype(int)).max() <= tolerance


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
def test_the_rigs_images_are_read_as_pillow_reads_them(image_format: str) -> None:
    data = image_bytes(3, image_format=image_format)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert("RGB")).astype(int)
    assert np.abs(decode_rgb(data, orientation=1).astype(int) - expected).max() <= (0 if image_format == "PNG" else 4)


KINDS: dict[str, tuple[Image.Image, str, dict[str, object]]] = {
    "JPEG": (RGB, "JPEG", {"quality": 95}),
    "CMYK JPEG": (RGB.convert("CMYK"), "JPEG", {"quality": 95}),
    "PNG": (RGB, "PNG", {}),
    "WebP": (RGB, "WEBP", {"lossless": True}),
}


def tagged(kind: str, orientation: int) -> bytes:
    """The image as stored, with an orientation tag."""
    image, image_format, options = KINDS[kind]
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, image_format, exif=exif, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_images_are_decoded_as_they_are_seen(kind: str, orientation: int) -> None:
    data = tagged(kind, orientation)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    assert expected.shape == ((HEIGHT, WIDTH, 3) if orientation < 5 else (WIDTH, HEIGHT, 3))
    pixels = decode_rgb(data, orientation=read_header(data).orientation)
    assert pixels.shape == expected.shape
    # The corners differ by far more than this: no other orientation passes.
    assert np.abs(pixels.astype(int) - expected.astype(int)).max() <= (12 if "JPEG" in kind else 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_the_index_says_how_to_turn_and_the_tag_does_not(kind: str, orientation: int) -> None:
    np.testing.assert_array_equal(
        decode_rgb(tagged(kind, orientation), orientation=1), decode_rgb(tagged(kind, 1), orientation=1)
    )


@pytest.mark.parametrize("orientation", [1, 6])
def test_the_stored_pixels_are_the_decoders_own(orientation: int) -> None:
    """Orientation 1 changes not a bit of what was decoded before images were turned."""
    jpeg, png = tagged("JPEG", orientation), tagged("PNG", orientation)
    np.testing.assert_array_equal(decode_rgb(jpeg, orientation=1), simplejpeg.decode_jpeg(jpeg, colorspace="RGB"))
    stored = cv2.imdecode(np.frombuffer(png, dtype=np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    assert stored is not None
    np.testing.assert_array_equal(decode_rgb(png, orientation=1), stored[:, :, ::-1])


@pytest.mark.parametrize("kind", ["PNG", "WebP"])
@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_what_pillow_has_to_decode_is_turned_once(kind: str, orientation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = decode_rgb(tagged(kind, orientation), orientation=orientation)
    monkeypatch.setattr("pipeline.data.decode.cv2.imdecode", lambda *_: None)
    np.testing.assert_array_equal(decode_rgb(tagged(kind, orientation), orientation=orientation), expected)


@pytest.mark.parametrize("orientation", [-1, 0, 9])
def test_an_orientation_that_is_none_is_a_decode_error(orientation: int) -> None:
    with pytest.raises(DecodeError, match=f"orientation {orientation}; allowed are 1 to 8"):
        decode_rgb(tagged("PNG", 1), orientation=orientation)


def png_of_size(height: int, width: int) -> bytes:
    """A PNG whose header promises this size; there are hardly any pixels in it."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(100))), (b"IEND", b""))
    body = (struct.pack(">I", len(d)) + kind + d + struct.pack(">I", zlib.crc32(kind + d)) for kind, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def webp_of_size(height: int, width: int) -> bytes:
    """A lossless WebP whose header promises this size; the pixels are those of a small one."""
    data = bytearray(encoded(RGB, "WEBP", lossless=True))
    place = data.index(b"VP8L") + 9  # after the chunk's name, its size and a signature of one byte
    data[place : place + 4] = struct.pack("<I", (width - 1) | (height - 1) << 14)
    return bytes(data)


def jpeg_of_size(height: int, width: int) -> bytes:
    """A JPEG whose header promises this size; the pixels are those of a small one."""
    data = bytearray(encoded(RGB, "JPEG"))
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">HH", height, width)
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"hello", id="text"),
        pytest.param(b"\xff\xd8\xff", id="only JPEG's first bytes"),
        pytest.param(b"\x89PNG\r\n\x1a\n" + bytes(50), id="only PNG's first bytes"),
        pytest.param(png_of_size(60_000, 60_000), id="a PNG bomb"),
        pytest.param(jpeg_of_size(60_000, 60_000), id="a JPEG bomb"),
        *[
            pytest.param(image_bytes(1, image_format=name)[:-size], id=f"{name} without its last {size} bytes")
            for name in ("JPEG", "PNG", "WEBP")
            for size in (40, 200)
        ],
        pytest.param(encoded(RGB.convert("CMYK"), "JPEG")[:-40], id="CMYK JPEG cut off"),
    ],
)
def test_what_is_no_whole_image_is_a_decode_error(data: bytes) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_rgb(data, orientation=1)
    assert str(caught.value)
    assert " at 0x" not in str(caught.value), "the reason goes to quarantine.jsonl: the same for the same bytes"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(png_of_size(60_000, 60_000), id="a PNG beyond OpenCV's own bound"),
        pytest.param(png_of_size(15_000, 15_000), id="a PNG within it"),
        pytest.param(webp_of_size(15_000, 15_000), id="a WebP"),
    ],
)
def test_a_size_above_the_bound_is_refused_before_anything_is_allocated(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: object) -> None:
        raise AssertionError("the decoder was asked for pixels")

    monkeypatch.setattr("pipeline.data.decode.cv2.imdecode", decode)
    with pytest.raises(DecodeError, match=r"pixels"):
        decode_rgb(data, orientation=1)
