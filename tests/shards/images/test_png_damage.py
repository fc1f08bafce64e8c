"""A PNG whose pixel data ends early is told from a whole one."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jobs.data.pack import PackJob, run
from shards.images.config import ImageChecks
from shards.images.damage import png_damage
from shards.sources.folders import FolderSource

MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


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
