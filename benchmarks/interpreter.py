"""The interpreter's time that the loader takes per sample, which a training loop in the same process cannot use.

The images have 8 x 8 pixels, so little is left but the work around them. What is counted is the CPU time of the whole
process less the time inside the calls of the C library, which hold no interpreter lock. It is an upper bound: NumPy's
larger operations and the reads of files hold no lock either. Command (two minutes):

    python -m benchmarks.interpreter --out benchmarks/results/interpreter.json
"""

import argparse
import io
import itertools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

from benchmarks.measure import machine
from benchmarks.rounds import cell, in_turn, spread, values, write
from jobs.data.pack import PackJob, run
from pipeline.data.config import AugmentConfig, DataConfig, RandAugmentConfig
from pipeline.data.stream import train_batches
from pipeline.data.transform import crop_decoder
from shards.sources.kinds import FolderSource

NUM_IMAGES, NUM_CLASSES = 16_384, 16
BATCH = 256  # samples of this rank
WARM_UP, MEASURED = 16, 128  # batches
FIGURE, LIBRARY = "held_us", "library_us"
# Samples of each lane in a batch, and operations of RandAugment; with the aim in microseconds a sample.
ARMS = {
    "32 samples a lane": (32, 0, 10),
    "32 samples a lane, RandAugment of 2": (32, 2, 20),
    "4 samples a lane": (4, 0, 10),
    "4 samples a lane, RandAugment of 2": (4, 2, 20),
}


def main() -> None:
    """Measures every arm; prints and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    decoder = crop_decoder()
    if decoder is None:
        raise SystemExit("the crop decoder is not built: make setup")
    with tempfile.TemporaryDirectory() as folder:
        url = packed(Path(folder))
        clock = Clock(decoder._library.sample_views_fill)
        with mock.patch.object(decoder._library, "sample_views_fill", clock):
            rounds = in_turn(
                list(ARMS), lambda name: arm(url, name, clock), rounds=arguments.rounds, keep=lambda _: None
            )
    found, library = ({name: spread(values(rounds, name, each)) for name in ARMS} for each in (FIGURE, LIBRARY))
    command = f"python -m benchmarks.interpreter --rounds {arguments.rounds} --out benchmarks/results/interpreter.json"
    write(arguments.out, {"command": command, "machine": machine(), FIGURE: found, LIBRARY: library})
    sys.stdout.write(table(found, library))


class Clock:
    """A function of the C library, with the CPU seconds that its calls have taken."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *arguments: Any) -> None:
        began = time.thread_time()
        self.function(*arguments)
        self.seconds += time.thread_time() - began


def packed(folder: Path) -> str:
    """The URL of a dataset of noise."""
    draw = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        path = folder / "images" / f"class{number % NUM_CLASSES}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        data = io.BytesIO()
        Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(data, "JPEG")
        path.write_bytes(data.getvalue())
    job = PackJob(out=str(folder / "packed"), source=FolderSource(root=str(folder / "images")))
    if run(job):
        raise SystemExit("packing failed")
    return job.out


def arm(url: str, name: str, clock: Clock) -> dict[str, Any]:
    """Microseconds a sample that may have held the interpreter."""
    of_lane, num_ops, _ = ARMS[name]
    config = DataConfig(
        lanes=BATCH // of_lane,
        num_threads=1,
        augment=AugmentConfig(crop="random_resized"),
        randaugment=RandAugmentConfig(num_ops=num_ops, magnitude=9) if num_ops else RandAugmentConfig(),
    )
    with train_batches(url, global_batch=BATCH, image_size=8, config=config) as batches:
        next(itertools.islice(batches, WARM_UP, None))
        began, native = time.process_time(), clock.seconds
        next(itertools.islice(batches, MEASURED - 1, None))
        held = time.process_time() - began - (clock.seconds - native)
    in_library = clock.seconds - native
    return {FIGURE: held / (MEASURED * BATCH) * 1e6, LIBRARY: in_library / (MEASURED * BATCH) * 1e6}


def table(found: dict[str, list[float]], library: dict[str, list[float]]) -> str:
    """Microseconds a sample, one row per arm."""
    lines = ["| | aim, µs a sample | measured (quartiles) | in the library |", "|---|---|---|---|"]
    lines += [f"| {name} | at most {ARMS[name][2]} | {cell(found[name])} | {cell(library[name])} |" for name in ARMS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
