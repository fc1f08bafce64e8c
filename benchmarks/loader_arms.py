"""One arm of the loader benchmark in its own process: one epoch of uint8 batches and their cost.

    python -m benchmarks.loader_arms ARM --work DIR --images N --report FILE

CPU-seconds are those of this process and all its descendants. "Steady" is from the end of the first eighth of the
batches to the end of the seventh: the loader is full of work in progress at both moments, so that its cost cancels.
With `--step-threads`, a busy step computes beside it, and its products per second are reported too; CPU-seconds then
include it. With `--most-rate`, images are not taken faster than that, as by a training loop.
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loader_bare import bare
from benchmarks.loader_native import dali, ffcv, spdl
from benchmarks.loader_ours import hooked, ours
from benchmarks.loader_peers import energon, huggingface, imagefolder, litdata, mosaicml, webdataset
from benchmarks.loader_settings import Settings
from benchmarks.loader_step import BusyStep

Batches = Iterator[tuple[Any, Any]]  # images uint8 of any layout, labels
PACKAGES = ("torch", "numpy", "simplejpeg", "opencv-python-headless", "pillow")
HOOK, PROCESSES = "patchline, torchvision v2", "patchline, torchvision v2, processes"
WORKERS, SAME_DECODER = "ImageFolder, torchvision v2", "ImageFolder, simplejpeg, torchvision v2"
SETTINGS = frozenset(field.name for field in fields(Settings))
WARM_SHARE = 8  # an eighth of the batches is before the steady part, and an eighth after it


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The clock in seconds, the CPU-seconds of this process and its descendants, and what the busy step has done."""

    wall: float
    cpu: float
    products: int = 0

    @classmethod
    def now(cls, step: BusyStep | None = None) -> "Moment":
        """The current moment."""
        cpu = _own_cpu_seconds() + sum(map(_cpu_seconds, _below(os.getpid())))
        return cls(wall=time.monotonic(), cpu=cpu, products=step.count if step else 0)


def main() -> None:
    """Runs the arm that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm", choices=ARMS)
    parser.add_argument("--work", required=True, help="folder of the layouts that loader_prepare made")
    parser.add_argument("--report", type=Path, required=True)
    for name, value in (("images", 0), ("batch", 64), ("workers", 2), ("lanes", 16), ("window-blocks", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--step-threads", type=int, default=0, help="threads of a busy step beside the loader; 0: none")
    parser.add_argument("--most-rate", type=int, default=0, help="images taken per second; 0: as fast as they come")
    arguments = parser.parse_args()
    load, packages = ARMS[arguments.arm]
    given = {name: value for name, value in vars(arguments).items() if name in SETTINGS}
    settings = Settings(**given)
    began = time.monotonic()
    batches = load(settings)
    with BusyStep(arguments.step_threads) if arguments.step_threads else nullcontext() as step:
        report = one_epoch(batches, settings, step, most_rate=arguments.most_rate)
    report |= {
        "import_wall_seconds": time.monotonic() - began,
        "versions": {package: version(package) for package in (*PACKAGES, *packages)},
    }
    report["import_wall_seconds"] -= report["epoch_wall_seconds"]
    if arguments.arm.startswith("patchline") or "our" in arguments.arm:
        from pipeline.data.transform import decoder_name  # noqa: PLC0415

        report["versions"]["our decoder"] = decoder_name()
    arguments.report.write_text(json.dumps(report))


def one_epoch(
    batches: Callable[[], Batches], settings: Settings, step: BusyStep | None = None, *, most_rate: int = 0
) -> dict[str, Any]:
    """Takes every batch. RuntimeError if they are not one epoch of images of the right size."""
    num_batches, size = settings.images // settings.batch, settings.image_size
    counts, number, marks = np.zeros(0, dtype=np.int64), 0, marks_of(num_batches)
    alone = step.rate_alone() if step else 0.0
    start = Moment.now()
    moments = {0: start}
    for images, labels in batches():
        number += 1
        if number in marks:
            moments[number] = Moment.now(step)
        if str(images.dtype).removeprefix("torch.") != "uint8" or images.shape[0] * size * size * 3 != _size(images):
            raise RuntimeError(f"batch {number} is {images.dtype}{list(images.shape)}")
        more = np.bincount(np.asarray(labels).reshape(-1), minlength=counts.size)
        more[: counts.size] += counts
        counts = more
        if most_rate:
            time.sleep(max(0.0, start.wall + number * settings.batch / most_rate - time.monotonic()))
    end = Moment.now()
    if number != num_batches or int(counts.sum()) != settings.images:
        raise RuntimeError(f"{number} batches of {int(counts.sum())} images instead of {num_batches}")
    return figures(moments, end, num_batches=num_batches, batch=settings.batch) | {
        "epoch_wall_seconds": end.wall - start.wall,
        "import_cpu_seconds": start.cpu,
        "label_counts": counts.tolist(),
        **({"step_alone_per_second": alone} if step else {}),
    }


def marks_of(num_batches: int) -> tuple[int, int, int]:
    """The batches after which a moment is taken: the first, and those where the steady part begins and ends."""
    margin = max(1, num_batches // WARM_SHARE)
    return 1, margin, num_batches - margin


def figures(moments: Mapping[int, Moment], end: Moment, *, num_batches: int, batch: int) -> dict[str, Any]:
    """Rates from the moments after 0 batches and after the marks, and the moment of the end."""
    one, begin, last = marks_of(num_batches)
    start, first, steady, steady_end = (moments[number] for number in (0, one, begin, last))
    images, steady_images = num_batches * batch, (last - begin) * batch
    return {
        "cpu_seconds_per_1000": (steady_end.cpu - steady.cpu) / steady_images * 1000,
        "images_per_second": steady_images / (steady_end.wall - steady.wall),
        "first_batch_seconds": first.wall - start.wall,
        "epoch_cpu_seconds_per_1000": (end.cpu - start.cpu) / images * 1000,
        "epoch_images_per_second": images / (end.wall - start.wall),
        "step_per_second": (steady_end.products - steady.products) / (steady_end.wall - steady.wall),
    }


def _size(images: Any) -> int:
    return int(np.prod(images.shape))


def _own_cpu_seconds() -> float:
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, whose))


def _cpu_seconds(pid: int) -> float:
    """CPU-seconds of a process and of its descendants that have ended; 0 if it has just ended itself."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _below(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            yield child
            yield from _below(child)


