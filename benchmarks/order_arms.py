"""One arm of the order benchmark in its own process on one core: the sample ids of one batch, starting from nothing.

python -m benchmarks.order_arms ARM --report FILE
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGE, MEDIUM, SMALL = 303_000_000, 10_000_000, 1_000_000
STEP, BATCH, BLOCK = 500_000, 4096, 64
LANES, WINDOW_BLOCKS = 64, 4  # our DataConfig's defaults
# One host of 8 GPUs with 8 workers each; chunks of 64 MiB of 110 kB images; otherwise StreamingDataset's defaults.
RANKS, WORKERS, SAMPLES_A_CHUNK, SEED = 8, 8, 610, 9176
OURS, PEER = "patchline", "MosaicML"
Ids = NDArray[np.int64]


def main() -> None:
    """Runs the arm that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm", choices=ARMS)
    parser.add_argument("--report", type=Path, required=True)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    load, num_samples, packages = ARMS[arguments.arm]
    first_batch = load()
    before, cpu, wall = _peak_bytes(), _cpu_seconds(), time.monotonic()
    ids = first_batch(num_samples)
    wall, cpu_spent = time.monotonic() - wall, _cpu_seconds() - cpu
    if ids.size != BATCH or np.unique(ids).size != BATCH or ids.min() < 0 or ids.max() >= num_samples:
        raise RuntimeError(f"{arguments.arm} gave no batch of {BATCH} different samples")
    report = {
        "wall_seconds": wall,
        "cpu_seconds": cpu_spent,
        "peak_bytes": _peak_bytes(),
        "added_bytes": _peak_bytes() - before,
        "import_cpu_seconds": cpu,
        "versions": {package: version(package) for package in ("numpy", *packages)},
    }
    arguments.report.write_text(json.dumps(report))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def ours() -> Callable[[int], Ids]:
    """Builds SampleOrder from the block sizes and asks it for the batch."""
    from shards.order import SampleOrder  # noqa: PLC0415

    def first_batch(num_samples: int) -> Ids:
        sizes = np.full(-(-num_samples // BLOCK), BLOCK, dtype=np.int64)
        sizes[-1] = num_samples - BLOCK * (sizes.size - 1)
        return SampleOrder(sizes, seed=0, lanes=LANES, window_blocks=WINDOW_BLOCKS).batch(STEP, BATCH)

    return first_batch


def mosaicml() -> Callable[[int], Ids]:
    """What StreamingDataset's local leader computes before the first batch of an epoch, or when it resumes in one."""
    from benchmarks.torchvision_operators import import_torchvision  # noqa: PLC0415

    declared = import_torchvision()
    from streaming.base.partition import get_partitions  # noqa: PLC0415
    from streaming.base.shuffle import get_shuffle  # noqa: PLC0415

    def first_batch(num_samples: int, _: object = declared) -> Ids:
        epoch, seen = divmod(STEP * BATCH, num_samples)
        chunks = np.full(-(-num_samples // SAMPLES_A_CHUNK), SAMPLES_A_CHUNK, dtype=np.int64)
        chunks[-1] = num_samples - SAMPLES_A_CHUNK * (chunks.size - 1)
        dealt = get_partitions("relaxed", num_samples, 1, 1, RANKS, WORKERS, BATCH // RANKS, seen, 1)
        shuffle: Any = get_shuffle("py1e", chunks, 1, SEED, epoch, max(4_000_000, 1 << 18))
        ids = np.where(dealt != -1, shuffle[dealt], -1)
        return np.asarray(ids[0, :, 0, 0].reshape(-1), dtype=np.int64)

    return first_batch


# Name: what loads the arm, the number of samples, and the packages whose versions are recorded besides numpy.
ARMS: dict[str, tuple[Callable[[], Callable[[int], Ids]], int, tuple[str, ...]]] = {
    f"{OURS}, {LARGE:,}": (ours, LARGE, ()),
    f"{OURS}, {MEDIUM:,}": (ours, MEDIUM, ()),
    f"{PEER}, {MEDIUM:,}": (mosaicml, MEDIUM, ("mosaicml-streaming",)),
    f"{OURS}, {SMALL:,}": (ours, SMALL, ()),
    f"{PEER}, {SMALL:,}": (mosaicml, SMALL, ("mosaicml-streaming",)),
}


if __name__ == "__main__":
    main()
