"""How many tokens of a packed micro-batch would be empty if images kept their aspect ratios: a simulation for
docs/reference/native_resolutions.md, after "Patch n' Pack" (Dehghani et al., arXiv 2307.06304).

A micro-batch is a number of sequences of 1,024 tokens: as many as its images need on average, rounded. An image has
patches of 16 px in the aspect ratio of its file, and the area of a square whose side is drawn between 64 and 256 px:
independently, or stratified (one side in each of n equal parts of the range). Images are placed largest first, each in
the fullest sequence that has room for it. All areas are multiplied by the largest of 1.25, 1.24, ... with which all
images find a place.

    python -m benchmarks.native_resolutions --photographs DIR --out benchmarks/results/native_resolutions.json
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.measure import machine
from benchmarks.rounds import say, write

TOKENS, PATCH = 1024, 16  # of a sequence; pixels
SMALLEST, LARGEST = 64, 256  # pixels of a side
SCALES = np.arange(125, 0, -1) / 100
IMAGES = (64, 100, 128, 200, 256, 512)
BATCHES = 200


def tokens_of(sides: NDArray[np.float64], ratios: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns the number of patches of each image, int64[B]. `ratios`: height over width."""
    heights, widths = (np.maximum(1, np.rint(sides * root / PATCH)) for root in (np.sqrt(ratios), np.sqrt(1 / ratios)))
    return (heights * widths).astype(np.int64)


def fits(tokens: NDArray[np.int64], num_sequences: int) -> bool:
    """Whether best fit, largest first, places all images."""
    room = np.full(num_sequences, TOKENS)
    for count in sorted(tokens.tolist(), reverse=True):
        left = np.where(room >= count, room - count, TOKENS + 1)
        best = int(left.argmin())
        if left[best] > TOKENS:
            return False
        room[best] -= count
    return True


def simulated(ratios: NDArray[np.float64], num_images: int, *, stratified: bool) -> dict[str, Any]:
    """Returns the share of empty tokens and the factor of the areas, each as mean and worst of the micro-batches."""
    generator = np.random.default_rng(0)
    of_sides = [tokens_of(np.full(len(ratios), side), ratios).mean() for side in range(SMALLEST, LARGEST)]
    num_sequences = round(num_images * float(np.mean(of_sides)) / TOKENS)
    empty, scales = [], []
    for _ in range(BATCHES):
        places = generator.random(num_images)
        if stratified:
            places = (generator.permutation(num_images) + places) / num_images
        sides, some = SMALLEST + (LARGEST - SMALLEST) * places, generator.choice(ratios, num_images)
        scale = next(one for one in SCALES if fits(tokens_of(sides * np.sqrt(one), some), num_sequences))
        scales.append(float(scale))
        empty.append(1 - float(tokens_of(sides * np.sqrt(scale), some).sum()) / (num_sequences * TOKENS))
    return {
        "sides": "stratified" if stratified else "independent",
        "images": num_images,
        "sequences": num_sequences,
        "empty": {"mean": round(float(np.mean(empty)), 4), "most": round(max(empty), 4)},
        "areas": {"mean": round(float(np.mean(scales)), 3), "least": min(scales), "most": max(scales)},
    }


def main() -> None:
    """Simulates each number of images, and writes what it finds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photographs", type=Path, required=True, help="a folder of images, for their sizes")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    ratios = []
    for path in sorted(path for path in arguments.photographs.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg")):
        with Image.open(path) as image:
            ratios.append(image.height / image.width)
    cases = [
        simulated(np.array(ratios), num_images, stratified=stratified)
        for stratified in (False, True)
        for num_images in IMAGES
    ]
    for case in cases:
        say(f"{case}")
    if arguments.out:
        command = "python -m benchmarks.native_resolutions --photographs DIR"
        write(
            arguments.out,
            {"command": command, "machine": machine(), "photographs": len(ratios), "batches": BATCHES, "cases": cases},
        )


if __name__ == "__main__":
    main()
