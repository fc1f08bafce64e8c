"""The cost of an image in our loader, DALI, FFCV, SPDL, webdataset, Energon, MosaicML Streaming, LitData, datasets of
Hugging Face and ImageFolder.

Photographs are copied until there are enough, and stored in the layout of each loader. Each arm runs one epoch of the
training transform to 224 pixels (inception crop of at least 5 % of the area, bilinear, flip) and makes shuffled uint8
batches of 64 with two worker processes (ours, DALI, FFCV and SPDL: two threads). DALI (on the CPU), FFCV and SPDL have
their own decoders; the other peers decode with Pillow and torchvision's transforms, as they usually do. In separate
arms these use our view, so that only the loaders are compared; the bare decoder is the limit.

Our loader shuffles 512 images at a time (8 lanes of one block of 64; its default of 16,384 would hold all of so small a
dataset) on top of packing's permutation; so do DALI, and each worker of webdataset, Energon and streaming datasets, and
a chunk of LitData holds about as many. ImageFolder, MosaicML, datasets, FFCV and SPDL shuffle all images, because they
read them one by one; the arm "patchline, shuffles all" is compared with these. Peak memory is the sum of the
proportional set sizes (PSS) of all processes.

All arms run in one run, one after another, in an order that rotates from round to round, each in its own process with a
warm page cache; the first round is not counted. Every arm must return the same images, compared by their labels. Peers
need their own environment (`make bench-env`); arms of those that it lacks are left out. Hugging Face's datasets run in
ours, since they cannot be installed beside MosaicML. Command (about 50 minutes on 2 cores):

    python -m benchmarks.loader --images DIR --work DIR --out benchmarks/results/loader.json
"""

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.loader_arms import ARMS, HOOK, PROCESSES, SAME_DECODER, WORKERS
from benchmarks.loader_prepare import (
    BETON,
    ENERGON,
    FOLDERS,
    LITDATA,
    MOSAICML,
    PARQUET,
    PATCHLINE,
    WEBDATASET,
    prepare,
)
from benchmarks.measure import machine
from benchmarks.rounds import (
    Aim,
    Report,
    Round,
    aims_table,
    cell,
    in_turn,
    measured,
    ratios,
    say,
    summary,
    values,
    write,
)

LAYOUTS = (FOLDERS, PATCHLINE, WEBDATASET, ENERGON, MOSAICML, LITDATA, PARQUET, BETON)
HF, HF_STREAMING = "HF datasets", "HF datasets, streaming"
READ_BY = {
    WEBDATASET: "webdataset",
    ENERGON: "Energon",
    MOSAICML: "MosaicML",
    LITDATA: "LitData",
    PARQUET: HF,
    BETON: "FFCV",
}  # by one peer's arms alone
OURS, ANTIALIASED, FOLDER = "patchline", "patchline, antialiased", "ImageFolder"
ALL_SHUFFLED = "patchline, shuffles all"
STREAMING = ("webdataset", "Energon", "MosaicML", "LitData", HF_STREAMING)
NATIVE = ("DALI", "FFCV", "SPDL")
PEERS = (*STREAMING, *NATIVE, HF, FOLDER)
IN_OUR_PYTHON = (OURS, "bare", "our view", HF)
# Peers that hold images to shuffle them; the others shuffle all.
BUFFERED = ("webdataset", "Energon", "LitData", HF_STREAMING, "DALI")
CPU, RATE = "cpu_seconds_per_1000", "images_per_second"
MEMORY, OWN_MEMORY = "whole_peak_bytes", "whole_peak_own_bytes"
FIGURES = (
    *(CPU, RATE, MEMORY, OWN_MEMORY, "first_batch_seconds", "epoch_cpu_seconds_per_1000", "epoch_images_per_second"),
    *("whole_cpu_seconds", "whole_wall_seconds", "import_cpu_seconds", "import_wall_seconds"),
)
MOST_SECONDS_AN_ARM = 900.0


def main() -> None:
    """Prepares the layouts, measures all arms, prints and keeps the tables."""
    parser = parser_of(__doc__, arms=list(ARMS))
    arguments = parser.parse_args()
    ready(parser, arguments)

    def keep(rounds: list[Round]) -> None:
        write(arguments.out, results(rounds, arguments))

    rounds = in_turn(arguments.arms, lambda name: one_arm(name, arguments), rounds=arguments.rounds, keep=keep)
    result = results(rounds, arguments)
    sys.stdout.write(f"\n{table(result['arms'])}\n{aims_table(result['aims'])}")


