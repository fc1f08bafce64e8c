"""Smaller copies and thumbnails: upright, in the right size, on white where they are transparent."""

import io
import random
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from shards.errors import ImageRefusedError
from shards.images.config import Resize
from shards.images.image_header import ImageHeader, read_header
from shards.images.resize import (
    MOST_BYTES,
    MOST_PICTURE_BYTES,
    PICTURE_SIDE,
    THUMBNAIL_SIDE,
    fitted,
    flattened,
    is_untouched,
    picture,
    refusal,
    thumbnail,
)
from tests.rigs.images import image_bytes
from tests.rigs.transparent import SIDE, TRANSPARENT

SMALL = Resize(short_side=16, quality=95)
CONVERT = Resize(convert=True, quality=95)
# Four plain quarters, whose colours and positions survive JPEG and any filter.
COLOURS = np.array([[[220, 40, 40], [40, 200, 60]], [[50, 60, 210], [230, 220, 70]]], dtype=np.uint8)
QUARTERS = Image.fromarray(np.kron(COLOURS, np.ones((32, 48, 1), dtype=np.uint8)))  # 64 high, 96 wide
RAMP = np.tile(np.linspace(0, 65_535, 64).astype(np.uint16), (64, 1))


def encoded(image: Image.Image, image_format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def copied(data: bytes, resize: Resize = SMALL) -> tuple[NDArray[np.uint8], ImageHeader]:
    """The decoded copy and its header, which must agree."""
    copy, header = fitted(data, read_header(data), resize)
    assert read_header(copy) == header
    assert (header.ext, header.orientation) == ("jpg", 1)
    with Image.open(io.BytesIO(copy)) as image:
        assert set(image.info) <= {"jfif", "jfif_version", "jfif_unit", "jfif_density"}
        return np.asarray(image), header


def corners(pixels: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The centres of the four quarters."""
    height, width = pixels.shape[:2]
    return pixels[height // 4 :: height // 2, width // 4 :: width // 2][:2, :2].astype(np.int64)


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("resize", [Resize(), Resize(short_side=64), Resize(short_side=500), CONVERT])
def test_small_enough_is_the_same_bytes(image_format: str, resize: Resize) -> None:
    data = encoded(QUARTERS, image_format)
    header = read_header(data)
    assert is_untouched(header, resize)
    assert fitted(data, header, resize) == (data, header)
    assert refusal(header, resize) is None


def exif(orientation: int) -> bytes:
    block = Image.Exif()
    block[0x0112] = orientation
    return block.tobytes()


@pytest.mark.parametrize("mode", ["CMYK", "L"])
def test_untouched_whatever_its_mode_and_orientation(mode: str) -> None:
    data = encoded(QUARTERS.convert(mode), "JPEG", exif=exif(6))
    assert fitted(data, read_header(data), CONVERT)[0] is data


@pytest.mark.parametrize(
    ("data", "worst"),
    [
        (encoded(QUARTERS, "JPEG", quality=95), 12),
        (encoded(QUARTERS, "JPEG", progressive=True, comment=b"a comment", icc_profile=bytes(500)), 12),
        (encoded(QUARTERS, "JPEG", keep_rgb=True), 12),
        (encoded(QUARTERS.convert("CMYK"), "JPEG", quality=95), 20),
        (encoded(QUARTERS, "PNG"), 12),
        (encoded(QUARTERS.convert("P", palette=Image.Palette.ADAPTIVE), "PNG"), 12),
        (encoded(QUARTERS.convert("RGBA"), "PNG"), 12),
        (encoded(QUARTERS, "WEBP", lossless=True), 12),
        (encoded(QUARTERS, "WEBP", lossless=True, save_all=True, append_images=[QUARTERS.rotate(180)]), 12),
        (encoded(QUARTERS, "PNG", save_all=True, append_images=[QUARTERS.rotate(180)]), 12),
        (encoded(QUARTERS, "GIF"), 12),
        (encoded(QUARTERS, "GIF", save_all=True, append_images=[QUARTERS.rotate(180)]), 12),
        (encoded(QUARTERS, "BMP"), 12),
        (encoded(QUARTERS, "TIFF"), 12),
        (encoded(QUARTERS.convert("CMYK"), "TIFF", compression="tiff_lzw"), 12),
        (encoded(QUARTERS, "TIFF", compression="tiff_lzw", save_all=True, append_images=[QUARTERS.rotate(90)]), 12),
    ],
    ids=str.split("jpg progressive rgb cmyk png palette rgba webp webp2 apng gif gif2 bmp tif tif-cmyk tif2"),
)
def test_copies_have_the_colours_of_the_first_image(data: bytes, worst: int) -> None:
    pixels, header = copied(data)
    assert (header.height, header.width, header.mode) == (16, 24, "RGB")
    assert np.abs(corners(pixels) - COLOURS).max() <= worst


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_copies_stand_upright(image_format: str, orientation: int) -> None:
    options = {"tiffinfo": {0x0112: orientation}} if image_format == "TIFF" else {"exif": exif(orientation)}
    data = encoded(QUARTERS, image_format, **options)
    assert read_header(data).orientation == orientation
    pixels, header = copied(data)
    assert (header.height, header.width) == ((16, 24) if orientation < 5 else (24, 16))
    turned = {2: COLOURS[:, ::-1], 3: COLOURS[::-1, ::-1], 4: COLOURS[::-1], 5: COLOURS.transpose(1, 0, 2)}
    turned |= {6: np.rot90(COLOURS, -1), 7: COLOURS[::-1, ::-1].transpose(1, 0, 2), 8: np.rot90(COLOURS)}
    assert np.abs(corners(pixels) - turned.get(orientation, COLOURS)).max() <= 20


@pytest.mark.parametrize("image_format", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_clipped(image_format: str) -> None:
    data = encoded(Image.fromarray(RAMP), image_format)
    pixels, header = copied(data, Resize(short_side=32, quality=95))
    assert (header.mode, read_header(data).mode) == ("L", "I;16")
    assert np.abs(pixels.mean(axis=0) - np.linspace(0, 255, 32)).max() < 5


@pytest.mark.parametrize(
    ("data", "mode"),
    [
        (encoded(QUARTERS.convert("L"), "JPEG"), "L"),
        (encoded(QUARTERS.convert("L"), "PNG"), "L"),
        (encoded(QUARTERS.convert("1"), "PNG"), "L"),
        (encoded(QUARTERS.convert("LA"), "PNG"), "L"),
        (encoded(QUARTERS.convert("1"), "TIFF", compression="group4"), "L"),
    ],
    ids=str.split("jpg png bilevel la fax"),
)
def test_grey_stays_grey(data: bytes, mode: str) -> None:
    pixels, header = copied(data)
    assert header.mode == mode
    assert np.abs(corners(pixels) - np.asarray(Image.fromarray(COLOURS).convert("L"))).max() < 60


def transparent(mode: str) -> Image.Image:
    image = QUARTERS.convert("RGBA")
    image.putalpha(Image.fromarray(np.kron(np.array([[0, 255], [255, 255]], dtype=np.uint8), np.ones((32, 48)) > 0)))
    return image.convert(mode)


@pytest.mark.parametrize(
    "data",
    [
        encoded(transparent("RGBA"), "PNG"),
        encoded(transparent("RGBA"), "WEBP", lossless=True),
        encoded(transparent("LA"), "PNG"),
        encoded(transparent("RGBA"), "TIFF"),
        encoded(transparent("RGBA"), "GIF"),
        encoded(QUARTERS, "PNG", transparency=(220, 40, 40)),
    ],
    ids=str.split("png webp la tif gif key"),
)
def test_transparent_becomes_white(data: bytes) -> None:
    found = corners(copied(data)[0])
    assert found[0, 0].min() > 240
    assert found[0, 1].max() < 230


@pytest.mark.parametrize(
    ("height", "width", "short_side", "size"),
    [(30, 40, 24, (24, 32)), (40, 30, 20, (27, 20)), (33, 65, 32, (32, 63)), (500, 2, 1, (250, 1))],
)
def test_aspect_is_kept(height: int, width: int, short_side: int, size: tuple[int, int]) -> None:
    pixels, _ = copied(encoded(QUARTERS.resize((width, height)), "JPEG"), Resize(short_side=short_side))
    assert pixels.shape[:2] == size


def test_converted_without_a_size_keeps_its_own() -> None:
    pixels, _ = copied(encoded(QUARTERS, "BMP"), CONVERT)
    assert np.abs(pixels.astype(np.int64) - np.asarray(QUARTERS)).mean() < 5


def header_of(ext: str, height: int, width: int, mode: str = "RGB") -> ImageHeader:
    return ImageHeader(ext=ext, height=height, width=width, mode=mode, orientation=1)


@pytest.mark.parametrize(
    ("header", "resize", "reason"),
    [
        (header_of("gif", 9, 9), Resize(), "gif cannot be stored as it is; --resize.convert"),
        (header_of("gif", 9, 9), CONVERT, None),
        (header_of("bmp", 9, 9), SMALL, None),
        (header_of("tif", 9, 9, "F"), SMALL, "pixels of 32 bits (mode F)"),
        (header_of("png", 9, 70_000), Resize(), None),
        (header_of("tif", 9, 70_000), CONVERT, "9x70000 pixels do not fit into a JPEG"),
        (header_of("webp", 10_000, 10_000), SMALL, None),  # what it takes to decode is for the limits
    ],
)
def test_refused_by_header(header: ImageHeader, resize: Resize, reason: str | None) -> None:
    found = refusal(header, resize)
    if reason is None:
        assert found is None
        return
    assert found is not None
    assert reason in found
    with pytest.raises(ImageRefusedError):
        fitted(b"", header, resize)


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_what_does_not_decode_is_refused(image_format: str) -> None:
    data = image_bytes(3, height=64, width=80, image_format=image_format)
    header = read_header(data)
    with pytest.raises(ImageRefusedError):
        fitted(data[: len(data) // 2], header, SMALL)
    rng = random.Random(image_format)
    for _ in range(150):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] = rng.randrange(256)
        try:
            fitted(bytes(damaged), read_header(bytes(damaged)), SMALL)
        except ImageRefusedError as error:
            message = str(error)
        else:
            continue
        assert " at 0x" not in message


def test_photographs_come_out_as_in_a_single_exact_step(test_data: Path) -> None:
    resize = Resize(short_side=96, quality=95)
    for path in sorted((test_data / "imagenet-sample").glob("*.JPEG"))[:40]:
        data = path.read_bytes()
        pixels, header = copied(data, resize)
        assert fitted(data, read_header(data), resize)[0] == fitted(data, read_header(data), resize)[0]
        with Image.open(io.BytesIO(data)) as image:
            exact = image.resize((header.width, header.height), Image.Resampling.LANCZOS)
        error = pixels.astype(np.float64) - np.asarray(exact)
        assert 20 * np.log10(255 / np.sqrt((error**2).mean())) > 26, path.name


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


def encoded_upright(image: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, **options)  # type: ignore[arg-type]
    return file.getvalue()


@pytest.mark.parametrize("length", [60_000, 70_000])
def test_a_long_comment_is_not_copied(length: int) -> None:
    """Pillow writes a PNG's text of that name into the JPEG, and raises if it does not fit."""
    texts = PngInfo()
    texts.add_text("comment", "a" * length)
    data = encoded_upright(Image.new("RGB", (60, 40)), format="PNG", pnginfo=texts)
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
    made = thumbnail(encoded_upright(Image.new("RGB", (width, height)), format="JPEG"))
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
    made = thumbnail(encoded_upright(image, format="JPEG" if mode == "CMYK" else "PNG"))
    assert made is not None
    with Image.open(io.BytesIO(made.data)) as small:
        assert small.mode == "RGB"
        assert np.asarray(small).mean() == pytest.approx(255 if mode == "1" else 200, abs=60 if mode == "1" else 4)


def test_noise_takes_no_more_bytes_than_others() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (176, 440, 3), dtype=np.uint8)
    made = thumbnail(encoded_upright(Image.fromarray(noise), format="PNG"))
    assert made is not None
    assert len(made.data) <= MOST_BYTES
    noise = np.random.default_rng(0).integers(0, 256, (700, 700, 3), dtype=np.uint8)
    made = picture(encoded_upright(Image.fromarray(noise), format="PNG"))
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
    made = picture(encoded_upright(Image.new("RGB", (width, height)), format="PNG"))
    assert made is not None
    assert (made.height, made.width) == (height, width)
    with Image.open(io.BytesIO(made.data)) as small:
        assert (small.height, small.width) == expected


def test_transparent_pixels_are_white() -> None:
    made = thumbnail(encoded_upright(Image.new("RGBA", (8, 8), (0, 0, 0, 0)), format="PNG"))
    assert made is not None
    assert np.asarray(Image.open(io.BytesIO(made.data))).min() > 250


def test_exif_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    made = thumbnail(encoded_upright(Image.new("RGB", (400, 200)), format="JPEG", exif=exif))
    assert made is not None
    assert (made.height, made.width) == (400, 200)


@pytest.mark.parametrize("data", [b"", b"no image", b"<svg onload=alert(1)>", image_bytes(1)[:200]])
def test_broken_images_have_none(data: bytes) -> None:
    assert thumbnail(data) is None
    assert picture(data) is None