# Name: what loads the arm, and the packages whose versions are recorded in addition to PACKAGES.
ARMS: dict[str, tuple[Callable[[Settings], Callable[[], Batches]], tuple[str, ...]]] = {
    "patchline": (ours, ()),
    "patchline, antialiased": (lambda settings: ours(settings, antialias=True), ()),
    "patchline, without the crop decoder": (lambda settings: ours(settings, library=False), ()),
    "patchline, libjpeg-turbo's Huffman decoder": (lambda settings: ours(settings, own_huffman=False), ()),
    "patchline, shuffles all": (lambda settings: ours(settings, shuffles_all=True), ()),
    "DALI": (dali, ("nvidia-dali-cuda120",)),
    "DALI, antialiased": (lambda settings: dali(settings, antialias=True), ("nvidia-dali-cuda120",)),
    "FFCV": (ffcv, ("ffcv", "numba")),
    "SPDL": (spdl, ("spdl-io",)),
    "webdataset": (webdataset, ("webdataset", "torchvision")),
    "Energon": (energon, ("megatron-energon", "torchvision")),
    "MosaicML": (mosaicml, ("mosaicml-streaming", "torchvision")),
    "LitData": (litdata, ("litdata", "torchvision")),
    "HF datasets": (huggingface, ("datasets", "torchvision")),
    "HF datasets, streaming": (lambda settings: huggingface(settings, streaming=True), ("datasets", "torchvision")),
    "ImageFolder": (imagefolder, ("torchvision",)),
    "webdataset, our decoder": (lambda settings: webdataset(settings, ours=True), ()),
    "Energon, our decoder": (lambda settings: energon(settings, ours=True), ("megatron-energon",)),
    "MosaicML, our decoder": (lambda settings: mosaicml(settings, ours=True), ()),
    "LitData, our decoder": (lambda settings: litdata(settings, ours=True), ()),
    "HF datasets, our decoder": (lambda settings: huggingface(settings, ours=True), ("datasets",)),
    "ImageFolder, our decoder": (lambda settings: imagefolder(settings, ours=True), ()),
    HOOK: (hooked, ("torchvision",)),
    f"{HOOK}, 1 thread": (lambda settings: hooked(replace(settings, workers=1)), ("torchvision",)),
    f"{HOOK} on our crop": (lambda settings: hooked(settings, uses_crop=True), ("torchvision",)),
    PROCESSES: (lambda settings: hooked(settings, in_processes=True), ("torchvision",)),
    WORKERS: (lambda settings: imagefolder(settings, v2="Pillow"), ("torchvision",)),
    SAME_DECODER: (lambda settings: imagefolder(settings, v2="simplejpeg"), ("torchvision",)),
    f"{SAME_DECODER}, 1 worker": (
        lambda settings: imagefolder(replace(settings, workers=1), v2="simplejpeg"),
        ("torchvision",),
    ),
    "bare full decode": (lambda settings: bare(settings, "decode"), ()),
    "bare decode + crop + resize": (lambda settings: bare(settings, "crop"), ()),
    "bare decode + crop + resize, 2 threads": (lambda settings: bare(settings, "crop", threads=2), ()),
    "our view, from memory": (lambda settings: bare(settings, "ours"), ()),
}


if __name__ == "__main__":
    main()
