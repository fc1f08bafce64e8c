"""The cost of packing compared with the writers of webdataset, MosaicML and LitData, and with `cp -r`.

All arms run in one run on the same images (photographs copied until there are enough; real copies, so that `cp` reads
as much as the others), one after another, in an order that rotates from round to round, each in its own process. The
first round is not counted. Before each arm, its inputs are read once (page cache), and everything written by others is
on disk. After it, the time until the kernel has written the rest is counted separately; ours waits for that itself.
Peers need their own environment (`make bench-env`). Command (about 15 minutes on 2 cores):

    python -m benchmarks.packing --data DIR --scratch DIR --out benchmarks/results/packing.json
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, run
from benchmarks.packing_arms import ARMS, IMAGES_A_SHARD

COPY, BASE = "cp -r", "ShardWriter"
Round = dict[str, Any]


def main() -> None:
    """Measures all arms; prints and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of CLASS_anything.JPEG files")
    parser.add_argument("--scratch", type=Path, required=True, help="folder for copies and the results of the arms")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help=f"besides {BASE} and {COPY}")
    parser.add_argument("--peers", default=".venv-bench/bin/python", help="a Python that has the peers")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.scratch.resolve().is_relative_to(Path(tempfile.gettempdir()).resolve()):
        parser.error("--scratch is below the system's temporary folder, where LitData clears a cache of its own")
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        images = Path(scratch, "images")
        num_bytes = copy_images(arguments.data, images, arguments.images)
        names = [COPY, *(name for name in ARMS if name in (BASE, *arguments.arms))]
        turns = [
            [*names[number % len(names) :], *names[: number % len(names)]] for number in range(arguments.rounds + 1)
        ]
        rounds = [{name: one_arm(name, images, Path(scratch), arguments.peers) for name in turn} for turn in turns]
    result = {
        "command": command_of(arguments),
        "machine": machine(),
        "versions": {name: version for item in rounds[0].values() for name, version in item["versions"].items()},
        "images": arguments.images,
        "image_bytes": num_bytes,
        "images_a_shard": IMAGES_A_SHARD,
        "arms": summary(rounds[1:]),
        "rounds": rounds[1:],
    }
    sys.stdout.write(table(result["arms"]))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def command_of(arguments: argparse.Namespace) -> str:
    """Returns the command with what differs from the defaults, and with the priority of real time if it had that."""
    words = ["python -m benchmarks.packing --data DIR --scratch DIR"]
    words.append(f"--images {arguments.images} --rounds {arguments.rounds}")
    if set(arguments.arms) != set(ARMS):
        words.append(f"--arms {shlex.join(arguments.arms)}")
    if arguments.out:
        words.append(f"--out {arguments.out}")
    if os.sched_getscheduler(0) == os.SCHED_RR:
        words.insert(0, "chrt -r 1")
    return " ".join(words)


def copy_images(data: Path, images: Path, count: int) -> int:
    """Copies the sample images again and again, to `count` files in class folders; returns their total bytes."""
    paths, num_bytes = sorted(data.glob("*.JPEG")), 0
    for number in range(count):
        path = paths[number % len(paths)]
        folder = images / path.name.partition("_")[0]
        folder.mkdir(parents=True, exist_ok=True)
        copy = shutil.copyfile(path, folder / f"{path.stem}_{number // len(paths):04d}.JPEG")
        num_bytes += copy.stat().st_size
    return num_bytes


def one_arm(name: str, images: Path, scratch: Path, peers: str) -> Round:
    """Runs an arm; returns what it measured itself and what was measured from outside."""
    out, report = scratch / "out", scratch / "report.json"
    for path in images.rglob("*.JPEG"):
        path.read_bytes()
    os.sync()
    if name == COPY:
        command = ["cp", "-r", str(images), str(out)]
    else:
        python = sys.executable if name.startswith("patchline") else peers
        words = ["--images", str(images), "--out", str(out), "--report", str(report)]
        command = [python, "-m", "benchmarks.packing_arms", name, *words]
    whole = run(command)
    began = time.monotonic()
    num_bytes = sync_files(out)
    result: Round = {
        "whole_wall_seconds": whole.wall_seconds,
        "whole_cpu_seconds": whole.cpu_seconds,
        "largest_process_bytes": whole.largest_process_bytes,
        "peak_bytes": whole.peak_bytes,
        "sync_seconds": time.monotonic() - began,
        "output_bytes": num_bytes,
    }
    plain = {"wall_seconds": whole.wall_seconds, "cpu_seconds": whole.cpu_seconds, "versions": {}}
    result |= plain if name == COPY else json.loads(report.read_text())
    for folder in scratch.glob("out*"):
        shutil.rmtree(folder)
    sys.stdout.write(f"{name:36s} {result['cpu_seconds']:6.2f} CPU-s {result['wall_seconds']:6.2f} s\n")
    sys.stdout.flush()
    return result


def sync_files(folder: Path) -> int:
    """Waits until all files are on disk; returns their total bytes."""
    num_bytes = 0
    for path in folder.rglob("*"):
        if path.is_file():
            num_bytes += path.stat().st_size
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    return num_bytes


def summary(rounds: list[dict[str, Round]]) -> dict[str, Round]:
    """Median and quartiles of each figure, and of its ratios to ShardWriter's and cp's in the same round."""
    figures: dict[str, Callable[[Round], float]] = {
        "cpu_seconds": lambda item: item["cpu_seconds"],
        "wall_seconds": lambda item: item["wall_seconds"],
        "wall_seconds_until_on_disk": lambda item: item["wall_seconds"] + item["sync_seconds"],
        "whole_cpu_seconds": lambda item: item["whole_cpu_seconds"],
        "whole_wall_seconds": lambda item: item["whole_wall_seconds"],
        "import_cpu_seconds": lambda item: item.get("import_cpu_seconds", 0.0),
        "import_wall_seconds": lambda item: item.get("import_wall_seconds", 0.0),
    }
    result: dict[str, Round] = {}
    for name in sorted(rounds[0]):
        arm: Round = {figure: spread([take(one[name]) for one in rounds]) for figure, take in figures.items()}
        for other, called in ((BASE, "shard_writer"), (COPY, "cp")):
            for figure, take in figures.items():
                if not figure.startswith("import"):
                    ratios = [take(one[name]) / take(one[other]) for one in rounds]
                    arm[f"{figure}_to_{called}"] = spread(ratios)
        arm["largest_process_megabytes"] = max(one[name]["largest_process_bytes"] for one in rounds) / 1e6
        result[name] = arm
    return result


def spread(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return [round(value, 3) for value in statistics.quantiles(values, n=4, method="inclusive")]


def table(arms: dict[str, Round]) -> str:
    """The arms as Markdown, the cheapest first."""
    rows = [
        "| | CPU-s | to ShardWriter | wall s | to ShardWriter | until on disk, s | to ShardWriter | "
        "whole command: CPU-s, wall s | largest process, MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, arm in sorted(arms.items(), key=lambda item: item[1]["cpu_seconds"][1]):
        cells = [name]
        for figure in ("cpu_seconds", "wall_seconds", "wall_seconds_until_on_disk"):
            low, middle, high = arm[figure]
            cells += [f"{middle:.2f} ({low:.2f} to {high:.2f})", f"{arm[f'{figure}_to_shard_writer'][1]:.2f}"]
        cells.append(f"{arm['whole_cpu_seconds'][1]:.2f}, {arm['whole_wall_seconds'][1]:.2f}")
        cells.append(f"{arm['largest_process_megabytes']:.0f}")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
