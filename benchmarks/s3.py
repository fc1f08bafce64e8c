"""The cost of reading from S3 instead of a folder, with and without faults, and of starting or resuming.

The S3 store is a real Ceph RADOS Gateway on this machine. It shares the cores with the loader, so its own CPU time is
reported. There are three parts. The arms of each run one after another, in an order that rotates from round to round,
every arm in its own process; the first round is not counted.

1. Two epochs from a folder and from the gateway.
2. Some epochs of a dataset with small blocks (many requests) from a folder, through a proxy, and through the proxy with
   faults: 1 % of the requests are answered with 503, 1 % are reset in mid-body, 0.1 % of the bodies are cut short.
   Every step, sample id and pixel is hashed.
3. The time from the call of train_batches to the first batch, at 1 %, 50 % and 99 % of an epoch. Imports are not
   counted; creating the S3 client is.

Needs Ceph's programs (CONTRIBUTING.md). Command (about 15 minutes on 2 cores):

    python -m benchmarks.s3 --images DIR --work DIR --out benchmarks/results/s3.json
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.loader_prepare import PATCHLINE, SMALL_BLOCK, SMALL_BLOCKS, prepare
from benchmarks.measure import machine
from benchmarks.rounds import (
    Aim,
    Report,
    Round,
    aims_table,
    cell,
    in_turn,
    ratios,
    reported,
    say,
    spread,
    summary,
    values,
    write,
)
from benchmarks.s3_gateway import Uploaded, uploaded
from tests.rigs.faulty_proxy import faulty_proxy_process

LOCAL, GATEWAY = "folder", "gateway"
PLAIN, FAULTS = "proxy, no faults", "proxy, faults"
PLACES = (0.01, 0.5, 0.99)
CPU, RATE, FIRST = "cpu_seconds_per_1000", "images_per_second", "first_batch_seconds"
SERVER, HELPER = "gateway_cpu_seconds_per_1000", "proxy_cpu_seconds_per_1000"
READING = (CPU, RATE, FIRST, SERVER, HELPER, "epoch_cpu_seconds_per_1000", "epoch_images_per_second", "peak_bytes")
STARTING = (FIRST, "first_batch_cpu_seconds", "import_wall_seconds", "import_cpu_seconds")
MOST_SECONDS_AN_ARM = 900.0
BATCH, READING_EPOCHS = 64, 2
RATES = {"503": 0.01, "reset": 0.01, "short": 0.001}  # share of all requests


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One run of this benchmark."""

    arguments: argparse.Namespace
    store: Uploaded
    report: Path
    seeds: Iterator[int] = field(default_factory=itertools.count)  # each round draws other faults

    def arm(self, kind: str, url: str, *options: str, environment: dict[str, str]) -> Report:
        """Runs an arm; returns its report and the CPU time that the gateway's daemons used meanwhile."""
        given = ["--url", url, "--images", str(self.arguments.repeat_to), "--report", str(self.report)]
        before = self.store.cpu_seconds()
        command = [sys.executable, "-m", "benchmarks.s3_arms", kind, *given, *options]
        said = reported(command, self.report, seconds=MOST_SECONDS_AN_ARM, environment=environment)
        return said | {"gateway_cpu_seconds": self.store.cpu_seconds() - before}

    def part(self, names: Sequence[str], arm: Any, result: dict[str, Any], called: str) -> list[Round]:
        """Runs the arms of a part, and keeps the results after every round."""

        def keep(rounds: list[Round]) -> None:
            result[called] = rounds
            write(self.arguments.out, result)

        say(f"\n{called}")
        return in_turn(names, arm, rounds=self.arguments.rounds, keep=keep)


