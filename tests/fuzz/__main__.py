"""Fuzzes all readers for a given time, and writes what became of the cases to tests/fuzz/results/fuzz.json.

python -m tests.fuzz --seconds 3600 --seed 1

What fails is kept in tests/fuzz/cases/, one file for each way in which a reader fails.
"""

import argparse
import json
import logging
import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shards.output.progress import Progress
from tests.fuzz.campaign import Tally, child_of, fuzz, keep, valid_files
from tests.fuzz.cases import KEPT
from tests.fuzz.targets import TARGETS, Target

RESULT = Path(__file__).parent / "results" / "fuzz.json"
MOST_LISTED = 40  # outcomes of a reader
SLICE_SECONDS = 20.0


def main() -> int:
    """1 if any reader failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--readers", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    began = time.monotonic()
    targets = [TARGETS[name] for name in options.readers]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        root = valid_files(Path(folder) / "valid")
        tallies = _in_turn(targets, root, seed=options.seed, seconds=options.seconds)
    result = {
        "command": f"python -m tests.fuzz {shlex.join(sys.argv[1:])}".strip(),
        "commit": _commit(),
        "seed": options.seed,
        "seconds": round(time.monotonic() - began),
        "cases": sum(tally.num_cases for tally in tallies.values()),
        "failures": sum(len(tally.findings) for tally in tallies.values()),
        "readers": {name: _facts(tally) for name, tally in tallies.items()},
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(json.dumps({**result, "readers": len(tallies)}, indent=1) + "\n")
    return 1 if result["failures"] else 0


def _in_turn(targets: list[Target], root: Path, *, seed: int, seconds: float) -> dict[str, Tally]:
    """Each reader has the same time, some seconds at once; as many at a time as there are cores."""
    num_workers = len(os.sched_getaffinity(0))
    tallies = {target.name: Tally() for target in targets}
    num_rounds = max(1, round(seconds * num_workers / len(targets) / SLICE_SECONDS))
    slice_seconds = seconds * num_workers / len(targets) / num_rounds

    def run(target: Target) -> str:
        tally, end = tallies[target.name], time.monotonic() + slice_seconds
        with child_of(target, root, root.parent / target.name) as child:
            fuzz(child, tally, seed=seed, first=tally.num_cases, goes_on=lambda _: time.monotonic() < end)
        return target.name

    with (
        ThreadPoolExecutor(num_workers) as pool,
        Progress("fuzz", num_rounds * len(targets), unit="slices") as progress,
    ):
        for _ in range(num_rounds):
            for name in pool.map(run, targets):
                for finding in tallies[name].findings.values():  # at once: the campaign may be ended before its time
                    keep(finding, root / TARGETS[name].valid, KEPT)
                num_cases = sum(tally.num_cases for tally in tallies.values())
                num_findings = sum(len(tally.findings) for tally in tallies.values())
                progress.advance(note=f"{name}; {num_cases:,} cases, {num_findings} failures")
    return tallies


def _facts(tally: Tally) -> dict[str, Any]:
    return {
        "cases": tally.num_cases,
        "distinct_outcomes": len(tally.outcomes),
        "outcomes": dict(tally.outcomes.most_common(MOST_LISTED)),
        "failures": sorted(tally.findings),
        "failures_not_repeated": dict(tally.not_repeated),
    }


def _commit() -> str:
    """The checkout's commit; a plus sign if files differ from it."""
    words = ["git", "-C", str(Path(__file__).parent)]
    done = subprocess.run([*words, "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
