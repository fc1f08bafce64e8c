"""The speed of a training step: forward, backward and optimiser of our models and of timm's models, in bf16.

On a CPU: ViT-S/16 and ViT-B/16, eager and compiled. The arms take turns within one process, so that the two
measurements of a ratio are seconds apart. On a GPU: ViT-H/14 at 224 and 518 px, every arm in its own process, with the
share of the card's peak (MFU) and the memory. Commands (10 minutes on two cores; `--only "at 518, eager"` runs only the
cases whose names contain these words):

    python -m benchmarks.step --out benchmarks/results/step.json
    python -m benchmarks.step --device cuda --out benchmarks/results/step_gpu.json
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from benchmarks.rounds import Aim, Report, aims_table, cell, reported, say, spread, write

MOST_SECONDS = 1800.0
# Dense bf16 of an H100 or H200: from its data sheet, and as measured for large matrix products.
NOMINAL_TFLOPS, REACHABLE_TFLOPS = 989.0, 790.0
PEERS = ("timm", "timm, tanh")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model at a size, as every arm trains it. `separate`: one process per arm."""

    model: str
    image_size: int = 224
    batch: int
    compiled: bool
    arms: tuple[str, ...]
    separate: bool = False

    @property
    def name(self) -> str:
        """The name in tables."""
        return f"{self.model} at {self.image_size}, {'compiled' if self.compiled else 'eager'}"


ON_CPU = tuple(
    Case(model=model, batch=16, compiled=compiled, arms=("ours", *PEERS))
    for model in ("vit_s16", "vit_b16")
    for compiled in (False, True)
)
ON_GPU = tuple(
    Case(
        model="vit_h14", image_size=size, batch=batch, compiled=compiled, arms=("ours", "zero1", "timm"), separate=True
    )
    for size, batch in ((224, 128), (518, 32))
    for compiled in (False, True)
)


def main() -> None:
    """Measures all cases; prints and keeps the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=0, help="steps per round (default: 2 on a CPU, 20 on a GPU)")
    parser.add_argument("--only", default="", help="measure only cases whose names contain these words")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device, num_rounds = arguments.device, arguments.rounds
    steps = arguments.steps or (2 if device == "cpu" else 20)
    command = f"python -m benchmarks.step --device {device} --rounds {num_rounds} --steps {steps}"
    command += f" --out benchmarks/results/{arguments.out.name}" if arguments.out else ""
    command += f' --only "{arguments.only}"' if arguments.only else ""
    found: dict[str, Report] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(device, arguments.only):
            options = ["--device", device, "--rounds", str(num_rounds), "--steps", str(steps)]
            found[case.name] = measured(case, options, Path(folder, "report"))
            say(f"{case.name}: {_line(found[case.name])}")
            write(arguments.out, results(found, command=command))
    sys.stdout.write(f"\n{table(found)}\n{aims_table([aim.row() for aim in aims(found)])}")


def cases(device: str, words: str) -> list[Case]:
    """The cases of a device whose names contain these words. SystemExit with all names if there are none."""
    known = ON_CPU if device == "cpu" else ON_GPU
    chosen = [case for case in known if words in case.name]
    if not chosen:
        raise SystemExit(f"--only {words!r} is in none of: {'; '.join(case.name for case in known)}")
    return chosen


def measured(case: Case, options: Sequence[str], report: Path) -> Report:
    """Merges the reports of a case's processes."""
    groups = [[arm] for arm in case.arms] if case.separate else [list(case.arms)]
    merged: Report = {}
    for arms in groups:
        sizes = ["--image-size", str(case.image_size), "--batch", str(case.batch)]
        command = [sys.executable, "-m", "benchmarks.step_arms", "--model", case.model, *sizes, *options]
        command += ["--report", str(report), *(["--compiled"] if case.compiled else []), "--arms", *arms]
        said = reported(command, report, seconds=MOST_SECONDS, environment={})
        if "failed" in said:
            say(f"{case.name}, {', '.join(arms)}: {said['failed']}")
        for key, value in said.items():
            merged[key] = merged.get(key, {}) | value if isinstance(value, dict) else value
    return merged | {"batch": case.batch}


def results(found: dict[str, Report], *, command: str) -> dict[str, Any]:
    """The results as they are kept."""
    rows = [aim.row() for aim in aims(found)]
    return {"command": command, "machine": machine(), "cases": found, "aims": rows}


def aims(found: dict[str, Report]) -> list[Aim]:
    """The aims of a step: relative to timm on a CPU, absolute on a GPU."""
    rows = []
    for name, report in found.items():
        rates = report.get("images_per_second", {})
        for peer in PEERS:
            if peer in rates and "ours" in rates:
                ratios = [ours / theirs for ours, theirs in zip(rates["ours"], rates[peer], strict=True)]
                limit = 1.05 if name.endswith("compiled") else 1.0
                rows.append(Aim(what=f"{name}: images/s, ours / {peer}", limit=limit, found=ratios, at_least=True))
        if name == "vit_h14 at 224, compiled" and "zero1" in rates:
            rows.append(Aim(what=f"{name}: images/s under ZeRO-1", limit=450.0, found=rates["zero1"], at_least=True))
    return rows


def table(found: dict[str, Report]) -> str:
    """Every arm as Markdown. MFU is relative to the card's nominal peak; the next column to the highest rate that was
    measured."""
    rows = ["| | images/s | CPU-s per image | peak memory, GB | MFU | of 790 TFLOP/s |", "|---|---|---|---|---|---|"]
    for name, report in found.items():
        for arm, rates in report.get("images_per_second", {}).items():
            shares = ["-", "-"]
            if report["device"]:
                tera = statistics.median(rates) * report["train_flops_an_image"] / 1e12
                shares = [f"{tera / peak:.1%}" for peak in (NOMINAL_TFLOPS, REACHABLE_TFLOPS)]
            cpu = cell(spread(report["cpu_seconds_an_image"][arm]))
            gigabytes = f"{report['peak_bytes'][arm] / 1e9:.2f}"
            rows.append(f"| {name}: {arm} | {cell(spread(rates))} | {cpu} | {gigabytes} | {' | '.join(shares)} |")
    return "\n".join(rows) + "\n"


def _line(report: Report) -> str:
    rates = report.get("images_per_second", {})
    return ", ".join(f"{name} {statistics.median(values):.2f} images/s" for name, values in rates.items())


if __name__ == "__main__":
    main()
