"""The cost of finding out which samples a batch has: our order, and MosaicML's partition and py1e shuffle.

Ours at 303 million samples (JFT-300M) in blocks of 64: the first batch of 4,096 at step 500,000, with nothing computed
before, on one core. In the same run, ours and MosaicML's at 10 million samples and the same step. Each arm runs in its
own process, one after another, in an order that rotates from round to round. Imports and the first round are not
counted. Command (two minutes):

    python -m benchmarks.order --out benchmarks/results/order.json
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from benchmarks.order_arms import ARMS, BATCH, BLOCK, LARGE, MEDIUM, OURS, PEER, STEP
from benchmarks.rounds import Aim, Report, Round, aims_table, cell, in_turn, measured, ratios, summary, values, write

FIGURES = ("cpu_seconds", "wall_seconds", "peak_bytes", "added_bytes", "import_cpu_seconds")
ONE_THREAD = ("OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1")  # before numpy is loaded
MOST_SECONDS_AN_ARM = 300.0


def main() -> None:
    """Measures all arms; prints and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", default=".venv-bench/bin/python", help="a Python that has the peers")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")

        def arm(name: str) -> Report:
            python = arguments.peers if name.startswith(PEER) else sys.executable
            command = [python, "-m", "benchmarks.order_arms", name, "--report", str(report)]
            return measured(["env", *ONE_THREAD, *command], report, seconds=MOST_SECONDS_AN_ARM)

        def keep(rounds: list[Round]) -> None:
            write(arguments.out, results(rounds, arguments.rounds))

        rounds = in_turn(list(ARMS), arm, rounds=arguments.rounds, keep=keep)
    result = results(rounds, arguments.rounds)
    sys.stdout.write(f"\n{table(result['arms'])}\n{aims_table(result['aims'])}")


def results(rounds: list[Round], num_rounds: int) -> dict[str, Any]:
    """The results as they are kept."""
    return {
        "command": f"python -m benchmarks.order --rounds {num_rounds} --out benchmarks/results/order.json",
        "machine": machine(),
        "step": STEP,
        "batch": BATCH,
        "samples_a_block": BLOCK,
        "arms": summary(rounds, FIGURES),
        "aims": [aim.row() for aim in aims(rounds)],
        "rounds": rounds,
    }


def aims(rounds: list[Round]) -> list[Aim]:
    """The order's aims."""
    large, ours, peer = f"{OURS}, {LARGE:,}", f"{OURS}, {MEDIUM:,}", f"{PEER}, {MEDIUM:,}"
    megabytes = [value / 1e6 for value in values(rounds, large, "peak_bytes")]
    return [
        Aim(what=f"seconds to the batch, {LARGE:,} samples", limit=2.0, found=values(rounds, large, "wall_seconds")),
        Aim(what=f"peak memory, MB, {LARGE:,} samples", limit=500.0, found=megabytes),
        Aim(
            what=f"time: ours / MosaicML, {MEDIUM:,} samples",
            limit=0.1,
            found=ratios(rounds, ours, peer, "wall_seconds"),
        ),
        Aim(
            what=f"CPU: ours / MosaicML, {MEDIUM:,} samples", limit=0.1, found=ratios(rounds, ours, peer, "cpu_seconds")
        ),
    ]


def table(arms: dict[str, Report]) -> str:
    """The arms as Markdown."""
    rows = ["| | s | CPU-s | peak memory, MB | added by the task, MB |", "|---|---|---|---|---|"]
    for name, arm in arms.items():
        sizes = [[value / 1e6 for value in arm[figure]] for figure in ("peak_bytes", "added_bytes")]
        cells = [cell(arm["wall_seconds"]), cell(arm["cpu_seconds"]), *map(cell, sizes)]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
