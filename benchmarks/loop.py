"""Our training loop against a bare loop with PyTorch's DistributedDataParallel, and what our loop adds to a step.

Both train the same model from the same batches, with fp32 masters, AdamW and the same threads, on the same ranks; they
take turns within the same processes, so that the two measurements of a ratio are seconds apart. The bare loop reads
nothing, reports nothing and agrees on nothing. Ours is DeepSpeed's ZeRO-1 with everything of a step but the reading of
samples: learning rate, agreement on requests to stop, sums, metrics.jsonl and TensorBoard.

Overhead is the CPU time of a step of ours outside forward, backward and optimiser. On a GPU it is the time of the host
that the GPU does not see, so only the ratio counts there. Commands (10 minutes on two cores):

    python -m benchmarks.loop --out benchmarks/results/loop.json
    python -m benchmarks.loop --device cuda --ranks 8 --out benchmarks/results/loop_gpu.json
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from benchmarks.rounds import Aim, Report, aims_table, cell, reported, say, spread, write

MOST_SECONDS = 1800.0
LEAST_RATIO = 0.97
ARMS = ("ours", "ddp")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model in a precision, `batch` images per rank. `most_overhead`: the aim, as a share of a step."""

    model: str
    precision: str
    batch: int
    most_overhead: float
    compiled: bool = False

    @property
    def name(self) -> str:
        """The name in tables."""
        return f"{self.model}, {self.precision}, {self.batch} per rank{', compiled' if self.compiled else ''}"


ON_CPU = (
    Case(model="vit_s16", precision="fp32", batch=8, most_overhead=0.02),
    Case(model="vit_s16", precision="bf16", batch=8, most_overhead=0.02),
    Case(model="vit_ti4", precision="fp32", batch=32, most_overhead=0.05),
)
ON_GPU = tuple(
    Case(model=model, precision="bf16", batch=256, most_overhead=most, compiled=True)
    for model, most in (("vit_s16", 0.02), ("vit_b16", 0.02), ("vit_ti4", 0.05))
)


def main() -> None:
    """Measures all cases; prints and keeps the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="steps per round (default: 3 on a CPU, 20 on a GPU)")
    parser.add_argument("--batch", type=int, default=0, help="images per rank (default: each case's own)")
    parser.add_argument("--only", default="", help="measure only cases whose names contain these words")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    steps = arguments.steps or (3 if arguments.device == "cpu" else 20)
    options = ["--device", arguments.device, "--rounds", str(arguments.rounds), "--steps", str(steps)]
    command = f"python -m benchmarks.loop {' '.join(options)} --ranks {arguments.ranks} --batch {arguments.batch}"
    command += f' --only "{arguments.only}"' if arguments.only else ""
    found: dict[str, Report] = {}
    cases = ON_CPU if arguments.device == "cpu" else ON_GPU
    chosen = [replace(case, batch=arguments.batch or case.batch) for case in cases if arguments.only in case.name]
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen:
            found[case.name] = measured(case, options, Path(folder, "report"), num_ranks=arguments.ranks)
            say(f"{case.name}: {found[case.name].get('failed') or 'done'}")
            rows = [aim.row() for aim in aims(found, chosen)]
            write(arguments.out, {"command": command, "machine": machine(), "cases": found, "aims": rows})
    sys.stdout.write(f"\n{table(found)}\n{aims_table([aim.row() for aim in aims(found, chosen)])}")


def measured(case: Case, options: Sequence[str], report: Path, *, num_ranks: int) -> Report:
    """A case on its ranks, started as torchrun starts them."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [*launch, "-m", "benchmarks.loop_arms", "--model", case.model, "--precision", case.precision]
    command += ["--batch", str(case.batch), *(["--compiled"] if case.compiled else []), *options]
    return reported([*command, "--report", str(report)], report, seconds=MOST_SECONDS, environment={})


def ratios(report: Report, figure: str) -> list[float]:
    """Ours divided by the bare loop's, round by round."""
    values: dict[str, list[float]] = report.get(figure, {})
    return [ours / bare for ours, bare in zip(values.get("ours", []), values.get("ddp", []), strict=True)]


def aims(found: dict[str, Report], chosen: Sequence[Case]) -> list[Aim]:
    """The aims of the loop: its speed beside the bare loop's, and its overhead."""
    rows = []
    for case in chosen:
        report = found.get(case.name, {})
        if not case.model.startswith("vit_ti"):
            what = f"{case.name}: images/s, ours / bare DDP"
            rows.append(Aim(what=what, limit=LEAST_RATIO, found=ratios(report, "images_per_second"), at_least=True))
            # The same where other processes share the cores: seconds then say more about those than about the loop.
            work = [1 / ratio for ratio in ratios(report, "cpu_seconds_an_image")]
            what = f"{case.name}: CPU-seconds per image, bare DDP / ours"
            rows.append(Aim(what=what, limit=LEAST_RATIO, found=work, at_least=True))
        what = f"{case.name}: share of a step outside forward, backward, optimiser"
        rows.append(Aim(what=what, limit=case.most_overhead, found=report.get("overhead", [])))
    return rows


def table(found: dict[str, Report]) -> str:
    """Every arm as Markdown."""
    rows = ["| | images/s, all ranks | CPU-s per image | first loss |", "|---|---|---|---|"]
    for name, report in found.items():
        for arm in ARMS if "images_per_second" in report else ():
            rates, cpu = (report[figure][arm] for figure in ("images_per_second", "cpu_seconds_an_image"))
            figures: list[Any] = [cell(spread(rates)), cell(spread(cpu)), f"{report['first_losses'][arm]:.4f}"]
            rows.append(f"| {name}: {arm} | {' | '.join(figures)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