def parser_of(description: str | None, *, arms: list[str]) -> argparse.ArgumentParser:
    """The options of a benchmark of these arms."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="folder of CLASS_anything.JPEG files")
    parser.add_argument("--work", type=Path, required=True, help="folder of the layouts, kept for the next run")
    parser.add_argument("--repeat-to", type=int, default=5120, help="number of images, a multiple of 64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lanes", type=int, default=8, help="lanes of our order; 8 lanes shuffle 512 images")
    parser.add_argument("--arms", nargs="+", default=arms, choices=list(ARMS), metavar="ARM")
    parser.add_argument("--peers", default=".venv-bench/bin/python", help="a Python that has the peers")
    parser.add_argument("--out", type=Path)
    return parser


def ready(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Leaves out arms of peers that are not installed, and prepares the layouts that the arms read."""
    if not all(arm.startswith(IN_OUR_PYTHON) for arm in arguments.arms) and not Path(arguments.peers).exists():
        parser.error(f"{arguments.peers} is not there; make it with `make bench-env`, or give --peers")
    for name in [arm for arm in arguments.arms if arm.startswith(PEERS)]:
        python = python_of(name, arguments)
        for package in absent(ARMS[name][1], python=python):
            say(f"{name} is left out: {python} has no {package} (docs/benchmarks.md says how to install it)")
            arguments.arms = [arm for arm in arguments.arms if arm != name]
    layouts = [
        layout
        for layout in LAYOUTS
        if layout not in READ_BY or any(arm.startswith(READ_BY[layout]) for arm in arguments.arms)
    ]
    prepare(arguments.images, arguments.work, arguments.repeat_to, peers=arguments.peers, layouts=layouts)


def absent(packages: Sequence[str], *, python: str) -> list[str]:
    """Which of these packages another Python does not have."""
    ask = "import sys; from importlib.metadata import version; version(sys.argv[1])"
    asked = {name: subprocess.run([python, "-c", ask, name], capture_output=True, check=False) for name in packages}
    return [name for name, done in asked.items() if done.returncode]


def python_of(arm: str, arguments: argparse.Namespace) -> str:
    """The Python that runs an arm: ours, or that of the peers."""
    return sys.executable if arm.startswith(IN_OUR_PYTHON) else str(arguments.peers)


def one_arm(name: str, arguments: argparse.Namespace, *more: str) -> Report:
    """Runs an arm with its layout in the page cache. `more` words of its command line may be given."""
    for layout in LAYOUTS:
        for path in (arguments.work / layout).rglob("*"):
            if path.is_file():
                path.read_bytes()
    report = arguments.work / "report"
    words = ["--work", str(arguments.work), "--images", str(arguments.repeat_to), "--report", str(report)]
    words += ["--lanes", str(arguments.lanes), *more]
    said = measured(
        [python_of(name, arguments), "-m", "benchmarks.loader_arms", name, *words], report, seconds=MOST_SECONDS_AN_ARM
    )
    counts = json.dumps(said.pop("label_counts", None))
    return said if "failed" in said else said | {"labels_sha256": hashlib.sha256(counts.encode()).hexdigest()}


def results(rounds: list[Round], arguments: argparse.Namespace) -> dict[str, Any]:
    """The results as they are kept."""
    reports = [report for one in rounds for report in one.values()]
    labels = {report["labels_sha256"] for report in reports if "labels_sha256" in report}
    if len(labels) > 1:
        say("NOT THE SAME IMAGES: the arms returned different labels")
    return {
        "command": "python -m benchmarks.loader --images DIR --work DIR "
        f"--repeat-to {arguments.repeat_to} --rounds {arguments.rounds} --lanes {arguments.lanes} "
        f"--arms {shlex.join(arguments.arms)} --out benchmarks/results/{(arguments.out or Path('loader.json')).name}",
        "machine": machine(),
        "versions": {
            name: report["versions"] for one in rounds[:1] for name, report in one.items() if "versions" in report
        },
        "images": arguments.repeat_to,
        "lanes": arguments.lanes,
        "same_images": len(labels) == 1,
        "arms": summary(rounds, FIGURES),
        "aims": [aim.row() for aim in aims(rounds)],
        "rounds": [{name: _without_versions(report) for name, report in one.items()} for one in rounds],
    }


def _without_versions(report: Report) -> Report:
    return {name: value for name, value in report.items() if name != "versions"}


