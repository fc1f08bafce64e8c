"""Reduction in fp32: its error does not grow with the number of ranks; in bf16 it does."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reduce_precision import ACCUMULATIONS, PRECISIONS, RANKS, STAGES, errors, table
from pipeline.ranks.world import World
from tests.rigs.processes import run_ranks

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "reduce_precision.json"
WAYS = ((2, 1), (1, 4))  # (stage, accumulation); the second sums whole gradients in fp32


def medians(world: World) -> dict[str, float]:
    """The median error of all tensors against the exact sum, for every way and precision."""
    return {
        f"{stage} {accumulation} {precision}": statistics.median(errors(world, stage, accumulation, precision)["bf16"])  # type: ignore[arg-type]
        for stage, accumulation in WAYS
        for precision in PRECISIONS
    }


@pytest.mark.long
def test_only_the_error_of_bf16_grows_with_the_ranks() -> None:
    of_two, of_four = (run_ranks(medians, num_ranks=num_ranks)[0] for num_ranks in (2, 4))
    for way in ("2 1", "1 4"):
        assert of_four[f"{way} bf16"] > 1.2 * of_two[f"{way} bf16"] > 0.001
        assert of_four[f"{way} fp32"] < 1.05 * of_two[f"{way} fp32"] + 1e-6
    assert of_four["2 1 fp32"] < 0.0025, "one rounding to bf16"
    assert of_four["1 4 fp32"] < 1e-6, "kept in fp32 from the passes to the optimiser"


def kept(**wanted: object) -> dict[str, Any]:
    """The case of the committed results with these values."""
    cases = json.loads(RESULTS.read_text())["cases"]
    (case,) = [case for case in cases if all(case[name] == value for name, value in wanted.items())]
    return dict(case)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_the_default_is_the_one_that_the_results_show(stage: int, accumulation: int) -> None:
    few, many = (
        {p: kept(stage=stage, accumulation=accumulation, reduction=p, ranks=n)["exact_sum"][0] for p in PRECISIONS}
        for n in (RANKS[0], RANKS[-1])
    )
    assert many["bf16"] > 2 * few["bf16"]
    assert many["fp32"] <= few["fp32"] < many["bf16"]


def test_the_table_has_a_row_per_engine() -> None:
    rows = table(json.loads(RESULTS.read_text())["cases"]).splitlines()
    assert len(rows) == 2 + len(PRECISIONS) * len(STAGES) * len(ACCUMULATIONS)
    assert rows[2] == "| bf16 | 1 | 1 | 0.0018 | 0.0027 | 0.0037 | 0.005 |"
