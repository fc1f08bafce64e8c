"""The cost of a training step by how libgomp's threads wait, spinning or sleeping, on an idle and a busy machine.

Each arm is a run of digits_smoke in fp32 with two threads. The arms take turns; "busy" means that a process keeps half
of the cores fully loaded. All arms must end with the same weights, byte for byte. Command (a quarter of an hour, on an
otherwise idle machine):

    python -m benchmarks.threads --out benchmarks/results/threads.json
"""

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from benchmarks.rounds import cell, in_turn, spread, values, write
from pipeline.training.reporting.metrics import read_metrics

STEPS, COUNTED_FROM = 40, 5
# 300,000 is libgomp's default if neither variable is set. The command line sets "passive" by default.
SETTINGS = {
    "spinning (libgomp's own)": {"GOMP_SPINCOUNT": "300000"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "GOMP_SPINCOUNT=300": {"GOMP_SPINCOUNT": "300"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "PASSIVE, GOMP_SPINCOUNT=0": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
}
BUSY = {"idle": 0, "half of the cores taken": max(1, (os.cpu_count() or 2) // 2)}


def main() -> None:
    """Measures every setting, idle and busy; prints and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    names = [f"{where}: {setting}" for where in BUSY for setting in SETTINGS]
    command = f"python -m benchmarks.threads --rounds {arguments.rounds} --out benchmarks/results/threads.json"
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "digits"
        subprocess.run(_patchline("pack", "digits", "--out", str(data)), check=True, capture_output=True)
        rounds = in_turn(
            names, lambda name: arm(name, Path(folder), data), rounds=arguments.rounds, keep=lambda _: None
        )
    digests = {one[name].get("weights", "") for one in rounds for name in names}
    found = {name: spread(values(rounds, name, "steps_per_second")) for name in names}
    result = {"command": command, "machine": machine(), "steps_per_second": found, "same_weights": len(digests) == 1}
    write(arguments.out, result)
    sys.stdout.write(table(found) + f"same weights in every run: {'yes' if len(digests) == 1 else 'NO'}\n")


def arm(name: str, folder: Path, data: Path) -> dict[str, Any]:
    """Median steps per second of one run, and the digest of its weights."""
    where, setting = name.split(": ", 1)
    run_dir = Path(tempfile.mkdtemp(dir=folder))
    words = ["pretrain", "digits_smoke", "--data.url", str(data), "--run-dir", str(run_dir), "--steps", str(STEPS)]
    words += ["--schedule.warmup-steps", "4", "--engine.precision", "fp32", "--device", "cpu"]
    with busy(BUSY[where]):
        subprocess.run(_patchline(*words), env=os.environ | SETTINGS[setting], check=True, capture_output=True)
    lines = read_metrics(run_dir)
    rates = [line["images_per_second"] / 128 for line in lines if line["step"] > COUNTED_FROM]
    digest = hashlib.sha256((run_dir / "weights" / "model.safetensors").read_bytes()).hexdigest()
    return {"steps_per_second": statistics.harmonic_mean(rates), "weights": digest}


@contextmanager
def busy(num_processes: int) -> Iterator[list[int]]:
    """Starts processes that compute without end; their ids."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_processes)]
    try:
        yield [burner.pid for burner in burners]
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def table(found: dict[str, list[float]]) -> str:
    """Steps per second, one row per setting."""
    lines = [f"| steps/s (quartiles) | {' | '.join(BUSY)} |", "|---|---|---|"]
    for setting in SETTINGS:
        cells = (cell(found[f"{where}: {setting}"]) for where in BUSY)
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _patchline(*words: str) -> list[str]:
    return [sys.executable, "-m", "jobs.cli", *words]


if __name__ == "__main__":
    main()
