"""Every kind of image becomes uint8 RGB of its own size, and everything else is a DecodeError.

A PNG's colour profile changes no pixel, and nothing that a damaged PNG says reaches standard error.
"""

import contextlib
import io
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import cv2
import numpy as np
import pytest
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from pipeline.data.augment import draws_of
from pipeline.data.config import AugmentConfig
from pipeline.data.decode import DecodeError, Pixels, decode_stored, turn_of, turned
from pipeline.data.transform import train_view
from shards.images.image_header import read_header
from shards.orientation import TURNS
from shards.output.terminal import command_output
from tests.rigs.coded_jpegs import Sampling, coded_jpeg, lossless_jpeg
from tests.rigs.hostile import HOSTILE
from tests.rigs.images import image_bytes, png_with_profile
from tests.rigs.transparent import SIDE, TRANSPARENT

HEIGHT, WIDTH = 30, 44
DEEP = np.linspace(0, 65535, HEIGHT * WIDTH).reshape(HEIGHT, WIDTH).astype(np.uint16)
CALLS = (
    *((simplejpeg, name) for name in ("decode_jpeg_header", "decode_jpeg")),
    *((Image, "open"), (Image, "fromarray"), (Image.Image, "load"), (Image.Image, "crop"), (Image.Image, "resize")),
    *((cv2, name) for name in ("resize", "flip", "borderInterpolate")),
)
RAISED = (
    *(KeyError(6), ValueError("no"), OSError("no"), SyntaxError("no"), EOFError(), struct.error("no"), MemoryError()),
    *(cv2.error("(-4:Insufficient memory)"), OverflowError("no"), ZeroDivisionError(), RecursionError(), TypeError()),
    *(UnidentifiedImageError("<_io.BytesIO object at 0x7f00>"), Image.DecompressionBombError("no"), AttributeError()),
)
VIEWS = {
    "a plain resize": AugmentConfig(flip=True),
    "antialiased": AugmentConfig(antialias=True),
    "bicubic": AugmentConfig(filter="bicubic"),
    "area": AugmentConfig(filter="area"),
    "reflected edges": AugmentConfig(crop="simple_random"),
}


