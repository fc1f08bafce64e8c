"""Why images are refused, each message once: the reasons of the quarantine list."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from shards.images.config import DEFAULT_LIMITS, WIDEST_LIMITS, ImageLimits, Resize
from shards.images.decoding_cost import refuse_costly
from shards.images.image_header import read_header, read_image_file
from shards.images.near_duplicates import evaluation_hashes, perceptual_hash
from shards.images.resize import fitted
from tests.rigs.costly_images import png_of_chunks, progressive_jpeg, sequential_jpeg, tiff_of_strips
from tests.rigs.images import image_bytes, png_promising
from tests.rigs.messages import Row, row, table
from tests.shards.images.test_decoding_cost import EXIF, MANY, PHOTO
from tests.shards.images.test_image_header import gif, grey_tiff
from tests.shards.images.test_resize import SMALL


def segments_hidden_by(_: Path, hidden_by: bytes) -> None:
    refuse_costly(PHOTO[:2] + hidden_by + EXIF * 65 + PHOTO[2:], DEFAULT_LIMITS)


def strips_of_another_type(_: Path) -> None:
    tiff = bytearray(tiff_of_strips(MANY))
    tag = tiff.index(struct.pack("<HH", 273, 4))
    struct.pack_into("<H", tiff, tag + 2, 1)
    refuse_costly(bytes(tiff), DEFAULT_LIMITS)


def interlaced_png(_: Path) -> None:
    data = png_of_chunks(b"tEXt", b"a\0b", num_chunks=1, interlaced=True)
    refuse_costly(data, ImageLimits(max_scans=6))


def components_of_one_name(_: Path) -> None:
    data = bytearray(progressive_jpeg(1000, 1000, num_scans=2, num_components=3))
    frame = data.index(b"\xff\xc2") + 10
    data[frame], data[frame + 1], data[frame + 3] = 3, 0x22, 3  # now three components of the id 3
    refuse_costly(bytes(data), ImageLimits(max_scan_pixels=1_000_000))


def header_of(_: Path, data: bytes) -> None:
    read_header(data)


def image_file(folder: Path, data: bytes) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("shards.images.image_header._LIMITS", ImageLimits(max_bytes=20_000))
        (folder / "a").write_bytes(data)
        read_image_file(folder / "a")


def device(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        (folder / "a.jpg").symlink_to("/dev/zero")
        monkeypatch.setattr(Path, "is_file", lambda _: True)
        read_image_file(folder / "a.jpg")


def hashed(_: Path, data: bytes, hashes_of: Callable[[bytes], object]) -> None:
    hashes_of(data)


def half_an_image(_: Path, image_format: str) -> None:
    data = image_bytes(3, height=64, width=80, image_format=image_format)
    header = read_header(data)
    fitted(data[: len(data) // 2], header, SMALL)


def resize(_: Path, short_side: int, quality: int) -> None:
    Resize(short_side=short_side, quality=quality)


@table(
    # decoding_cost
    *(
        row(
            f"segments hidden by, {hidden_by!r:.24}",
            segments_hidden_by,
            hidden_by,
        ).says(
            "ImageRefusedError: costly to decode: a JPEG of more than 65536 segments (a part of its EXIF counts as "
            "1024); allowed: 65536 (--limits.max-chunks of pack and index)"
        )
        for hidden_by in (b"\xff\xd8", b"\xff\xd9", PHOTO[PHOTO.index(b"\xff\xc0") :][:19] * 2)
    ),
    row("strips with offsets of another type", strips_of_another_type).says(
        "ImageRefusedError: costly to decode: a TIFF of more than 65536 values in tag 273, such as strips; "
        "allowed: 65536 (--limits.max-chunks of pack and index)"
    ),
    row(
        "no flag is named that cannot lift it",
        lambda _: refuse_costly(sequential_jpeg(8, 8, [[1]] * 10_001), WIDEST_LIMITS),
    ).says("ImageRefusedError: costly to decode: a JPEG of 10,001 scans; allowed: 10000"),
    row("an interlaced PNG, which has passes", interlaced_png).says(
        "ImageRefusedError: costly to decode: an interlaced PNG, which has 7 passes; allowed: 6 "
        "(--limits.max-scans of pack and index)"
    ),
    row("components of one name, which count as the largest", components_of_one_name).says(
        "ImageRefusedError: costly to decode: a JPEG of 2 scans with 1016064 pixels in all; allowed: 1000000 "
        "(--limits.max-scan-pixels of pack and index)"
    ),
    # image_header
    row(
        "a TIFF that Pillow decodes to wrong pixels: grey_tiff(12)",
        header_of,
        grey_tiff(12),
    ).says(
        "ImageRefusedError: a TIFF with grey pixels of 12 bits, which is not read correctly here; convert it to "
        "PNG first"
    ),
    row(
        "a TIFF that Pillow decodes to wrong pixels: grey_tiff(16, photometric=0)",
        header_of,
        grey_tiff(16, photometric=0),
    ).says(
        "ImageRefusedError: a TIFF with grey pixels of 16 bits in which 0 is white, which is not read correctly "
        "here; convert it to PNG first"
    ),
    row(
        "a TIFF that Pillow decodes to wrong pixels: grey_tiff(8, sample_format=2)",
        header_of,
        grey_tiff(8, sample_format=2),
    ).says(
        "ImageRefusedError: a TIFF with pixels of 8 bits with a sign, which is not read correctly here; convert "
        "it to PNG first"
    ),
    row("empty", image_file, b"").says("ImageRefusedError: empty file"),
    row("text", image_file, b"hello").says("ImageRefusedError: not a JPEG, PNG, WebP, GIF, TIFF or BMP image"),
    row("cut off", image_file, image_bytes(1)[:200]).says("ImageRefusedError: truncated: ends within the JPEG header"),
    row("gif", image_file, gif()).says(
        "ImageRefusedError: it is in the format gif; allowed: JPEG, PNG and WebP: convert it"
    ),
    row("a bomb", image_file, png_promising(20_000, 20_000)).says(
        "ImageRefusedError: too large: 20000x20000 pixels, allowed: 134217728 in all"
    ),
    row("bytes", image_file, image_bytes(1, height=400, width=400, image_format="PNG")).says(
        "ImageRefusedError: too large: 20001 bytes, allowed: 20000"
    ),
    row(
        "a device in the place of a file",
        device,
    ).says("ImageRefusedError: DIR/a.jpg is not a regular file; give a file, not a pipe or a device"),
    # near_duplicates
    row("image_file cannot be decoded: perceptual_hash, no bytes", hashed, b"", perceptual_hash).says(
        "ImageRefusedError: empty file"
    ),
    row(
        "image_file cannot be decoded: perceptual_hash, a text",
        hashed,
        b"not an image at all",
        perceptual_hash,
    ).says("ImageRefusedError: not a JPEG, PNG, WebP, GIF, TIFF or BMP image"),
    row(
        "image_file cannot be decoded: perceptual_hash, a JPEG that is cut off",
        hashed,
        image_bytes(0, height=96, width=128)[:-300],
        perceptual_hash,
    ).says("ImageRefusedError: truncated: a JPEG without its end, 4250 bytes"),
    row(
        "image_file cannot be decoded: perceptual_hash, a PNG that is cut off",
        hashed,
        image_bytes(0, height=96, width=128, image_format="PNG")[:-300],
        perceptual_hash,
    ).says("ImageRefusedError: truncated: a PNG without its end, 27131 bytes"),
    row(
        "image_file cannot be decoded: perceptual_hash, a PNG with a broken chunk",
        hashed,
        image_bytes(0, height=96, width=128, image_format="PNG").replace(b"IDAT\x78", b"IDAT\x79"),
        perceptual_hash,
    ).says("ImageRefusedError: damaged image: OSError: broken data stream when reading image file"),
    row("image_file cannot be decoded: evaluation_hashes, no bytes", hashed, b"", evaluation_hashes).says(
        "ImageRefusedError: empty file"
    ),
    row(
        "image_file cannot be decoded: evaluation_hashes, a text",
        hashed,
        b"not an image at all",
        evaluation_hashes,
    ).says("ImageRefusedError: not a JPEG, PNG, WebP, GIF, TIFF or BMP image"),
    row(
        "image_file cannot be decoded: evaluation_hashes, a JPEG that is cut off",
        hashed,
        image_bytes(0, height=96, width=128)[:-300],
        evaluation_hashes,
    ).says("ImageRefusedError: truncated: a JPEG without its end, 4250 bytes"),
    row(
        "image_file cannot be decoded: evaluation_hashes, a PNG that is cut off",
        hashed,
        image_bytes(0, height=96, width=128, image_format="PNG")[:-300],
        evaluation_hashes,
    ).says("ImageRefusedError: truncated: a PNG without its end, 27131 bytes"),
    row(
        "image_file cannot be decoded: evaluation_hashes, a PNG with a broken chunk",
        hashed,
        image_bytes(0, height=96, width=128, image_format="PNG").replace(b"IDAT\x78", b"IDAT\x79"),
        evaluation_hashes,
    ).says("ImageRefusedError: damaged image: OSError: broken data stream when reading image file"),
    # resize
    row("image_file does not decode, JPEG", half_an_image, "JPEG").says(
        "ImageRefusedError: damaged image: OSError: image file is truncated (6 bytes not processed)"
    ),
    row("image_file does not decode, PNG", half_an_image, "PNG").says(
        "ImageRefusedError: damaged image: OSError: image file is truncated"
    ),
    row("image_file does not decode, WEBP", half_an_image, "WEBP").says(
        "ImageRefusedError: damaged image: OSError: could not create decoder object"
    ),
    row("image_file does not decode, GIF", half_an_image, "GIF").says(
        "ImageRefusedError: damaged image: OSError: image file is truncated (223 bytes not processed)"
    ),
    row("image_file does not decode, TIFF", half_an_image, "TIFF").says(
        "ImageRefusedError: damaged image: OSError: image file is truncated (170 bytes not processed)"
    ),
    row("image_file does not decode, BMP", half_an_image, "BMP").says(
        "ImageRefusedError: damaged image: OSError: image file is truncated (213 bytes not processed)"
    ),
    row("resize: -1 90", resize, -1, 90).says("resize.short_side is -1; allowed: 0 (as they are) to 65,500"),
    row("resize: 65501 90", resize, 65_501, 90).says("resize.short_side is 65501; allowed: 0 (as they are) to 65,500"),
    row("resize: 256 0", resize, 256, 0).says("resize.quality is 0; allowed: 1 to 100"),
    row("resize: 256 101", resize, 256, 101).says("resize.quality is 101; allowed: 1 to 100"),
)
def test_messages(refusal: Row, tmp_path: Path) -> None:
    refusal.check(tmp_path)