def aims(rounds: list[Round]) -> list[Aim]:
    """The loader's aims, compared with the median of the rounds."""
    bare, bare_2 = "bare decode + crop + resize", "bare decode + crop + resize, 2 threads"
    full = "bare full decode"
    peers = [peer for peer in STREAMING if values(rounds, peer, CPU)]
    return [
        Aim(what="CPU-seconds per 1,000 images", limit=1.0, found=values(rounds, OURS, CPU)),
        Aim(what="CPU-seconds per 1,000 images, antialiased", limit=1.25, found=values(rounds, ANTIALIASED, CPU)),
        Aim(what="seconds to the first batch", limit=0.2, found=values(rounds, OURS, "first_batch_seconds")),
        *(_streaming_aims(rounds, peers) if peers else ()),
        _times("CPU: ImageFolder / ours", 1.7, ratios(rounds, FOLDER, OURS, CPU)),
        _times("CPU: ImageFolder / ours, antialiased", 1.7, ratios(rounds, FOLDER, ANTIALIASED, CPU)),
        _times("images/s: ours / ImageFolder", 1.6, ratios(rounds, OURS, FOLDER, RATE)),
        Aim(what=f"CPU: ours / {bare}, one thread", limit=1.15, found=ratios(rounds, OURS, bare, CPU)),
        Aim(what=f"CPU: ours / {bare}, two threads", limit=1.15, found=ratios(rounds, OURS, bare_2, CPU)),
        Aim(what=f"CPU: ours / {full}", limit=1.0, found=ratios(rounds, OURS, full, CPU)),
        *_native_aims(rounds),
        *_hook_aims(rounds),
        *_memory_aims(rounds),
    ]


def _native_aims(rounds: list[Round]) -> list[Aim]:
    """Whether any peer with a native decoder takes less CPU than ours, with and without antialiasing."""
    pairs = [("DALI", OURS), ("DALI, antialiased", ANTIALIASED), ("FFCV", ANTIALIASED), ("SPDL", ANTIALIASED)]
    return [_times(f"CPU: {peer} / {mine}", 1.0, ratios(rounds, peer, mine, CPU)) for peer, mine in pairs]


def _hook_aims(rounds: list[Round]) -> list[Aim]:
    """Our hook, on threads and in processes, beside the same transform in a DataLoader's workers, with its usual
    decoder and with ours."""
    return [
        Aim(what=f"CPU: {mine} / {peer}", limit=1.1, found=ratios(rounds, mine, peer, CPU))
        for mine in (HOOK, PROCESSES)
        for peer in (WORKERS, SAME_DECODER)
    ]


def _memory_aims(rounds: list[Round]) -> list[Aim]:
    """Peak memory beside each peer whose shuffle reaches as far as ours."""
    pairs = [(OURS if peer in BUFFERED else ALL_SHUFFLED, peer) for peer in PEERS]
    return [
        Aim(what=f"peak memory: {mine} / {peer}", limit=1.0, found=ratios(rounds, mine, peer, MEMORY))
        for mine, peer in pairs
    ]


def _streaming_aims(rounds: list[Round], peers: list[str]) -> list[Aim]:
    """Aims relative to the streaming peers: the one that takes the least CPU, and the fastest."""
    least = min(peers, key=lambda name: _median(rounds, name, CPU))
    fastest = max(peers, key=lambda name: _median(rounds, name, RATE))
    antialiased = f"CPU: {least} / ours, antialiased as peers always are"
    return [
        _times(f"CPU: best streaming peer ({least}) / ours", 2.0, ratios(rounds, least, OURS, CPU)),
        _times(antialiased, 2.0, ratios(rounds, least, ANTIALIASED, CPU)),
        _times(f"images/s: ours / best streaming peer ({fastest})", 2.0, ratios(rounds, OURS, fastest, RATE)),
    ]


def _times(what: str, limit: float, found: list[float]) -> Aim:
    """A ratio of at least `limit`."""
    return Aim(what=what, limit=limit, at_least=True, found=found)


def _median(rounds: list[Round], name: str, figure: str) -> float:
    return sorted(values(rounds, name, figure))[len(values(rounds, name, figure)) // 2]


def table(arms: dict[str, Report]) -> str:
    """The arms as Markdown, the cheapest first."""
    rows = [
        "| | CPU-s per 1,000 | images/s | first batch, s | with start and end: CPU-s per 1,000, images/s | "
        "whole command: CPU-s, s | peak memory, MB (without mapped files) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, arm in sorted(arms.items(), key=lambda item: item[1][CPU][1:2] or [float("inf")]):
        if not arm[CPU]:
            rows.append(f"| {name} | failed in every round |")
            continue
        failed = f" (failed in {arm['failed_rounds']} rounds)" if arm["failed_rounds"] else ""
        cells = [name + failed, *(cell(arm[figure]) for figure in (CPU, RATE, "first_batch_seconds"))]
        cells.append(f"{arm['epoch_cpu_seconds_per_1000'][1]:.2f}, {arm['epoch_images_per_second'][1]:.0f}")
        cells.append(f"{arm['whole_cpu_seconds'][1]:.1f}, {arm['whole_wall_seconds'][1]:.1f}")
        cells.append(f"{arm[MEMORY][1] / 1e6:.0f} ({arm[OWN_MEMORY][1] / 1e6:.0f})")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