def main() -> None:
    """Prepares the datasets, starts the gateway, measures all arms, prints and keeps the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="folder of CLASS_anything.JPEG files")
    parser.add_argument("--work", type=Path, required=True, help="folder of the datasets, kept for the next run")
    parser.add_argument("--repeat-to", type=int, default=5120, help="number of images, a multiple of 64")
    parser.add_argument("--fault-epochs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    prepare(arguments.images, arguments.work, arguments.repeat_to, peers="", layouts=(PATCHLINE, SMALL_BLOCKS))
    datasets = [arguments.work / name for name in (PATCHLINE, SMALL_BLOCKS)]
    with tempfile.TemporaryDirectory() as folder, uploaded(datasets, Path(folder, "ceph")) as store:
        say("the gateway answers and has the datasets")
        result = measure(Bench(arguments=arguments, store=store, report=Path(folder, "report")))
    sys.stdout.write(f"\n{tables(result)}\n{aims_table(result['aims'])}")


def measure(bench: Bench) -> dict[str, Any]:
    """Measures all parts; returns the results, which are kept."""
    given = bench.arguments
    result: dict[str, Any] = {
        "command": "python -m benchmarks.s3 --images DIR --work DIR "
        f"--repeat-to {given.repeat_to} --rounds {given.rounds} --fault-epochs {given.fault_epochs} "
        "--out benchmarks/results/s3.json",
        "machine": machine(),
        "images": given.repeat_to,
        "fault_rates": RATES,
        "fault_epochs": given.fault_epochs,
        "fault_images_a_block": SMALL_BLOCK,
    }
    reading = bench.part([LOCAL, GATEWAY], lambda name: read(bench, name), result, "reading")
    faults = bench.part([LOCAL, PLAIN, FAULTS], lambda name: read_small(bench, name), result, "faults")
    places = [f"{where}, {place:.0%}" for where in (LOCAL, GATEWAY) for place in PLACES]
    place = position(bench)
    starts = bench.part(places, lambda name: start(bench, name, place), result, "starts")
    digests = [report["pixels_sha256"] for one in faults for report in one.values() if "pixels_sha256" in report]
    result |= {
        "versions": next(
            (report["versions"] for one in reading for report in one.values() if "versions" in report), {}
        ),
        "reading_arms": summary(reading, READING),
        "faults_arms": summary(faults, READING),
        "faults_traffic": traffic(faults),
        "starts_arms": summary(starts, STARTING),
        "identical_pixels": len(set(digests)) == 1 if digests else None,
        "aims": [aim.row() for aim in aims(reading, faults, starts)],
    }
    write(given.out, result)
    return result


def read(bench: Bench, name: str) -> Report:
    """Reads from a folder or directly from the gateway."""
    dataset = bench.arguments.work / PATCHLINE
    is_local = name == LOCAL
    url, environment = (str(dataset), {}) if is_local else (bench.store.url(dataset), bench.store.environment())
    said = bench.arm("epochs", url, "--epochs", str(READING_EPOCHS), environment=environment)
    return _per_image(said, READING_EPOCHS * bench.arguments.repeat_to)


def read_small(bench: Bench, name: str) -> Report:
    """Reads some epochs with many requests, and hashes every pixel."""
    dataset, num_epochs = bench.arguments.work / SMALL_BLOCKS, bench.arguments.fault_epochs
    options = ["--epochs", str(num_epochs), "--window-blocks", str(BATCH // SMALL_BLOCK), "--hash"]
    num_images = num_epochs * bench.arguments.repeat_to
    if name == LOCAL:
        return _per_image(bench.arm("epochs", str(dataset), *options, environment={}), num_images)
    rates = RATES if name == FAULTS else {}
    with faulty_proxy_process(bench.store.gateway.endpoint, rates=rates, seed=next(bench.seeds)) as proxy:
        environment = bench.store.environment(proxy.endpoint)
        said = bench.arm("epochs", bench.store.url(dataset), *options, environment=environment)
    said |= {"proxy_cpu_seconds": proxy.cpu_seconds, "injected": _named(proxy.counts)}
    return _per_image(said, num_images)


def _named(counts: dict[str, int]) -> dict[str, int]:
    """The proxy's counts of GETs by fault."""
    return {f"proxy_{fault or 'faultless'}": count for fault, count in counts.items()}