def smooth_rgb() -> NDArray[np.uint8]:
    """uint8[30, 44, 3]: gradients, which lossy formats keep within a few levels."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    return np.stack([y * 8, x * 5, 255 - y * 4], axis=2).astype(np.uint8)


def decoded(data: bytes, *, orientation: int, size: tuple[int, int] = (HEIGHT, WIDTH)) -> Pixels:
    return turned(decode_stored(data, height=size[0], width=size[1]), turn_of(orientation))


def encoded(image: Image.Image, image_format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format=image_format, **options)
    return file.getvalue()


RGB = Image.fromarray(smooth_rgb())


GREY = RGB.convert("L")


PALETTE = RGB.quantize(64)


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
        pytest.param(encoded(RGB, "WEBP", lossless=True), RGB, 0, id="lossless WebP"),
        pytest.param(encoded(RGB, "WEBP", quality=95), RGB, 16, id="WebP"),
        pytest.param(
            encoded(Image.fromarray(DEEP), "PNG"),
            Image.fromarray(np.round(DEEP / 257).astype(np.uint8)).convert("RGB"),
            0,
            id="16-bit greyscale PNG: scaled, not clipped",
        ),
    ],
)
def test_images_become_rgb(data: bytes, expected: Image.Image, tolerance: int) -> None:
    pixels = decoded(data, orientation=1)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (HEIGHT, WIDTH, 3)
    assert np.abs(pixels.astype(int) - np.asarray(expected).astype(int)).max() <= tolerance


@pytest.mark.parametrize("kind", TRANSPARENT)
def test_what_is_transparent_lies_on_white(kind: str) -> None:
    data, expected = TRANSPARENT[kind]
    np.testing.assert_array_equal(decoded(data, orientation=1, size=(SIDE, SIDE)), expected)


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
def test_the_rigs_images_are_read_as_pillow_reads_them(image_format: str) -> None:
    data = image_bytes(3, image_format=image_format)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert("RGB")).astype(int)
    found = decoded(data, orientation=1, size=(24, 32)).astype(int)
    assert np.abs(found - expected).max() <= (0 if image_format == "PNG" else 4)


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
@pytest.mark.parametrize("orientation", TURNS)
def test_images_are_decoded_as_they_are_seen(kind: str, orientation: int) -> None:
    data = tagged(kind, orientation)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    assert expected.shape == ((HEIGHT, WIDTH, 3) if orientation < 5 else (WIDTH, HEIGHT, 3))
    pixels = decoded(data, orientation=read_header(data).orientation)
    assert pixels.shape == expected.shape
    # The corners differ by far more than this: no other orientation passes.
    assert np.abs(pixels.astype(int) - expected.astype(int)).max() <= (12 if "JPEG" in kind else 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("orientation", TURNS)
def test_the_index_says_how_to_turn_and_the_tag_does_not(kind: str, orientation: int) -> None:
    np.testing.assert_array_equal(
        decoded(tagged(kind, orientation), orientation=1), decoded(tagged(kind, 1), orientation=1)
    )


@pytest.mark.parametrize("orientation", [1, 6])
def test_the_stored_pixels_are_the_decoders_own(orientation: int) -> None:
    """Orientation 1 changes not a bit of what was decoded before images were turned."""
    jpeg, png = tagged("JPEG", orientation), tagged("PNG", orientation)
    np.testing.assert_array_equal(decoded(jpeg, orientation=1), simplejpeg.decode_jpeg(jpeg, colorspace="RGB"))
    stored = cv2.imdecode(np.frombuffer(png, dtype=np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    assert stored is not None
    np.testing.assert_array_equal(decoded(png, orientation=1), stored[:, :, ::-1])


@pytest.mark.parametrize("orientation", [-1, 0, 9])
def test_an_orientation_that_is_none_is_a_decode_error(orientation: int) -> None:
    with pytest.raises(DecodeError, match=f"orientation {orientation}; allowed: 1 to 8"):
        decoded(tagged("PNG", 1), orientation=orientation)


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
        decoded(data, orientation=1)
    assert str(caught.value)
    assert " at 0x" not in str(caught.value), "the reason goes to quarantine.jsonl: the same for the same bytes"


@pytest.mark.parametrize(
    ("data", "size"),
    [
        pytest.param(png_of_size(60_000, 60_000), (60_000, 60_000), id="a PNG far above it"),
        pytest.param(png_of_size(15_000, 15_000), (15_000, 15_000), id="a PNG"),
        pytest.param(webp_of_size(15_000, 15_000), (15_000, 15_000), id="a WebP"),
        pytest.param(jpeg_of_size(15_000, 15_000), (15_000, 15_000), id="a JPEG"),
    ],
)
def test_a_size_above_the_bound_is_refused_before_anything_is_allocated(
    data: bytes, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: object) -> None:
        raise AssertionError("the decoder was asked for pixels")

    monkeypatch.setattr("pipeline.data.decode.flattened", decode)
    monkeypatch.setattr("pipeline.data.decode.simplejpeg.decode_jpeg", decode)
    with pytest.raises(DecodeError, match=r"pixels.* 178956970|WebP of 15000x15000 pixels takes 3600000000 bytes"):
        decoded(data, orientation=1, size=size)


@pytest.mark.parametrize("kind", KINDS)
def test_another_size_than_the_indexs_is_a_decode_error(kind: str) -> None:
    expected = r"the image has 30 x 44 pixels \(height x width\), the index says 44 x 30"
    with pytest.raises(DecodeError, match=expected):
        decoded(tagged(kind, 1), orientation=1, size=(44, 30))


@pytest.mark.parametrize("wrap", [bytes, memoryview], ids=["bytes", "a view into a read block"])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_may_be_a_view(kind: str, wrap: Callable[[bytes], bytes | memoryview]) -> None:
    data = tagged(kind, 1)
    np.testing.assert_array_equal(
        decode_stored(wrap(data), height=HEIGHT, width=WIDTH), decode_stored(data, height=HEIGHT, width=WIDTH)
    )


@pytest.mark.parametrize("mode", ["grey", "colour"])
def test_16_bit_pngs_are_scaled(mode: str) -> None:
    """Grey is rounded; of colours Pillow keeps the higher byte, here as in its users' own loaders."""
    deep = np.random.default_rng(0).integers(0, 65536, size=(HEIGHT, WIDTH, 3), dtype=np.uint16)
    deep[0, 0], deep[0, 1], deep[0, 2] = 65535, 128, 129
    pixels = {"grey": deep[:, :, 0], "colour": np.ascontiguousarray(deep[:, :, ::-1])}[mode]
    data = cv2.imencode(".png", pixels)[1].tobytes()
    expected = np.round(deep[:, :, :1] / 257) if mode == "grey" else deep >> 8
    np.testing.assert_array_equal(decoded(data, orientation=1), np.broadcast_to(expected, (HEIGHT, WIDTH, 3)))


def ycck(data: bytes) -> bytes:
    """A CMYK JPEG whose Adobe marker now says that its colours are YCCK."""
    place = data.index(b"Adobe") + 11
    assert data[place] == 0
    return data[:place] + b"\x02" + data[place + 1 :]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(tagged("CMYK JPEG", 1), id="CMYK, inverted as Adobe does"),
        pytest.param(ycck(tagged("CMYK JPEG", 1)), id="YCCK"),
    ],
)
def test_print_colours_are_read_as_others_read_them(data: bytes) -> None:
    found = decoded(data, orientation=1)
    by_opencv = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), cv2.IMREAD_COLOR_RGB)
    assert by_opencv is not None
    np.testing.assert_array_equal(found, by_opencv)
    with Image.open(io.BytesIO(data)) as image:
        assert np.abs(found.astype(int) - np.asarray(image.convert("RGB"))).max() <= 1


