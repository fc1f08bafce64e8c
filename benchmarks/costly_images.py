"""What an image may cost at most that packing takes by default: CPU time and peak memory of one decode to RGB.

Each row is a small file at one of the limits of shards/images/config.py, decoded in a process of its own as training
does where the library leaves an image to Python. Baseline JPEGs are there to compare with. All but the row of noise are
of one colour: real data add their own time. The last rows are taken only with the flags. Command (two minutes):

    python -m benchmarks.costly_images --out benchmarks/results/costly_images.json
"""

import argparse
import io
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.measure import machine
from benchmarks.rounds import write
from pipeline.data.decode import decode_stored
from shards.images.config import DEFAULT_LIMITS, WIDEST_LIMITS
from shards.images.decoding_cost import refuse_costly
from shards.images.image_header import read_header
from tests.rigs.costly_images import png_of_chunks, progressive_jpeg, sequential_jpeg, webp_animation


def encoded(mode: str, side: int, *, is_noise: bool = False) -> bytes:
    """A square PNG of one colour, or of noise."""
    image = Image.new(mode, (side, side), (9, 99, 199, 80)[: len(mode)])
    if is_noise:
        image = Image.frombytes(mode, image.size, np.random.default_rng(0).bytes(side * side * len(mode)))
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


COLOURS = partial(progressive_jpeg, num_components=3)
TAKEN: dict[str, Callable[[], bytes]] = {
    "baseline JPEG, 16 megapixels": partial(sequential_jpeg, 4096, 4096, [[1, 2, 3]]),
    "baseline JPEG, 134 megapixels": partial(sequential_jpeg, 11_585, 11_585, [[1, 2, 3]]),
    "100 scans, 0.25 megapixels, grey": partial(progressive_jpeg, 500, 500, num_scans=100, band=8),
    "100 scans, 16 megapixels, grey": partial(progressive_jpeg, 4096, 4096, num_scans=100, band=8),
    "43 scans, 47 megapixels, 4:4:4": partial(COLOURS, 6850, 6850, num_scans=43, band=63),
    "16 scans, 118 megapixels, 4:4:4": partial(COLOURS, 10_900, 10_900, num_scans=16, band=63),
    "15 scans, 134 megapixels, grey": partial(progressive_jpeg, 11_585, 11_585, num_scans=15, band=63),
    "3 baseline scans, 118 megapixels": partial(sequential_jpeg, 10_900, 10_900, [[1], [2], [3]]),
    "WebP, 67 megapixels": partial(webp_animation, 8192, 8192, num_frames=1),
    "PNG, 134 megapixels": partial(encoded, "RGB", 11_585),
    "transparent PNG, 134 megapixels": partial(encoded, "RGBA", 11_585),
    "transparent PNG of noise, 16 megapixels": partial(encoded, "RGBA", 4096, is_noise=True),
    "PNG of 65,000 texts": partial(png_of_chunks, b"tEXt", b"a\0b", num_chunks=65_000),
}
BY_FLAG: dict[str, Callable[[], bytes]] = {
    "882 scans, 2 megapixels, grey": partial(progressive_jpeg, 1500, 1500, num_scans=882),
    "882 scans, 16 megapixels, grey": partial(progressive_jpeg, 4096, 4096, num_scans=882),
    "1 progressive scan, 179 megapixels, 4:4:4": partial(COLOURS, 13_377, 13_377, num_scans=1),
}


def made(name: str) -> bytes:
    """The file of a row."""
    return (TAKEN | BY_FLAG)[name]()


def measured(name: str) -> dict[str, float]:
    """The CPU seconds and the megabytes that one decode adds to a process, and the bytes of the file."""
    with get_context("spawn").Pool(1) as pool:  # so that making it adds nothing to this process
        data = pool.apply(made, (name,))
    if name in TAKEN:
        refuse_costly(data, DEFAULT_LIMITS)
    header = read_header(data, WIDEST_LIMITS)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    decode_stored(data, height=header.height, width=header.width, limits=WIDEST_LIMITS)
    seconds = time.process_time() - began
    megabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e6
    return {"file_bytes": len(data), "cpu_seconds": round(seconds, 2), "megabytes": round(megabytes)}


def main() -> None:
    """Measures, prints and keeps the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = {}
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for name in (*TAKEN, *BY_FLAG):
            found[name] = pool.submit(measured, name).result()
            sys.stdout.write(f"{name:44} {found[name]}\n")
    command = "python -m benchmarks.costly_images --out benchmarks/results/costly_images.json"
    write(arguments.out, {"command": command, "machine": machine(), "decodes": found})


if __name__ == "__main__":
    main()
