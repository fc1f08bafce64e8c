"""Single image files: what is read of them, and the reason if one is refused."""

import io
import os
from pathlib import Path

import pytest
from PIL import Image

from shards.errors import ImageRefusedError
from shards.images.config import ImageLimits
from shards.images.image_header import ImageFile, read_image_file
from tests.rigs.costly_images import progressive_jpeg, sequential_jpeg
from tests.rigs.images import image_bytes, png_promising


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


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "empty file", id="empty"),
        pytest.param(b"hello", "not a JPEG, PNG, WebP", id="text"),
        pytest.param(image_bytes(1)[:200], "truncated|cut off|ends", id="cut off"),
        pytest.param(gif(), "in the format gif; allowed: JPEG, PNG and WebP", id="gif"),
        pytest.param(png_promising(20_000, 20_000), "too large: 20000x20000 pixels", id="a bomb"),
        pytest.param(image_bytes(1, height=400, width=400, image_format="PNG"), "too large: .* bytes", id="bytes"),
    ],
)
def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, message: str) -> None:
    monkeypatch.setattr("shards.images.image_header._LIMITS", ImageLimits(max_bytes=20_000))
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(ImageRefusedError, match=message):
        read_image_file(tmp_path / "a")


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


def test_a_device_in_the_place_of_a_file_that_was_there_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks first and opens later can be given something else in between."""
    (tmp_path / "a.jpg").symlink_to("/dev/zero")
    monkeypatch.setattr(Path, "is_file", lambda _: True)
    with pytest.raises(ImageRefusedError, match="not a regular file"):
        read_image_file(tmp_path / "a.jpg")
