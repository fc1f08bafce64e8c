"""One arm of the S3 benchmark in its own process: our batches from a folder or from S3, and their cost.

    python -m benchmarks.s3_arms epochs|start|position --url URL --images N --report FILE

`epochs` reads some epochs; with --hash, it hashes every step, sample id and pixel. `start` takes one batch at
--position, timed from the call of train_batches. `position` prints the position of a stream from which no batch has
been taken.
"""

import argparse
import hashlib
import itertools
import json
import resource
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.loader_arms import Moment, figures, marks_of
from benchmarks.loader_ours import augment_config

PACKAGES = ("boto3", "botocore", "urllib3", "torch", "numpy")


def main() -> None:
    """Runs what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm", choices=("epochs", "start", "position"))
    parser.add_argument("--url", required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--images", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--position", default="null", help="as JSON")
    parser.add_argument("--hash", action="store_true")
    for name, value in (("batch", 64), ("threads", 2), ("lanes", 16), ("window-blocks", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    began = time.monotonic()
    from pipeline.data.config import DataConfig  # noqa: PLC0415
    from pipeline.data.transform import decoder_name  # noqa: PLC0415
    from shards.store import open_store  # noqa: PLC0415

    open_store(arguments.url)  # loads boto3 without making a client
    imported = Moment.now()
    config = DataConfig(
        lanes=arguments.lanes,
        window_blocks=arguments.window_blocks,
        num_threads=arguments.threads,
        augment=augment_config(antialias=False),
    )
    report = {"epochs": epochs, "start": start, "position": position}[arguments.arm](arguments, config)
    report |= {
        "import_wall_seconds": imported.wall - began,
        "import_cpu_seconds": imported.cpu,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "versions": {package: version(package) for package in PACKAGES} | {"our decoder": decoder_name()},
    }
    arguments.report.write_text(json.dumps(report))


def epochs(arguments: argparse.Namespace, config: Any) -> dict[str, Any]:
    """Reads all batches of --epochs epochs."""
    from pipeline.data.stream import train_batches  # noqa: PLC0415

    num_batches = arguments.epochs * arguments.images // arguments.batch
    digest, marks, moments = hashlib.sha256(), marks_of(num_batches), {0: Moment.now()}
    with train_batches(arguments.url, global_batch=arguments.batch, config=config) as batches:
        for number, batch in enumerate(itertools.islice(batches, num_batches), 1):
            if number in marks:
                moments[number] = Moment.now()
            if arguments.hash:
                for data in (str(batch.step).encode(), batch.sample_ids.numpy().tobytes(), batch.images.numpy().data):
                    digest.update(data)
        counts = batches.counts()
    return figures(moments, Moment.now(), num_batches=num_batches, batch=arguments.batch) | {
        "traffic": counts,
        "pixels_sha256": digest.hexdigest() if arguments.hash else "",
    }


def start(arguments: argparse.Namespace, config: Any) -> dict[str, Any]:
    """Takes the first batch at a position."""
    from pipeline.data.stream import train_batches  # noqa: PLC0415

    place = json.loads(arguments.position)
    begin = Moment.now()
    with train_batches(arguments.url, global_batch=arguments.batch, position=place, config=config) as batches:
        batch = next(iter(batches))
        end = Moment.now()
    if batch.step != place["next_step"] or batch.images.shape[0] != arguments.batch:
        raise RuntimeError(f"step {batch.step} came instead of {place['next_step']}")
    return {"first_batch_seconds": end.wall - begin.wall, "first_batch_cpu_seconds": end.cpu - begin.cpu}


def position(arguments: argparse.Namespace, config: Any) -> dict[str, Any]:
    """The position before the first batch."""
    from pipeline.data.stream import train_batches  # noqa: PLC0415

    with train_batches(arguments.url, global_batch=arguments.batch, config=config) as batches:
        return {"position": batches.position}


if __name__ == "__main__":
    main()
