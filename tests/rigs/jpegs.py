"""JPEGs of every kind, made by the tests: samplings, progressive, restart markers, odd sizes."""

import io

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

SAMPLINGS = ("444", "422", "420", "440", "411", "Gray")
KINDS = (*SAMPLINGS, "progressive", "progressive grey", "optimised", "restart blocks", "restart rows", "RGB")
_OPTIONS: dict[str, dict[str, object]] = {
    "progressive": {"progressive": True, "subsampling": 2},
    "progressive grey": {"progressive": True},
    "optimised": {"optimize": True, "subsampling": 1},
    "restart blocks": {"restart_marker_blocks": 3, "subsampling": 2},
    "restart rows": {"restart_marker_rows": 1, "subsampling": 0},
    "RGB": {"keep_rgb": True},
}


def jpeg_of(kind: str, *, height: int, width: int, seed: int = 0) -> bytes:
    """Coarse noise of height x width pixels; `kind` is one of KINDS."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, size=(height // 5 + 1, width // 5 + 1, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    if kind in SAMPLINGS:
        grey = kind == "Gray"
        pixels: NDArray[np.uint8] = np.array(image)[:, :, : 1 if grey else 3].copy()
        space = "GRAY" if grey else "RGB"
        return bytes(simplejpeg.encode_jpeg(pixels, quality=88, colorspace=space, colorsubsampling=kind))
    file = io.BytesIO()
    stored = image.convert("L") if kind == "progressive grey" else image
    stored.save(file, format="JPEG", quality=88, **_OPTIONS[kind])
    return file.getvalue()
