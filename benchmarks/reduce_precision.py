"""The error of reduced gradients in bf16 training, by precision of the reduction, ZeRO stage, accumulation and ranks.

Each case is one update of a tiny model on real gloo ranks, through the engine. The error is that of a tensor's gradient
as it reaches the optimiser, relative to its norm: against the exact sum of the same bf16 gradients of all micro-batches
(what the reduction adds), and against plain PyTorch in fp32 (what is left of it beside the rounding of the passes).
NCCL adds up in other orders than gloo. Command (a quarter of an hour on two cores):

    python -m benchmarks.reduce_precision --out benchmarks/results/reduce_precision.json
"""

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.measure import machine
from benchmarks.rounds import say, write
from jobs.recipes.pretrain import digits_smoke
from pipeline.models.config import ModelConfig
from pipeline.ranks.world import World
from pipeline.training.settings.job import OptimizerConfig, TrainingJob
from pipeline.training.zero.batch_plan import BatchPlan
from pipeline.training.zero.gradient_check import measure_gradients
from tests.rigs.processes import run_ranks

RANKS, STAGES, ACCUMULATIONS = (2, 4, 8, 16), (1, 2, 3), (1, 4)
PRECISIONS: tuple[Literal["bf16", "fp32"], ...] = ("bf16", "fp32")
MODEL = ModelConfig(
    name="vit", image_size=16, num_classes=10, patch=8, depth=2, width=32, mlp_width=64, num_heads=2, position_std=0.3
)
IMAGES = 2  # per micro-batch
Errors = dict[str, list[float]]


def main() -> None:
    """Measures all cases; prints and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cases: list[dict[str, Any]] = []
    for stage in STAGES:
        for accumulation in ACCUMULATIONS:
            for precision in PRECISIONS:
                for num_ranks in arguments.ranks:
                    cases.append(case(stage, accumulation, precision, num_ranks))
                    say(f"{cases[-1]}")
    command = "python -m benchmarks.reduce_precision --out benchmarks/results/reduce_precision.json"
    write(arguments.out, {"command": command, "machine": machine(), "cases": cases})
    sys.stdout.write(table(cases))


def case(stage: int, accumulation: int, precision: str, num_ranks: int) -> dict[str, Any]:
    """A row of the results: the median and the worst of all tensors' errors."""
    found: list[Errors] = run_ranks(errors, stage, accumulation, precision, num_ranks=num_ranks)
    row: dict[str, Any] = {"stage": stage, "accumulation": accumulation, "reduction": precision, "ranks": num_ranks}
    for against, name in (("bf16", "exact_sum"), ("fp32", "fp32_passes")):
        row[name] = [float(f"{value:.2g}") for value in (statistics.median(found[0][against]), max(found[0][against]))]
    return row


def errors(world: World, stage: Literal[1, 2, 3], accumulation: int, precision: Literal["bf16", "fp32"]) -> Errors:
    """Every tensor's error on this rank's group, by the precision of the passes that it is compared with."""
    found = measure_gradients(job(stage, precision), plan(accumulation, world.num_ranks), world)
    return {against: [error.error for error in found if error.against == against] for against in ("bf16", "fp32")}


def job(stage: Literal[1, 2, 3], precision: Literal["bf16", "fp32"]) -> TrainingJob:
    """A job whose engine computes in bf16 and reduces in `precision`."""
    smoke = digits_smoke()
    engine = replace(smoke.engine, zero_stage=stage, precision="bf16", reduce_precision=precision)
    return replace(smoke, model=MODEL, engine=engine, optimizer=OptimizerConfig(name="sgd", momentum=0.0))


def plan(accumulation: int, num_ranks: int) -> BatchPlan:
    """Micro-batches of a few images."""
    return BatchPlan(
        global_batch=IMAGES * accumulation * num_ranks,
        micro_batch=IMAGES,
        accumulation=accumulation,
        num_ranks=num_ranks,
    )


def table(cases: list[dict[str, Any]]) -> str:
    """Median errors against the exact sum, as Markdown: a row per engine, a column per number of ranks."""
    ranks = sorted({case["ranks"] for case in cases})
    rows = [f"| reduction | stage | accumulation | {' | '.join(f'{n} ranks' for n in ranks)} |"]
    rows.append("|" + "---|" * (3 + len(ranks)))
    errors_of = {(c["reduction"], c["stage"], c["accumulation"], c["ranks"]): c["exact_sum"][0] for c in cases}
    for reduction, stage, accumulation in dict.fromkeys(key[:3] for key in errors_of):
        cells = " | ".join(f"{errors_of[reduction, stage, accumulation, n]:.2g}" for n in ranks)
        rows.append(f"| {reduction} | {stage} | {accumulation} | {cells} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
