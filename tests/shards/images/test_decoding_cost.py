"""Images that cost far more to decode than others of their size: refused by their markers, and the flag lifts it."""

import io
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import simplejpeg
from PIL import Image

from shards.errors import ImageRefusedError
from shards.images.config import DEFAULT_LIMITS, WIDEST_LIMITS, ImageLimits
from shards.images.decoding_cost import refuse_costly
from shards.images.image_header import read_header
from shards.images.near_duplicates import perceptual_hash
from shards.images.resize import picture, thumbnail
from tests.rigs.costly_images import (
    gif_of_extensions,
    png_of_chunks,
    progressive_jpeg,
    sequential_jpeg,
    tiff_of_strips,
    webp_animation,
)
from tests.rigs.images import image_bytes
from tests.rigs.jpegs import KINDS, jpeg_of

MANY_SCANS = progressive_jpeg(1500, 1500, num_scans=882)
LARGE = progressive_jpeg(4096, 4096, num_scans=882)
HUGE = progressive_jpeg(13377, 13377, num_scans=1, num_components=3)
PHOTO = jpeg_of("420", height=8, width=8)
EXIF = b"\xff\xe1\0\x0cExif\0\0abcd"
PROFILE = b"a\0\0" + zlib.compress(bytes(900_000))
MANY = DEFAULT_LIMITS.max_chunks + 64
COSTLY = [  # the data, the limit, a value that lifts it, words of the message
    pytest.param(MANY_SCANS, "max_scans", 882, "a JPEG of 882 scans", id="many scans"),
    pytest.param(progressive_jpeg(64, 64, num_scans=101), "max_scans", 101, "101 scans", id="one scan too many"),
    pytest.param(
        progressive_jpeg(13000, 8200, num_scans=22, band=21),
        "max_scan_pixels",
        22 * 13000 * 8200,
        "22 scans with 2345200000 pixels in all",
        id="pixels of all scans",
    ),
    pytest.param(HUGE, "max_memory_bytes", 9 * 13384**2, "1 scan takes 16", id="179 megapixels at once"),
    pytest.param(
        sequential_jpeg(11000, 11000, [[1], [2], [3]]),
        "max_memory_bytes",
        9 * 11000**2,
        "3 scans takes 1089000000 bytes",
        id="components in scans of their own",
    ),
    pytest.param(sequential_jpeg(8, 8, [[1], *[[1, 2, 3]] * 100]), "max_scans", 101, "101 scans", id="repeated scans"),
    pytest.param(webp_animation(8200, 8200, num_frames=1), "max_memory_bytes", 16 * 8200**2, "WebP", id="WebP canvas"),
    pytest.param(webp_animation(8, 8, num_frames=MANY), "max_chunks", 2 * MANY, "WebP of more", id="WebP animation"),
    pytest.param(png_of_chunks(b"IDAT", b"", num_chunks=MANY), "max_chunks", 2 * MANY, "PNG of more", id="empty IDAT"),
    pytest.param(png_of_chunks(b"tEXt", b"a\0b", num_chunks=MANY), "max_chunks", 2 * MANY, "PNG of more", id="texts"),
    pytest.param(
        png_of_chunks(b"iCCP", PROFILE, num_chunks=65),
        "max_chunks",
        2 * MANY,
        "a profile counts as 1024",
        id="profiles",
    ),
    pytest.param(
        PHOTO[:2] + EXIF * 65 + PHOTO[2:], "max_chunks", 2 * MANY, "part of its EXIF counts as 1024", id="EXIF parts"
    ),
    pytest.param(
        PHOTO[:2] + b"\xff\xfe\0\2" * MANY + PHOTO[2:], "max_chunks", 2 * MANY, "65536 segments", id="JPEG comments"
    ),
    pytest.param(gif_of_extensions(MANY), "max_chunks", 2 * MANY, "a GIF of more", id="GIF comments"),
    pytest.param(tiff_of_strips(MANY), "max_chunks", 2 * MANY, "65536 values in tag 273", id="TIFF strips"),
]
ANY_SIZE = replace(DEFAULT_LIMITS, max_pixels=WIDEST_LIMITS.max_pixels)


@pytest.mark.parametrize(("data", "name", "lifted", "message"), COSTLY)
def test_what_is_refused_and_what_lifts_it(data: bytes, name: str, lifted: int, message: str) -> None:
    with pytest.raises(ImageRefusedError, match=message) as refusal:
        read_header(data, ANY_SIZE)
    assert f"allowed: {getattr(DEFAULT_LIMITS, name)} (--limits.{name.replace('_', '-')} of pack" in str(refusal.value)
    with pytest.raises(ImageRefusedError, match=message):
        refuse_costly(memoryview(data), ANY_SIZE)
    assert read_header(data, replace(ANY_SIZE, **{name: lifted})).height >= 1
    assert thumbnail(data) is None
    assert picture(data) is None


