"""Near-duplicates of evaluation images: recall, false matches and cost.

Needs a folder with `imagenet-sample/*.JPEG` (500 photographs) and `cifar10/{train,test}.parquet`, and takes 7
CPU-minutes:

    python -m benchmarks.near_duplicates --data DIR --out benchmarks/results/near_duplicates.json
    python -m docs.pictures near_duplicates
"""

import argparse
import io
import json
import resource
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image, ImageOps

from benchmarks.measure import machine
from shards.images.config import DEFAULT_MAX_DISTANCE, HASH_BITS, PERCEPTUAL_HASH
from shards.images.near_duplicates import COARSE_DISTANCE, EvaluationIndex, evaluation_hashes, perceptual_hash

Hashes = NDArray[np.uint8]

HASHES_AN_IMAGE = 4
THRESHOLDS = (0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96)
IMAGES, EVALUATION_IMAGES = 14_200_000, 200_000
CROPS_PER_QUERY_IMAGE, CROPS_PER_EVALUATION_IMAGE = 800, 400
BICUBIC = Image.Resampling.BICUBIC


def encoded(image: Image.Image, image_format: str = "JPEG", *, quality: int = 90) -> bytes:
    """The image as the bytes of a file."""
    file = io.BytesIO()
    image.save(file, image_format, quality=quality)
    return file.getvalue()


def resized(image: Image.Image, short_side: int) -> Image.Image:
    """With its proportions kept."""
    scale = short_side / min(image.size)
    return image.resize((round(image.width * scale), round(image.height * scale)), BICUBIC)


def cropped(image: Image.Image, left: float, top: float, right: float, bottom: float) -> Image.Image:
    """Without these fractions of its width and height."""
    width, height = image.size
    box = width * left, height * top, width * (1 - right), height * (1 - bottom)
    return image.crop(box)


def cropped_at_random(image: Image.Image) -> Image.Image:
    """Crops 0 to 5 % off each side, differently for every image."""
    left, top, right, bottom = np.random.default_rng(image.width * image.height).uniform(0, 0.05, 4).tolist()
    return cropped(image, left, top, right, bottom)