def _per_image(report: Report, num_images: int) -> Report:
    """The servers' CPU-seconds per 1,000 images, including start and end."""
    named = {SERVER: "gateway_cpu_seconds", HELPER: "proxy_cpu_seconds"}
    return report | {name: report[of] / num_images * 1000 for name, of in named.items() if of in report}


def position(bench: Bench) -> dict[str, Any]:
    """The position of a stream from which no batch has been taken."""
    found: dict[str, Any] = bench.arm("position", str(bench.arguments.work / PATCHLINE), environment={})
    return dict(found.get("position", {}))


def start(bench: Bench, name: str, place: dict[str, Any]) -> Report:
    """Takes the first batch at a position in the epoch, from a folder or the gateway."""
    where, _, share = name.partition(", ")
    step = max(1, round(bench.arguments.repeat_to // BATCH * float(share.rstrip("%")) / 100))
    dataset = bench.arguments.work / PATCHLINE
    options = ["--position", json.dumps(place | {"next_step": step, "data_step": step})]
    if where == LOCAL:
        return bench.arm("start", str(dataset), *options, environment={})
    return bench.arm("start", bench.store.url(dataset), *options, environment=bench.store.environment())


def traffic(rounds: list[Round]) -> dict[str, Report]:
    """What the loader counted and what the proxy injected, over all rounds."""
    found: dict[str, Report] = {}
    for one in rounds:
        for name, report in one.items():
            sums = found.setdefault(name, {})
            for count, value in (report.get("traffic", {}) | report.get("injected", {})).items():
                sums[count] = sums.get(count, 0) + value
    return found


def aims(reading: list[Round], faults: list[Round], starts: list[Round]) -> list[Aim]:
    """The aims of reading from S3."""
    found = [
        Aim(what="the loader's own CPU: S3 / folder", limit=1.1, found=ratios(reading, GATEWAY, LOCAL, CPU)),
        Aim(what="images/s: S3 / folder", limit=0.8, at_least=True, found=ratios(reading, GATEWAY, LOCAL, RATE)),
        Aim(
            what="images/s: with faults / without",
            limit=0.8,
            at_least=True,
            found=ratios(faults, FAULTS, PLAIN, RATE),
        ),
    ]
    for where in (LOCAL, GATEWAY):
        names = [f"{where}, {place:.0%}" for place in PLACES]
        middles = [spread(values(starts, name, FIRST))[1:2] for name in names]
        if all(middles):
            seconds = [middle[0] for middle in middles]
            what = f"first batch from {where}: slowest place / fastest"
            found.append(Aim(what=what, limit=1.2, found=[max(seconds) / min(seconds)]))
            found.append(Aim(what=f"first batch from {where}, s, slowest place", limit=1.0, found=[max(seconds)]))
    return found


def tables(result: dict[str, Any]) -> str:
    """All parts as Markdown."""
    titles = "| | CPU-s per 1,000 | images/s | first batch, s | servers: gateway, proxy, CPU-s per 1,000 |"
    rows = [titles, "|---|---|---|---|---|"]
    for part in ("reading_arms", "faults_arms"):
        for name, arm in result[part].items():
            cells = [f"{name}{', small blocks' if part == 'faults_arms' else ''}"]
            cells += [cell(arm[figure]) for figure in (CPU, RATE, FIRST)]
            rows.append(f"| {' | '.join(cells)} | {cell(arm[SERVER])}, {cell(arm[HELPER])} |")
    rows += ["", "| first batch | s | CPU-s | imports before it, s |", "|---|---|---|---|"]
    for name, arm in result["starts_arms"].items():
        cells = [cell(arm[figure]) for figure in (FIRST, "first_batch_cpu_seconds", "import_wall_seconds")]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    rows += ["", f"Every step, sample id and pixel identical in all arms: {result['identical_pixels']}"]
    rows += [f"{name}, all rounds: {counts}" for name, counts in result["faults_traffic"].items()]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