def test_small_files_of_many_scans() -> None:
    assert (len(MANY_SCANS) < 25_000, len(LARGE) < 70_000, len(HUGE) < 1_100_000) == (True, True, True)
    with pytest.raises(ImageRefusedError, match="882 scans; allowed: 100"):
        refuse_costly(LARGE, DEFAULT_LIMITS)
    with pytest.raises(ImageRefusedError, match=r"14797504512 pixels in all; allowed: 2147483648"):
        refuse_costly(LARGE, replace(DEFAULT_LIMITS, max_scans=1000))
    refuse_costly(LARGE, replace(DEFAULT_LIMITS, max_scans=1000, max_scan_pixels=14_797_504_512))


def test_a_baseline_jpeg_is_decoded_row_by_row_whatever_the_limits_of_others() -> None:
    refuse_costly(PHOTO, ImageLimits(max_scans=1, max_scan_pixels=1, max_memory_bytes=1, max_chunks=20))


SOUND = [
    *(pytest.param(jpeg_of(kind, height=90, width=130), id=kind) for kind in KINDS),
    *(pytest.param(image_bytes(1, image_format=kind), id=kind) for kind in ("PNG", "WEBP", "GIF", "TIFF", "BMP")),
    pytest.param(png_of_chunks(b"tEXt", b"a\0b", num_chunks=2, interlaced=True), id="interlaced PNG"),
    pytest.param(progressive_jpeg(4000, 6000, num_scans=20, num_components=3, band=16), id="20 scans of a photograph"),
    pytest.param(progressive_jpeg(10_240, 10_240, num_scans=14, num_components=3, band=63), id="105 megapixels, 4:4:4"),
    pytest.param(sequential_jpeg(11_000, 12_000, [[1, 2, 3]]), id="baseline of 132 megapixels"),
    pytest.param(webp_animation(8192, 8192, num_frames=2), id="WebP of 67 megapixels"),
    pytest.param(webp_animation(8, 8, num_frames=5000), id="long WebP animation"),
    pytest.param(png_of_chunks(b"IDAT", b"", num_chunks=8192), id="64 MiB in chunks of 8 KiB"),
    pytest.param(tiff_of_strips(30_000), id="TIFF of a strip a row"),
]


@pytest.mark.parametrize("data", SOUND)
def test_what_is_taken(data: bytes) -> None:
    refuse_costly(data, DEFAULT_LIMITS)
    read_header(data)


def test_photographs_are_taken_and_as_progressive_ones_too(test_data: Path) -> None:
    for number, path in enumerate(sorted((test_data / "imagenet-sample").iterdir())):
        refuse_costly(path.read_bytes(), DEFAULT_LIMITS)
        if number % 100 == 0:
            file = io.BytesIO()
            Image.open(path).convert("RGB").save(file, "JPEG", progressive=True, subsampling=0)
            refuse_costly(file.getvalue(), DEFAULT_LIMITS)


SCANS = progressive_jpeg(64, 64, num_scans=150)
FIRST = SCANS.index(b"\xff\xda")
SECOND = SCANS.index(b"\xff\xda", FIRST + 2)
READ_TO_THE_END = [
    pytest.param(SCANS[:2] + b"\xff\xff\xff" + SCANS[2:], id="fill bytes"),
    pytest.param(SCANS[:2] + b"\xff\xfe\0\1" + SCANS[2:], id="a comment of less than no length"),
    pytest.param(SCANS[:SECOND] + b"junk" + SCANS[SECOND:], id="bytes after a scan"),
    pytest.param(SCANS[:SECOND] + b"\xff\x01\xff\xd7" + SCANS[SECOND:], id="markers without a length"),
    pytest.param(SCANS + b"\xff\xd8", id="more behind the end"),
]
ENDS = (b"", b"\xff\xda\0", b"\xff\xfe", b"\xff")
CUT_OFF = [pytest.param(SCANS[:-2] + end, id=end.hex() or "no end") for end in ENDS]


IN_THE_HEADER = pytest.param(
    SCANS[:FIRST] + b"junk\xff\0\xff\xd3" + SCANS[FIRST:], id="bytes, and restarts, before a segment"
)


@pytest.mark.parametrize("data", [*READ_TO_THE_END, *CUT_OFF, IN_THE_HEADER])
def test_what_libjpeg_reads_is_counted(data: bytes) -> None:
    with pytest.raises(ImageRefusedError, match="150 scans"):
        refuse_costly(data, DEFAULT_LIMITS)


@pytest.mark.parametrize("data", READ_TO_THE_END)
def test_libjpeg_reads_it(data: bytes) -> None:
    assert simplejpeg.decode_jpeg(data, strict=False).shape == (64, 64, 3)


def test_scans_behind_the_end_are_not_counted() -> None:
    refuse_costly(progressive_jpeg(64, 64, num_scans=3) + SCANS, DEFAULT_LIMITS)
    refuse_costly(jpeg_of("420", height=64, width=64)[:-2] + SCANS[FIRST:], DEFAULT_LIMITS)


def test_damage_is_left_to_the_decoder() -> None:
    for data in (MANY_SCANS, image_bytes(1, image_format="PNG"), tiff_of_strips(3), gif_of_extensions(3)):
        for end in range(60):
            refuse_costly(data[:end], DEFAULT_LIMITS)
    refuse_costly(b"", DEFAULT_LIMITS)


def test_hashes_are_for_callers_with_limits_of_their_own() -> None:
    assert perceptual_hash(progressive_jpeg(64, 64, num_scans=150)) is None  # black: it was decoded
