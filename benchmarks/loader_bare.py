"""The limit: decoding, cropping and resizing images that are already in memory, and nothing else."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.loader_ours import augment_config, view_of
from benchmarks.loader_prepare import FOLDERS
from benchmarks.loader_settings import Settings

View = Callable[[bytes, Any, Any], None]  # bytes, the crop's draws, uint8[size, size, 3] to fill


def bare(
    settings: Settings, kind: Literal["decode", "crop", "ours"], *, threads: int = 1
) -> Callable[[], Iterator[tuple[Any, Any]]]:
    """`decode`: decodes the whole image with simplejpeg. `crop`: then resizes a crop of it with OpenCV. `ours`: our
    view."""
    from pipeline.data.augment import draws_of  # noqa: PLC0415

    folders = sorted(Path(settings.work, FOLDERS).iterdir())
    items = [(path.read_bytes(), label) for label, folder in enumerate(folders) for path in sorted(folder.iterdir())]
    random.Random(0).shuffle(items)
    numbers = np.arange(len(items))
    draws = draws_of(numbers, np.zeros_like(numbers), seed=0)
    view = {"decode": _decode, "crop": _crop, "ours": view_of(antialias=False)}[kind]

    def batches() -> Iterator[tuple[Any, Any]]:
        size = settings.image_size
        with ThreadPoolExecutor(threads) as pool:
            images = np.zeros((settings.batch, size, size, 3), dtype=np.uint8)  # reused, as ours are
            for first in range(0, len(items), settings.batch):

                def fill(share: range, first: int = first) -> None:
                    for entry in share:
                        view(items[first + entry][0], draws[first + entry], images[entry])

                shares = [range(thread, settings.batch, threads) for thread in range(threads)]
                for _ in pool.map(fill, shares) if threads > 1 else map(fill, shares):
                    pass
                yield images, np.array([label for _, label in items[first : first + settings.batch]])

    return batches


def _decode(data: bytes, _draws: Any, _out: Any) -> None:
    import simplejpeg  # noqa: PLC0415

    simplejpeg.decode_jpeg(data, colorspace="RGB")


def _crop(data: bytes, draws: Any, out: Any) -> None:
    import cv2  # noqa: PLC0415
    import simplejpeg  # noqa: PLC0415

    from pipeline.data.augment import draw_crop  # noqa: PLC0415

    cv2.setNumThreads(1)
    pixels = simplejpeg.decode_jpeg(data, colorspace="RGB")
    crop = draw_crop(pixels.shape[0], pixels.shape[1], draws, config=augment_config(antialias=False))
    cut = pixels[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
    if crop.flip:  # copying a reversed view is twenty times slower
        cv2.flip(cv2.resize(cut, out.shape[:2], interpolation=cv2.INTER_LINEAR), 1, dst=out)
    else:
        cv2.resize(cut, out.shape[:2], dst=out, interpolation=cv2.INTER_LINEAR)
