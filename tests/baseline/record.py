"""The losses and batches of short runs and a short stream, recorded before the code was rearranged.

    python -m tests.baseline.record     losses.json and batches.json, again: only if a change of results is intended

The runs are real processes on digits, in fp32, with everything switched on that draws random numbers or averages
weights. The instruction set is fixed so that machines differ as little as possible. On the CPU that recorded them,
results must be bit-identical.
"""

import json
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from jobs.cli import main
from jobs.ranks import start_ranks
from pipeline.data.config import AugmentConfig, DataConfig, RandAugmentConfig
from pipeline.data.stream import train_batches
from pipeline.training.reporting.metrics import read_metrics

FOLDER = Path(__file__).resolve().parent
LOSSES, BATCHES = FOLDER / "losses.json", FOLDER / "batches.json"
STEPS, NUM_BATCHES = 10, 20
SAME_ARITHMETIC = {
    "OMP_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
}
TINY = (
    *("--model.width", "16", "--model.depth", "1", "--model.mlp-width", "32", "--model.num-heads", "2"),
    *("--global-batch", "16", "--data.lanes", "8", "--schedule.warmup-steps", "2", "--device", "cpu"),
    *("--engine.precision", "fp32", "--engine.compile", "off", "--log-every-steps", "1"),
    *(
        "--schedule.learning-rate",
        "0.01",
        "--data.randaugment.num-ops",
        "2",
        "--data.mixup.alpha",
        "0.2",
        "--model.dropout",
        "0.1",
    ),
)
RUNS = {  # name -> ranks, arguments
    "one rank": (1, ()),
    "two ranks, ZeRO 2": (2, ("--engine.zero-stage", "2", "--micro-batch", "4")),
}


def cpu() -> str:
    """Everything that bit-identical results depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    flags = next(line.split() for line in lines if line.startswith("flags"))
    simd = [name for name in ("avx2", "avx512f", "avx512_bf16") if name in flags]
    return f"{model}, {' '.join(simd)}, torch {version('torch')}, Python {sys.version_info[0]}.{sys.version_info[1]}"


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Changes the current folder, so that no record names a folder of this machine."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def pack_digits() -> None:
    """Packs the dataset that everything here uses, as `digits` in the current folder."""
    if main(["pack", "digits", "--out", "digits", "--samples-per-shard", "300", "--samples-per-block", "10"]) != 0:
        raise AssertionError("the digits could not be packed")


def folder_of(name: str) -> Path:
    """The run directory of one of RUNS, relative to the current folder."""
    return Path(name.replace(",", "").replace(" ", "_"))


def trained(name: str) -> Path:
    """Trains one of RUNS in the current folder; its run directory."""
    num_ranks, words = RUNS[name]
    run_dir = folder_of(name)
    command = ["pretrain", "digits_smoke", "--data.url", "digits", "--run-dir", str(run_dir), *TINY, *words]
    command += ["--steps", str(STEPS)]
    environ = {**os.environ, **SAME_ARITHMETIC}
    code = start_ranks(command, num_ranks=num_ranks, environ=environ, log_dir=Path("logs")).wait()
    if code != 0:
        raise AssertionError(f"{' '.join(command)} ended with {code}")
    return run_dir


def losses_of(run_dir: Path) -> list[float]:
    """The loss of every step, as it was written."""
    return [float(line["loss"]) for line in read_metrics(run_dir)]


def batches_of(url: str) -> list[dict[str, Any]]:
    """A few batches across the end of a small epoch: the samples, and checksums of their pixels and labels."""
    config = DataConfig(
        lanes=8, window_blocks=2, num_threads=1, augment=AugmentConfig(), randaugment=RandAugmentConfig(num_ops=2)
    )
    found = []
    with train_batches(url, global_batch=128, image_size=16, seed=7, rank=1, num_ranks=2, config=config) as batches:
        for batch in islice(batches, NUM_BATCHES):
            pixels, labels = (zlib.crc32(tensor.numpy().tobytes()) for tensor in (batch.images, batch.labels))
            ids = zlib.crc32(batch.sample_ids.numpy().tobytes())
            first = batch.sample_ids[:4].tolist()
            found.append({"step": batch.step, "first_ids": first, "ids": ids, "pixels": pixels, "labels": labels})
    return found


def record() -> None:
    """Records losses and batches."""
    with tempfile.TemporaryDirectory() as folder, inside(Path(folder)):
        pack_digits()
        found = {name: losses_of(trained(name)) for name in RUNS}
        LOSSES.write_text(json.dumps({"cpu": cpu(), "losses": found}, indent=1) + "\n")
        BATCHES.write_text(json.dumps(batches_of("digits"), indent=1) + "\n")


if __name__ == "__main__":
    record()
