"""Headers of images in all formats, data that has none, and single image files."""

import io
import os
import random
import struct
import time
import zlib
from pathlib import Path

import pytest
from PIL import Image

from shards.errors import ImageRefusedError, UserError
from shards.images.config import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, ImageLimits
from shards.images.image_header import ImageFile, ImageHeader, read_header, read_image_file
from tests.rigs.costly_images import progressive_jpeg, sequential_jpeg
from tests.rigs.images import image_bytes

FORMATS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "TIFF": "tif", "BMP": "bmp"}


def png_of_size(height: int, width: int) -> bytes:
    """A PNG that claims a size and has almost no pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    for name in (b"IDAT", b"IEND"):
        chunks += bytes(4) + name + struct.pack(">I", zlib.crc32(name))
    return b"\x89PNG\r\n\x1a\n" + chunks


def jpeg_of_size(height: int, width: int) -> bytes:
    """A JPEG that claims a size it does not have."""
    data = image_bytes(1)
    frame = data.index(b"\xff\xc0")
    return data[: frame + 5] + struct.pack(">HH", height, width) + data[frame + 9 :]


def tiff(orientation: int, mode: str = "RGB") -> bytes:
    """A TIFF, stored 48 pixels wide and 20 high."""
    file = io.BytesIO()
    image = Image.open(io.BytesIO(image_bytes(1, height=20, width=48))).convert(mode)
    image.save(file, "TIFF", tiffinfo={0x0112: orientation})
    return file.getvalue()


def num_bytes(value: object) -> str | None:
    """The number of bytes as the name of a test case, since bytes are unreadable."""
    return f"{len(value)} bytes" if isinstance(value, bytes) else None


@pytest.mark.parametrize(("image_format", "ext"), FORMATS.items())
def test_format_and_size_come_from_the_header(image_format: str, ext: str) -> None:
    header = read_header(image_bytes(1, height=20, width=48, image_format=image_format))
    mode = "P" if ext == "gif" else "RGB"
    assert header == ImageHeader(ext=ext, height=20, width=48, mode=mode, orientation=1)


def test_pixels_are_never_decoded() -> None:
    header = read_header(png_of_size(8000, 8000))
    assert (header.height, header.width) == (8000, 8000)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_size_of_a_tiff_is_as_stored_too(orientation: int) -> None:
    header = read_header(tiff(orientation))
    assert (header.height, header.width, header.orientation) == (20, 48, orientation)


def grey_tiff(bits: int, *, photometric: int = 1, sample_format: int = 1) -> bytes:
    """A grey TIFF of 8 x 8 pixels, all zero, as other programs write it: Pillow does not."""
    tags = {256: 8, 257: 8, 258: bits, 259: 1, 262: photometric, 273: 122, 277: 1, 278: 8, 279: 128}
    entries = [(tag, value) for tag, value in sorted((tags | {339: sample_format}).items())]
    table = b"".join(struct.pack("<HHII", tag, 3, 1, value) for tag, value in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + table + bytes(4) + bytes(128)


@pytest.mark.parametrize(("bits", "photometric", "mode"), [(8, 0, "L"), (8, 1, "L"), (16, 1, "I;16"), (4, 0, "L")])
def test_other_grey_tiffs_are_read(bits: int, photometric: int, mode: str) -> None:
    assert read_header(grey_tiff(bits, photometric=photometric)).mode == mode


def test_tiff_keeps_its_mode() -> None:
    assert [read_header(tiff(1, mode)).mode for mode in ("L", "CMYK", "1", "F")] == ["L", "CMYK", "1", "F"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"not an image at all", "not a JPEG"),
        (b"<!DOCTYPE html><html>404 Not Found</html>", "not a JPEG"),
        (b"BMW is a car", "header"),
        (image_bytes(1)[:10], "truncated"),
        (image_bytes(1, image_format="PNG")[:12], "truncated"),
        (image_bytes(1, image_format="GIF")[:40], "truncated"),
        (b"II*\0\x08\0\0\0", "damaged"),
        (b"RIFF\x04\x00\x00\x00WAVE", "header"),
        (png_of_size(20_000, 20_000), "too large: 20000x20000 pixels"),
        (png_of_size(12_000, 12_000), "too large: 12000x12000 pixels, allowed: 134217728 in all"),
        (jpeg_of_size(65_535, 65_535), "too large: 65535x65535 pixels"),
        (png_of_size(0, 77), "no pixels: 0x77"),
        (jpeg_of_size(77, 0), "no pixels: 77x0"),
        (b"\xff\xd8\xff" + bytes((64 << 20) + 1), "too large: 67108868 bytes, allowed: 67108864"),
    ],
    ids=num_bytes,
)
def test_what_cannot_be_packed_is_refused_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ImageRefusedError, match=reason):
        read_header(data)


def test_limits() -> None:
    data = image_bytes(1, height=20, width=48)
    exact = ImageLimits(max_bytes=len(data), max_pixels=960)
    assert read_header(data, exact).height == 20
    with pytest.raises(ImageRefusedError, match=f"{len(data)} bytes, allowed: {len(data) - 1}"):
        read_header(data, ImageLimits(max_bytes=len(data) - 1))
    with pytest.raises(ImageRefusedError, match="20x48 pixels, allowed: 959"):
        read_header(data, ImageLimits(max_pixels=959))
    assert ImageLimits() == ImageLimits(max_bytes=MAX_IMAGE_BYTES, max_pixels=MAX_IMAGE_PIXELS)
    with pytest.raises(UserError, match=r"limits\.max_bytes is 0"):
        ImageLimits(max_bytes=0)
    with pytest.raises(UserError, match=r"limits\.max_pixels is 178956971; allowed: 1 to 178,956,970"):
        ImageLimits(max_pixels=178_956_971)


def survives(data: bytes) -> bool:
    """Whether it has a header. Any error except a refusal fails the test."""
    try:
        header = read_header(data)
    except ImageRefusedError as error:
        reason = str(error)
    else:
        assert header.height > 0
        assert header.width > 0
        assert 1 <= header.orientation <= 8
        return True
    assert "0x7f" not in reason, "an address differs from run to run"
    assert "\n" not in reason
    return False


@pytest.mark.parametrize("image_format", FORMATS)
def test_truncated_anywhere_it_is_refused(image_format: str) -> None:
    data = image_bytes(1, image_format=image_format)
    whole = [size for size in range(len(data)) if survives(data[:size])]
    if image_format not in ("TIFF", "BMP"):  # their headers do not say where they end
        assert whole in ([], [len(data) - 1])  # a GIF's trailer may be missing


@pytest.mark.parametrize("image_format", FORMATS)
def test_damaged_anywhere_it_is_refused_or_taken(image_format: str) -> None:
    rng = random.Random(image_format)
    data = image_bytes(1, image_format=image_format)
    begun = time.monotonic()
    for _ in range(1000):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 2, 8))):
            place = rng.choice((rng.randrange(len(data)), rng.randrange(64)))
            damaged[place] = rng.randrange(256)
        survives(bytes(damaged))
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
def test_an_image_in_each_format(tmp_path: Path, image_format: str) -> None:
    data = image_bytes(1, height=24, width=32, image_format=image_format)
    (tmp_path / "a").write_bytes(data)
    assert read_image_file(tmp_path / "a") == ImageFile(data=data, height=24, width=32, orientation=1)


def test_a_turned_image_keeps_its_stored_size(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (32, 24)).save(tmp_path / "a.jpg", exif=exif)
    read = read_image_file(tmp_path / "a.jpg")
    assert (read.height, read.width, read.orientation) == (24, 32, 6)


def gif() -> bytes:
    file = io.BytesIO()
    Image.new("P", (4, 4)).save(file, "GIF")
    return file.getvalue()


def test_no_flag_lifts_limits_here_so_they_are_the_widest(tmp_path: Path) -> None:
    (tmp_path / "many").write_bytes(progressive_jpeg(40, 50, num_scans=882))
    assert read_image_file(tmp_path / "many").height == 40
    (tmp_path / "too many").write_bytes(sequential_jpeg(40, 50, [[1]] * 10_001))
    with pytest.raises(ImageRefusedError, match=r"10,001 scans; allowed: 10000$"):
        read_image_file(tmp_path / "too many")


def test_places_without_an_image(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("gone", "No such file"),
        ("", "it is a folder"),
        ("pipe", "not a regular file"),
        ("\0", "null"),
    ):
        with pytest.raises(ImageRefusedError, match=message):
            read_image_file(tmp_path / name)
