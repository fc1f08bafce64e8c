"""The marker parser agrees with Pillow on everything that Pillow writes, and accepts and refuses what libjpeg does."""

import io
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shards.errors import ImageRefusedError
from shards.images.image_header import jpeg_facts
from tests.rigs.images import image_bytes

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
EXIF = Image.Exif()
EXIF[0x0112] = 6
PLAIN = image_bytes(1, height=40, width=56)


def jpeg(mode: str = "RGB", **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS).convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


def pillow_facts(data: bytes) -> tuple[int, int, str, int]:
    with Image.open(io.BytesIO(data)) as image:
        return image.height, image.width, image.mode, image.getexif().get(0x0112) or 1  # some real files have 0


def with_segment(marker: int, contents: bytes, data: bytes = PLAIN) -> bytes:
    segment = bytes((0xFF, marker)) + (len(contents) + 2).to_bytes(2, "big") + contents
    return data[:2] + segment + data[2:]


def replaced(old: bytes, new: bytes) -> bytes:
    assert PLAIN.count(old) == 1
    return PLAIN.replace(old, new)


def num_bytes(value: object) -> str | None:
    """The number of bytes as the name of a test case, since bytes are unreadable."""
    return f"{len(value)} bytes" if isinstance(value, bytes) else None


FRAME = PLAIN[PLAIN.index(b"\xff\xc0") :][: 2 + 17]
SPLIT = EXIF.tobytes() + bytes(10)


@pytest.mark.parametrize(
    "data",
    [
        *[jpeg(mode, progressive=p, exif=EXIF) for mode, p in product(("L", "RGB", "CMYK"), (False, True))],
        jpeg(keep_rgb=True),
        jpeg(restart_marker_blocks=1),
        jpeg(icc_profile=bytes(200_000), exif=EXIF, comment=b"\xff\xd9\xff\xc0"),
        with_segment(0xE1, b"Exif\0\0" + SPLIT[30:], with_segment(0xE1, SPLIT[:30])),
        with_segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + bytes(65_000), jpeg(exif=EXIF)),
        with_segment(0xE1, b"Exif\0\0" + EXIF.tobytes()),
        with_segment(0xE1, b"Exif\0\0damaged"),
        with_segment(0xED, b"Photoshop 3.0\0" + bytes(999)),
        PLAIN[:2] + b"\xff\xff\xff" + PLAIN[2:],
        PLAIN[:2] + b"\xff\xd0junk\xff\0junk" + PLAIN[2:],
        PLAIN + bytes(100_000),
    ],
    ids=num_bytes,
)
def test_agrees_with_pillow(data: bytes) -> None:
    expected = pillow_facts(data) if b"damaged" not in data else (40, 56, "RGB", 1)
    assert jpeg_facts(data) == expected


def test_first_image_of_several() -> None:
    file = io.BytesIO()
    others = [Image.fromarray(PIXELS[:8, :8])]
    Image.fromarray(PIXELS).save(file, "MPO", save_all=True, append_images=others)
    assert jpeg_facts(file.getvalue()) == (40, 56, "RGB", 1)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (PLAIN[:-2], "truncated: a JPEG without its end"),
        (PLAIN[:-200] + bytes(200), "truncated: a JPEG without its end"),
        (with_segment(0xE1, b"Exif\0\0thumbnail\xff\xd9")[:-200], "truncated: a JPEG without its end"),
        (PLAIN[:30], "truncated: ends within the JPEG header"),
        (PLAIN[:3], "truncated: ends within the JPEG header"),
        (PLAIN[:4], "truncated: ends within the JPEG header"),
        (b"\xff" * 5_000_000, "truncated: ends within the JPEG header"),
        (replaced(FRAME, b""), "no frame before the first scan"),
        (replaced(FRAME, 2 * FRAME), "two frames"),
        (replaced(FRAME, b"\xff\xc0\0\x02" + FRAME[4:]), "frame of a wrong length"),
        (replaced(FRAME, b"\xff\xc0\0\x01" + FRAME[4:]), "a segment of no length"),
        (replaced(FRAME[:5], FRAME[:4] + b"\x0c"), "3 components of 12 bits"),
        (replaced(FRAME[:9], FRAME[:5] + b"\0\0" + FRAME[7:9]), "DNL"),
        (replaced(b"\xff\xc0", b"\xff\xc9"), "arithmetic-coded JPEG"),
        (replaced(b"\xff\xc0", b"\xff\xc3"), "lossless JPEG"),
        (replaced(b"\xff\xc0", b"\xff\xc5"), "hierarchical JPEG"),
        (replaced(b"\xff\xc0", b"\xff\xf3"), "unknown marker 0xf3"),
        (b"\xff\xd8" + PLAIN, "two starts"),
        (b"\xff\xd8\xff\xd9", "it ends before its first scan"),
    ],
    ids=num_bytes,
)
def test_refused_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ImageRefusedError, match=reason):
        jpeg_facts(data)


def test_every_real_photograph_is_taken_as_pillow_takes_it(test_data: Path) -> None:
    paths = sorted((test_data / "imagenet-sample").glob("*.JPEG"))
    assert len(paths) == 500
    for path in paths:
        data = path.read_bytes()
        assert jpeg_facts(data) == pillow_facts(data), path.name
