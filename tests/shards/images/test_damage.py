"""Finds JPEGs and PNGs of which a part is missing, and takes no sound one for damaged."""

import io
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from jobs.data.pack import PackJob, run
from shards.images.config import ImageChecks
from shards.images.damage import jpeg_damage, png_damage
from shards.sources.folders import FolderSource
from tests.rigs.images import half_missing, image_bytes, noisy_jpeg

MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        pytest.param(half_missing(noisy_jpeg()), "extraneous bytes", id="zeros of a bad disk"),
        pytest.param(half_missing(noisy_jpeg(progressive=True)), "extraneous bytes", id="zeros, progressive"),
        pytest.param(half_missing(noisy_jpeg(), b""), "premature end of data segment", id="cut, with an end mark"),
        pytest.param(half_missing(noisy_jpeg(progressive=True), b""), "premature end", id="cut, progressive"),
        pytest.param(half_missing(noisy_jpeg(), b"\x11\x22\x33"), "Corrupt JPEG data", id="other bytes"),
        pytest.param(half_missing(noisy_jpeg(mode="L")), "extraneous bytes", id="zeros, grey"),
        pytest.param(half_missing(noisy_jpeg(mode="CMYK")), "extraneous bytes", id="zeros, CMYK"),
        pytest.param(half_missing(noisy_jpeg(keep_rgb=True)), "extraneous bytes", id="zeros, stored as RGB"),
        pytest.param(bytes(noisy_jpeg()), "", id="sound"),
        pytest.param(bytes(noisy_jpeg(keep_rgb=True)), "", id="sound, stored as RGB"),
        pytest.param(b"", "", id="empty"),
        pytest.param(image_bytes(1, image_format="PNG")[:-40], "", id="another format"),
        pytest.param(bytes(noisy_jpeg(progressive=True)), "", id="sound, progressive"),
        pytest.param(bytes(noisy_jpeg(mode="CMYK")), "", id="sound, CMYK"),
        pytest.param(bytes(noisy_jpeg()) + b"after the end" * 9, "", id="something behind the end mark"),
    ],
)
def test_jpegs_of_which_a_part_is_missing(data: bytes, said: str) -> None:
    damage = jpeg_damage(data)
    assert said in damage
    assert bool(said) == bool(damage)
    assert jpeg_damage(memoryview(data)) == damage


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_progressive_jpeg_that_was_cut_between_two_scans(mode: str) -> None:
    """With an end mark, every decoder takes it for whole; only what the scans hold tells."""
    data = noisy_jpeg(mode=mode, progressive=True)
    assert jpeg_damage(data) == ""
    behind = data.index(b"\xff\xda") + 1
    cuts = [behind + found.start() for found in re.finditer(rb"\xff(\xc4|\xda)", data[behind:])]
    assert len(cuts) > 4
    for place in cuts:
        cut = data[:place] + b"\xff\xd9"
        assert simplejpeg.decode_jpeg(cut).shape[:2] == (300, 400)
        assert jpeg_damage(cut) == "scans of a progressive JPEG are missing"


def test_photographs_lack_nothing(test_data: Path) -> None:
    for path in sorted((test_data / "imagenet-sample").iterdir())[:50]:
        assert jpeg_damage(path.read_bytes()) == ""
        with Image.open(path) as image:
            file = io.BytesIO()
            image.convert("RGB").save(file, "JPEG", progressive=True)
        assert jpeg_damage(file.getvalue()) == ""


def png(mode: str, *, height: int = 37, width: int = 53) -> bytes:
    rng = np.random.default_rng(0)
    if mode == "I;16":
        image = Image.fromarray(rng.integers(0, 1 << 16, (height, width), dtype=np.uint16))
    else:
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).convert(mode)
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def with_raw(raw: bytes, *, height: int, width: int, interlaced: int = 0, num_chunks: int = 1) -> bytes:
    """An 8-bit RGB PNG with these bytes as its pixel data."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, interlaced)
    packed = zlib.compress(raw)
    step = -(-len(packed) // num_chunks)
    parts = [chunk(b"IDAT", packed[begin : begin + step]) for begin in range(0, len(packed), step)]
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(parts) + chunk(b"IEND", b"")


@pytest.mark.parametrize("mode", MODES)
def test_whole_images_lack_nothing(mode: str) -> None:
    assert png_damage(png(mode)) == ""
    assert png_damage(memoryview(png(mode, height=1, width=1))) == ""


@pytest.mark.parametrize("num_chunks", [1, 5])
def test_pixel_data_that_ends_early(num_chunks: int) -> None:
    whole = bytes(32 * (1 + 3 * 48))
    assert png_damage(with_raw(whole, height=32, width=48, num_chunks=num_chunks)) == ""
    half = with_raw(whole[: len(whole) // 2], height=32, width=48, num_chunks=num_chunks)
    assert Image.open(io.BytesIO(half)).convert("RGB").size == (48, 32), "Pillow says nothing"
    assert png_damage(half) == "its pixel data has 2,320 of 4,640 bytes"


def test_pixel_data_that_is_larger_than_a_piece() -> None:
    whole = np.random.default_rng(0).integers(0, 256, 200 * (1 + 3 * 500), dtype=np.uint8).tobytes()
    assert png_damage(with_raw(whole, height=200, width=500)) == ""
    assert png_damage(with_raw(whole[:-1], height=200, width=500)) == "its pixel data has 300,199 of 300,200 bytes"


def test_interlaced_images() -> None:
    """Of 5 x 3 pixels, the second pass has a single one, and the third has no row."""
    sizes = [(1, 1), (1, 1), (0, 0), (1, 1), (3, 1), (2, 2), (5, 1)]  # columns and rows of each pass
    num_bytes = sum(rows * (1 + 3 * columns) for columns, rows in sizes)
    assert png_damage(with_raw(bytes(num_bytes), height=3, width=5, interlaced=1)) == ""
    assert png_damage(with_raw(bytes(num_bytes - 1), height=3, width=5, interlaced=1)) != ""


@pytest.mark.parametrize(
    ("data", "lacks"),
    [
        (b"", False),
        (b"\x89PNG\r\n\x1a\n", False),
        (b"\xff\xd8\xff", False),
        (png("RGB").replace(b"IDAT", b"IDAT\0"), False),  # a broken stream, which the decoder refuses
        (png("RGB")[:-200], True),
    ],
)
def test_other_files_and_cut_ones(data: bytes, lacks: bool) -> None:
    assert bool(png_damage(data)) is lacks


def test_more_than_the_header_says_is_not_inflated() -> None:
    bomb = with_raw(bytes(200 << 20), height=4, width=4)
    assert png_damage(bomb) == ""


def test_packing_leaves_it_out(tmp_path: Path) -> None:
    half = with_raw(bytes(2320), height=32, width=48)
    for number in range(3):
        (tmp_path / "images" / f"c{number}").mkdir(parents=True)
        (tmp_path / "images" / f"c{number}" / "a.png").write_bytes(png("RGB", width=48 + number))
    (tmp_path / "images" / "c0" / "half.png").write_bytes(half)
    job = PackJob(
        out=str(tmp_path / "out"),
        source=FolderSource(root=str(tmp_path / "images")),
        images=ImageChecks(truncated="quarantine"),
        max_quarantined=0.5,
    )
    assert run(job) == 0
    reason = "truncated: a part of the PNG is missing (its pixel data has 2,320 of 4,640 bytes)"
    assert reason in (tmp_path / "out" / "quarantine.csv").read_text()
