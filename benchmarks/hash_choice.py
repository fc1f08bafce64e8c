"""Compares imagehash's perceptual hashes: distances of copies from a photograph, and between different images.

Command (2 minutes on 2 cores; DIR as for benchmarks/near_duplicates.py):

    python -m benchmarks.hash_choice --data DIR --out benchmarks/results/hash_choice.json
"""

import argparse
import io
import json
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import imagehash
import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image, ImageOps

from benchmarks.measure import machine
from benchmarks.near_duplicates import CHANGES
from benchmarks.rounds import write

Bits = NDArray[np.bool_]

SHOWN = ("JPEG quality 30", "short side 128", "crop 2.5 % each side", "crop 5 % each side")
NUM_IMAGES, NUM_ASKED = 20_000, 6_000
STRANGERS_IN = 1e-6


def both_ways(image: Image.Image) -> Bits:
    """Differences along rows and along columns."""
    hashes = imagehash.dhash(image, 11), imagehash.dhash_vertical(image, 11)
    return np.concatenate([item.hash.reshape(-1) for item in hashes])


HASHES: dict[str, Callable[[Image.Image], Bits]] = {
    "phash, size 16": lambda image: imagehash.phash(image, 16).hash.reshape(-1),
    "phash, size 12": lambda image: imagehash.phash(image, 12).hash.reshape(-1),
    "phash, size 8": lambda image: imagehash.phash(image, 8).hash.reshape(-1),
    "dhash, size 16": lambda image: imagehash.dhash(image, 16).hash.reshape(-1),
    "dhash, both ways, size 11": both_ways,
    "whash, size 16": lambda image: imagehash.whash(image, 16, image_scale=64).hash.reshape(-1),
    "average_hash, size 16": lambda image: imagehash.average_hash(image, 16).hash.reshape(-1),
}


def grey(data: bytes) -> Image.Image:
    """The image in grey, decoded as in shards/images/near_duplicates.py."""
    image = Image.open(io.BytesIO(data))
    image.draft("L", (128, 128))
    return image.convert("L")


def copy_distances(path: Path) -> list[list[int]]:
    """For each hash, the distance of each changed copy from the photograph."""
    original, image = grey(path.read_bytes()), Image.open(path).convert("RGB")
    copies = [grey(CHANGES[name](image)) for name in SHOWN]
    return [[int(np.count_nonzero(bits(copy) != bits(original))) for copy in copies] for bits in HASHES.values()]


def two_hashes(data: bytes) -> list[tuple[bytes, bytes]]:
    """For each hash, the hashes of the image and of its mirror image, padded to 64-bit words."""
    image = grey(data)
    found = []
    for bits in HASHES.values():
        straight, mirrored = (np.packbits(bits(item)).tobytes() for item in (image, ImageOps.mirror(image)))
        size = -(-len(straight) // 8) * 8
        found.append((straight.ljust(size, b"\0"), mirrored.ljust(size, b"\0")))
    return found


def one_in_a_million_threshold(hashes: list[tuple[bytes, bytes]]) -> int:
    """The largest threshold at which at most one in a million pairs of different images matches; -1 if there is
    none."""
    words = np.frombuffer(b"".join(hash_ for pair in hashes for hash_ in pair), np.uint64)
    words = words.reshape(len(hashes), 2, -1)
    known, counts = words[NUM_ASKED:].reshape(-1, words.shape[2]), np.zeros(257, np.int64)
    for query in words[:NUM_ASKED, 0]:
        counts += np.bincount(np.bitwise_count(known ^ query).sum(axis=1, dtype=np.int64), minlength=257)
    return int(np.searchsorted(np.cumsum(counts) / counts.sum(), STRANGERS_IN, side="right")) - 1


def main() -> None:
    """Measures, prints and keeps the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    photographs = sorted((arguments.data / "imagenet-sample").glob("*.JPEG"))
    column = pq.read_table(arguments.data / "cifar10" / "train.parquet").column("image")
    with get_context("spawn").Pool(2) as pool:
        distances = np.array(pool.map(copy_distances, photographs, chunksize=8))  # photograph, hash, change
        small = pool.map(two_hashes, [item["bytes"] for item in column[:NUM_IMAGES].to_pylist()], chunksize=250)
    results = {
        name: {
            "median_and_98_percent_distance": {
                change: [float(np.percentile(distances[:, number, place], percent)) for percent in (50, 98)]
                for place, change in enumerate(SHOWN)
            },
            "threshold_with_one_pair_in_a_million": one_in_a_million_threshold([item[number] for item in small]),
        }
        for number, name in enumerate(HASHES)
    }
    command = "python -m benchmarks.hash_choice --data DIR --out benchmarks/results/hash_choice.json"
    write(arguments.out, {"command": command, "machine": machine(), "hashes": results})
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