CHANGES: dict[str, Callable[[Image.Image], bytes]] = {
    **{f"JPEG quality {quality}": partial(encoded, quality=quality) for quality in (90, 75, 50, 30)},
    "WebP quality 75": lambda image: encoded(image, "WEBP", quality=75),
    "PNG": lambda image: encoded(image, "PNG"),
    "grey": lambda image: encoded(image.convert("L")),
    "half the size": lambda image: encoded(resized(image, min(image.size) // 2)),
    "short side 256": lambda image: encoded(resized(image, 256)),
    "short side 128": lambda image: encoded(resized(image, 128)),
    "short side 64": lambda image: encoded(resized(image, 64)),
    "squashed to 224x224": lambda image: encoded(image.resize((224, 224), BICUBIC)),
    "15 % brighter": lambda image: encoded(image.point([min(255, level * 115 // 100) for level in range(256)] * 3)),
    "mirrored, quality 75": lambda image: encoded(ImageOps.mirror(image), quality=75),
    "crop 2.5 % each side": lambda image: encoded(cropped(image, 0.025, 0.025, 0.025, 0.025)),
    "crop 5 % each side": lambda image: encoded(cropped(image, 0.05, 0.05, 0.05, 0.05)),
    "crop 5 % left": lambda image: encoded(cropped(image, 0.05, 0, 0, 0)),
    "crop 5 % top": lambda image: encoded(cropped(image, 0, 0.05, 0, 0)),
    "crop 5 % left and top": lambda image: encoded(cropped(image, 0.05, 0.05, 0, 0)),
    "crop 0 to 5 % at random": lambda image: encoded(cropped_at_random(image)),
    "crop 5 % each side, short side 128, quality 50": lambda image: encoded(
        resized(cropped(image, 0.05, 0.05, 0.05, 0.05), 128), quality=50
    ),
    "mirrored, crop 5 % each side, short side 256": lambda image: encoded(
        resized(cropped(ImageOps.mirror(image), 0.05, 0.05, 0.05, 0.05), 256)
    ),
    "rotated by 2 degrees": lambda image: encoded(image.rotate(2, BICUBIC)),
    "crop 7 % each side": lambda image: encoded(cropped(image, 0.07, 0.07, 0.07, 0.07)),
    "crop 10 % each side": lambda image: encoded(cropped(image, 0.1, 0.1, 0.1, 0.1)),
    "middle square": lambda image: encoded(ImageOps.fit(image, (256, 256))),
    "rotated by 90 degrees": lambda image: encoded(image.transpose(Image.Transpose.ROTATE_90)),
}


def changed_hashes(path: Path) -> tuple[bytes, bytes, float]:
    """A photograph's 4 hashes as an evaluation image, the hash of each changed copy, the CPU-seconds of one hash."""
    data = path.read_bytes()
    image = Image.open(path).convert("RGB")
    began = time.process_time()
    perceptual_hash(data)
    seconds = time.process_time() - began
    copies = [perceptual_hash(change(image)) for change in CHANGES.values()]
    return four(data), b"".join(copy or bytes(HASH_BITS // 8) for copy in copies), seconds


def four(data: bytes) -> bytes:
    """The hashes of an evaluation image, joined."""
    return b"".join(evaluation_hashes(data) or (bytes(HASH_BITS // 8),) * HASHES_AN_IMAGE)


def one(data: bytes) -> bytes:
    """The hash of an image of the collection."""
    return perceptual_hash(data) or bytes(HASH_BITS // 8)


def crop_hashes(task: tuple[Path, int, Callable[[bytes], bytes]]) -> bytes:
    """Hashes of random crops of a photograph, 15 to 100 % of its area, as if each were a photograph."""
    path, count, hashes_of = task
    rng = np.random.default_rng(int.from_bytes(path.name.encode()))
    image = Image.open(path).convert("L")
    image.thumbnail((256, 256))
    hashes = []
    for side in np.sqrt(rng.uniform(0.15, 1, count)).tolist():
        width, height = image.width * side, image.height * side
        x, y = rng.uniform(0, image.width - width), rng.uniform(0, image.height - height)
        crop = image.resize((128, 128), BICUBIC, box=(x, y, x + width, y + height))
        hashes.append(hashes_of(encoded(crop, "BMP")))
    return b"".join(hashes)


def as_rows(hashes: list[bytes]) -> Hashes:
    """uint8[n, 32]."""
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, HASH_BITS // 8)


def recall(pool: Pool, paths: list[Path]) -> dict[str, object]:
    """The share of changed copies of each kind that match their original, by threshold."""
    done = pool.map(changed_hashes, paths, chunksize=8)
    copies = as_rows([item[1] for item in done]).reshape(len(paths), len(CHANGES), -1)
    index = EvaluationIndex(as_rows([item[0] for item in done]))
    table, num_wrong = {}, 0
    for number, name in enumerate(CHANGES):
        rows, distances = index.closest(copies[:, number], max_distance=max(THRESHOLDS))
        is_right = rows // HASHES_AN_IMAGE == np.arange(len(paths))
        table[name] = {limit: float(np.mean(is_right & (distances <= limit))) for limit in THRESHOLDS}
        num_wrong += int(np.count_nonzero(~is_right & (rows >= 0) & (distances <= DEFAULT_MAX_DISTANCE)))
    milliseconds = 1000 * float(np.median([item[2] for item in done]))  # the first of a process imports scipy
    return {
        "photographs": len(paths),
        "recall": table,
        "wrong_at_default": num_wrong,
        "hash_cpu_milliseconds": milliseconds,
    }


def false_matches_of_crops(pool: Pool, paths: list[Path]) -> tuple[dict[str, object], Hashes, Hashes]:
    """Random crops of half of the photographs that match one of the other half: all of these matches are false."""
    asked = pool.map(crop_hashes, [(path, CROPS_PER_QUERY_IMAGE, one) for path in paths[1::2]], chunksize=4)
    known = pool.map(crop_hashes, [(path, CROPS_PER_EVALUATION_IMAGE, four) for path in paths[::2]], chunksize=4)
    queries, hashes = as_rows(asked), as_rows(known)
    rows, distances = EvaluationIndex(hashes).closest(queries, max_distance=max(THRESHOLDS))
    pairs = len(queries) * (len(hashes) // HASHES_AN_IMAGE)
    matched = {limit: int(np.count_nonzero((rows >= 0) & (distances <= limit))) for limit in THRESHOLDS}
    return {"pairs": pairs, "matched": matched, "expected": extrapolated(matched, pairs)}, queries, hashes


def cifar_matches(pool: Pool, folder: Path) -> dict[str, object]:
    """Training images that match a test image. Matches with another label are false. A ninth as many are added for
    false matches within a class."""
    images, labels = {}, {}
    for split in ("train", "test"):
        table = pq.read_table(folder / f"{split}.parquet")
        images[split] = [item["bytes"] for item in table.column("image").to_pylist()]
        labels[split] = table.column("label").to_numpy()
    index = EvaluationIndex(as_rows(pool.map(four, images["test"], chunksize=250)))
    queries = as_rows(pool.map(one, images["train"], chunksize=250))
    rows, distances = index.closest(queries, max_distance=max(THRESHOLDS))
    is_other = labels["test"][rows // HASHES_AN_IMAGE] != labels["train"]
    pairs = len(queries) * len(images["test"])
    is_match = {limit: (rows >= 0) & (distances <= limit) for limit in THRESHOLDS}
    other = {limit: int(np.count_nonzero(mask & is_other)) for limit, mask in is_match.items()}
    return {
        "pairs": pairs,
        "matched": {limit: int(np.count_nonzero(mask)) for limit, mask in is_match.items()},
        "matched_with_another_label": other,
        "expected": extrapolated({limit: count * 10 / 9 for limit, count in other.items()}, pairs),
    }


def extrapolated(matched: dict[int, int] | dict[int, float], pairs: int) -> dict[int, float]:
    """False matches of 14.2 million images against 200,000 evaluation images, at the same rate per pair."""
    return {limit: count / pairs * IMAGES * EVALUATION_IMAGES for limit, count in matched.items()}


def like(hashes: Hashes, count: int, seed: int) -> Hashes:
    """`count` hashes like those of photographs: theirs, with a fifth of the bits flipped at random."""
    rng = np.random.default_rng(seed)
    chosen = hashes[rng.integers(0, len(hashes), count)]
    for start in range(0, count, 1 << 16):
        some = chosen[start : start + (1 << 16)]
        np.bitwise_xor(some, np.packbits(rng.random((len(some), HASH_BITS), np.float32) < 0.2, axis=1), out=some)
    return chosen


def search_cost(task: tuple[Hashes, Hashes, int]) -> dict[str, float]:
    """One process that looks up all queries in one call."""
    hashes, queries, max_distance = task
    began = time.process_time()
    index = EvaluationIndex(hashes)
    built = time.process_time()
    index.closest(queries, max_distance=max_distance)
    return {
        "evaluation_hashes": len(hashes),
        "queries": len(queries),
        "max_distance": max_distance,
        "build_cpu_seconds": built - began,
        "cpu_microseconds_a_query": 1e6 * (time.process_time() - built) / len(queries),
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def search_costs(queries: Hashes, hashes: Hashes) -> list[dict[str, float]]:
    """For several numbers of queries and evaluation hashes and several thresholds, the slower of two processes."""
    found = []
    kinds = [(EVALUATION_IMAGES, number, DEFAULT_MAX_DISTANCE) for number in (32_768, 262_144, 1_048_576)]
    kinds += [(EVALUATION_IMAGES // 2, 1_048_576, DEFAULT_MAX_DISTANCE)]
    kinds += [(EVALUATION_IMAGES, 1_048_576, limit) for limit in (3, 7)]
    for num_images, num_queries, limit in kinds:
        known = like(hashes, num_images * HASHES_AN_IMAGE, 0)
        tasks = [(known, like(queries, num_queries, seed), limit) for seed in (1, 2)]
        with get_context("spawn").Pool(2) as pool:
            costs = pool.map(search_cost, tasks, chunksize=1)
        found.append(max(costs, key=lambda cost: cost["cpu_microseconds_a_query"]))
    return found


def main() -> None:
    """Measures, prints and keeps the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    paths = sorted((arguments.data / "imagenet-sample").glob("*.JPEG"))
    with get_context("spawn").Pool(2) as pool:
        copies = recall(pool, paths)
        crops, queries, hashes = false_matches_of_crops(pool, paths)
        cifar10 = cifar_matches(pool, arguments.data / "cifar10")
    results: dict[str, Any] = {
        "command": "python -m benchmarks.near_duplicates --data DIR --out benchmarks/results/near_duplicates.json",
        "machine": machine(),
        "hash": PERCEPTUAL_HASH,
        "coarse_distance": COARSE_DISTANCE,
        "copies": copies,
        "random_crops": crops,
        "cifar10": cifar10,
        "search": search_costs(queries, hashes),
    }
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
