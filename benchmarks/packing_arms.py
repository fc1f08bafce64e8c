"""One arm of the packing benchmark in its own process: loads its libraries, packs, and reports the cost of each.

    python -m benchmarks.packing_arms ARM --images DIR --out DIR --report FILE

DIR has one folder per class. The peers are used as in their documentation: a loop over the files in random order passes
image and label of each to their writer. They need not be installed if they are not measured.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from benchmarks.torchvision_operators import import_torchvision

IMAGES_A_SHARD = 1000
CHUNK_BYTES = 1 << 26  # the default of MDSWriter
Work = Callable[[str, str], None]


def main() -> None:
    """Runs the arm that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm", choices=ARMS)
    for name in ("images", "out", "report"):
        parser.add_argument(f"--{name}", required=True)
    arguments = parser.parse_args()
    load, packages = ARMS[arguments.arm]
    began = time.monotonic()
    work = load()
    imported, wall_before, cpu_before = _cpu_seconds(), time.monotonic(), _cpu_seconds()
    work(arguments.images, arguments.out)
    wall = time.monotonic() - wall_before
    _end_forkserver()
    report = {
        "import_wall_seconds": wall_before - began,
        "import_cpu_seconds": imported,
        "wall_seconds": wall,
        "cpu_seconds": _cpu_seconds() - cpu_before,
        "largest_rss_bytes": max(resource.getrusage(who).ru_maxrss for who in _WHOSE) << 10,
        "versions": {package: version(package) for package in packages},
    }
    Path(arguments.report).write_text(json.dumps(report))


_WHOSE = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def _cpu_seconds() -> float:
    """CPU-seconds of this process since its start, and of its children that have ended."""
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, _WHOSE))


def _end_forkserver() -> None:
    """Ends the fork server: its time, and that of its workers, is counted only then."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def labelled_files(root: str) -> list[tuple[str, int]]:
    """Path and label of every image, in random order."""
    folders = sorted(os.listdir(root))  # noqa: PTH208 - names are all that is needed, and paths are slow to make
    files = [
        (f"{root}/{folder}/{name}", label)
        for label, folder in enumerate(folders)
        for name in sorted(os.listdir(f"{root}/{folder}"))  # noqa: PTH208
    ]
    random.Random(0).shuffle(files)
    return files


def read_sample(item: tuple[str, int]) -> dict[str, Any]:
    """Called by LitData for each input."""
    path, label = item
    return {"image": Path(path).read_bytes(), "label": label}


def samples(root: str) -> Iterator[tuple[bytes, int]]:
    """Bytes and label of every image."""
    for path, label in labelled_files(root):
        with open(path, "rb") as file:  # noqa: PTH123 - the fastest way
            yield file.read(), label


def shard_writer() -> Work:
    """Webdataset's ShardWriter: only key, image and class."""
    import webdataset  # noqa: PLC0415

    def work(images: str, out: str) -> None:
        Path(out).mkdir()
        with webdataset.ShardWriter(f"{out}/shard-%06d.tar", maxcount=IMAGES_A_SHARD, verbose=0) as writer:
            for number, (image, label) in enumerate(samples(images)):
                writer.write({"__key__": f"{number:010d}", "jpg": image, "cls": label})

    return work


def mds_writer(hashes: tuple[str, ...] = ()) -> Work:
    """MosaicML's MDSWriter, uncompressed."""
    import_torchvision()  # MosaicML loads it, and needs only its Python half
    from streaming import MDSWriter  # noqa: PLC0415

    def work(images: str, out: str) -> None:
        columns = {"image": "bytes", "label": "int"}
        with MDSWriter(out=out, columns=columns, hashes=list(hashes), size_limit=CHUNK_BYTES) as writer:
            for image, label in samples(images):
                writer.write({"image": image, "label": label})

    return work


def litdata_optimize(workers: int) -> Work:
    """LitData's optimize, with its caches beside the output."""
    import litdata  # noqa: PLC0415

    def work(images: str, out: str) -> None:
        for name in ("DATA_OPTIMIZER_CACHE_FOLDER", "DATA_OPTIMIZER_DATA_CACHE_FOLDER"):
            os.environ[name] = f"{out}-{name}"
        litdata.optimize(
            fn=read_sample,
            inputs=labelled_files(images),
            output_dir=out,
            num_workers=workers,
            chunk_bytes=CHUNK_BYTES,
            verbose=False,
        )

    return work


def patchline(workers: int, *, durable: bool = True) -> Work:
    """`patchline pack folder`. Exact duplicates are kept: the benchmark's images are copies of a few."""
    from jobs.data.pack import PackJob, run  # noqa: PLC0415
    from shards.packing.config import Dedup  # noqa: PLC0415
    from shards.sources.kinds import FolderSource  # noqa: PLC0415

    multiprocessing.set_forkserver_preload(["jobs.data.pack"])  # as on the command line

    def work(images: str, out: str) -> None:
        if not durable:
            os.fsync = lambda fd: None  # noqa: ARG005 - mypy wants its name
        source = FolderSource(root=images)
        dedup = Dedup(duplicates="keep")
        job = PackJob(out=out, source=source, dedup=dedup, workers=workers, samples_per_shard=IMAGES_A_SHARD)
        assert run(job) == 0

    return work


# Name: what loads the arm, and the packages whose versions are recorded.
_OURS = ("pyarrow", "numpy")
ARMS: dict[str, tuple[Callable[[], Work], tuple[str, ...]]] = {
    "ShardWriter": (shard_writer, ("webdataset", "torch")),
    "MDSWriter": (mds_writer, ("mosaicml-streaming", "torch")),
    "MDSWriter, sha256": (lambda: mds_writer(("sha256",)), ("mosaicml-streaming",)),
    "LitData, 1 worker": (lambda: litdata_optimize(1), ("litdata", "torch")),
    "LitData, 2 workers": (lambda: litdata_optimize(2), ("litdata",)),
    "patchline, 1 worker": (lambda: patchline(1), _OURS),
    "patchline, 1 worker, without fsync": (lambda: patchline(1, durable=False), _OURS),
    "patchline, 2 workers": (lambda: patchline(2), _OURS),
}


if __name__ == "__main__":
    main()