@pytest.mark.parametrize("denominator", [2, 4, 8])
@pytest.mark.parametrize("kind", ["JPEG", "CMYK JPEG"])
@pytest.mark.parametrize("size", [(64, 96), (65, 97), (71, 103)], ids=str)
def test_jpegs_are_decoded_scaled(kind: str, size: tuple[int, int], denominator: int) -> None:
    """To sides rounded up; on a smooth image the pixels are the means of what they cover."""
    image, image_format, options = KINDS[kind]
    data = encoded(image.resize(size[::-1], Image.Resampling.BICUBIC), image_format, **options)
    small = decode_stored(data, height=size[0], width=size[1], denominator=denominator)
    assert small.shape == (-(-size[0] // denominator), -(-size[1] // denominator), 3)
    whole = decode_stored(data, height=size[0], width=size[1]).astype(float)
    height, width = size[0] // denominator, size[1] // denominator
    blocks = whole[: height * denominator, : width * denominator].reshape(height, denominator, width, denominator, 3)
    assert np.abs(small[:height, :width] - blocks.mean(axis=(1, 3))).max() <= 8


@pytest.mark.parametrize("sampling", [[(1, 4), (1, 1), (1, 1)], [(4, 2), (1, 1), (1, 1)], [(2, 4), (1, 1), (1, 1)]])
def test_a_sampling_without_a_name_is_decoded_by_pillow(sampling: Sampling) -> None:
    """4:4:1 is what a lossless turn makes of 4:1:1; simplejpeg raises KeyError."""
    for seed in range(3):
        coded = coded_jpeg(random.Random(seed), sampling=sampling)
        with Image.open(io.BytesIO(coded.data)) as image:
            expected = np.asarray(image.convert("RGB"))
        found = decode_stored(coded.data, height=coded.height, width=coded.width)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("denominator", [1, 2, 4, 8])
def test_a_lossless_jpeg_never_reaches_a_decoder(denominator: int) -> None:
    """At a reduced scale, libjpeg-turbo 3 writes beyond its memory: a crash that nothing fences."""
    data = lossless_jpeg(97, 321)
    hidden = data[:2] + data[:2] + data[2:]  # a second start, which Pillow reads over
    for each in (data, hidden):
        with pytest.raises(DecodeError, match="a lossless or hierarchical JPEG"):
            decode_stored(each, height=97, width=321, denominator=denominator)


def test_a_text_that_is_called_transparency_is_no_transparent_value() -> None:
    texts = PngInfo()
    texts.add_text("transparency", "x")
    found = decode_stored(encoded(RGB, "PNG", pnginfo=texts), height=HEIGHT, width=WIDTH)
    np.testing.assert_array_equal(found, np.asarray(RGB))


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[1])
def test_whatever_a_library_raises_is_a_fault_of_that_image(
    call: tuple[object, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anything else would end the run, and would meet it again after each restart, since the order is fixed."""
    images = [encoded(RGB, "JPEG"), encoded(RGB, "PNG"), encoded(RGB.convert("RGBA"), "WEBP")]
    faults = list[str]()
    for error in RAISED:
        with monkeypatch.context() as patch:
            patch.setattr(*call, raising(error))
            for data, config in product(images, VIEWS.values()):
                sample, draws = Stored(data), draws_of(np.array([7]), np.array([0]), seed=0)[0]
                draws[-1] = 0.0  # mirrored
                try:
                    train_view(sample, draws, config=config, out=np.zeros((16, 16, 3), np.uint8))
                except DecodeError as fault:
                    faults.append(str(fault))
    assert faults or call[1].startswith("decode_jpeg"), "after simplejpeg, Pillow is asked"
    assert all(faults), "each has a reason"
    assert not any("0x7f00" in fault for fault in faults), "no address"


@dataclass
class Stored:
    """An image as a shard holds it."""

    data: bytes
    height: int = HEIGHT
    width: int = WIDTH
    orientation: int = 1


def raising(error: Exception) -> Callable[..., None]:
    def fails(*_: object, **__: object) -> None:
        raise error

    return fails


def test_a_damaged_jpeg_that_pillow_loads_is_used_as_pillow_loads_it() -> None:
    """Strict decoders refuse the extra bytes, and would refuse images that everybody else trains on."""
    data = tagged("JPEG", 1)
    damaged = data[:-2] + bytes(9) + data[-2:]
    with pytest.raises(ValueError, match="extraneous bytes"):
        simplejpeg.decode_jpeg(damaged)
    np.testing.assert_array_equal(decoded(damaged, orientation=1), decoded(data, orientation=1))


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
