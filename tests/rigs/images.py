"""Images made by the tests: noise with a few shapes, different for every seed and always the same for one seed."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image


def image_bytes(seed: int, *, height: int = 24, width: int = 32, image_format: str = "JPEG") -> bytes:
    """One encoded RGB image."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, size=(height // 4, width // 4, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, format=image_format)
    return file.getvalue()


def class_folders(root: Path, *, num_classes: int = 3, images_a_class: int = 5) -> Path:
    """`root` with class folders c0, c1, ... of images in all three formats; suffixes vary in case."""
    formats = (("JPEG", ".JPEG"), ("PNG", ".png"), ("WEBP", ".webp"), ("JPEG", ".jpg"))
    for label in range(num_classes):
        folder = root / f"c{label}"
        folder.mkdir(parents=True)
        for number in range(images_a_class):
            image_format, suffix = formats[number % len(formats)]
            data = image_bytes(100 * label + number, height=16 + 4 * label, image_format=image_format)
            (folder / f"img {number}{suffix}").write_bytes(data)
    return root


def noisy_jpeg(*, mode: str = "RGB", **options: object) -> bytes:
    """A JPEG of 300 x 400 pixels and some 60 kB, whose second half can be damaged."""
    noise = np.random.default_rng(1).integers(0, 255, (300, 400, len(mode)), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise.squeeze(), mode).save(file, "JPEG", quality=90, **options)
    return file.getvalue()


def half_missing(data: bytes, filling: bytes = b"\0") -> bytes:
    """The first half of a JPEG, then `filling` repeated over the second, then the end mark."""
    middle = len(data) // 2
    return data[:middle] + (filling * len(data))[: len(data) - middle - 2] + data[-2:]


def png_promising(height: int, width: int) -> bytes:
    """A PNG of a few bytes whose header promises `height` x `width` pixels, most of which are missing."""

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = _chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", size) + data + _chunk(b"IEND", b"")


def png_with_profile(name: bytes, *, size: int = 200) -> bytes:
    """A PNG with a colour profile of that name (1 to 79 bytes) with wrong contents, of which libpng warns."""
    data = image_bytes(7, image_format="PNG")
    profile = struct.pack(">I", size) + bytes(4) + b"\x02\0\0\0mntrRGB XYZ " + np.random.default_rng(7).bytes(size - 24)
    after_header = 33
    chunk = _chunk(b"iCCP", name + b"\0\0" + zlib.compress(profile))
    return data[:after_header] + chunk + data[after_header:]


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
