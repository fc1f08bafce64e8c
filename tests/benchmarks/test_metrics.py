"""The benchmark of metrics takes both arms in turn on one engine, and adds what rare steps cost."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.loop_arms import Setting, job_of
from benchmarks.metrics import measure, result_of
from pipeline.ranks.world import World
from pipeline.training.reporting.metrics import read_metrics
from tests.rigs.processes import one_world, run_ranks

SETTING = Setting(model="vit_tiny", precision="fp32", compiled=False, device="cpu", batch=4, rounds=5, steps=2)


def found_in(world: World, folder: Path, seconds: float) -> tuple[dict[str, Any], list[str], list[str]]:
    """What is measured, and the names in the last line of each arm."""
    with ExitStack() as stack:
        found = measure(SETTING, world, folder, stack, seconds=seconds)
    with_metrics, without = (list(read_metrics(folder / arm / "run")[-1]) for arm in ("with", "without"))
    return found, with_metrics, without


def test_both_arms_are_measured_in_every_pair(tmp_path: Path) -> None:
    ((found, with_metrics, without),) = run_ranks(found_in, tmp_path, 60.0, num_ranks=1)
    for figure in ("cpu_seconds", "wall_seconds"):
        assert {arm: len(values) for arm, values in found[figure].items()} == {"with": 5, "without": 5}
        assert min(value for values in found[figure].values() for value in values) > 0
    assert min(found[name] for name in ("own_seconds", "norms_seconds", "picture_seconds")) > 0
    assert "memory/resident_bytes" in with_metrics
    assert "memory/resident_bytes" not in without


def test_no_pair_begins_when_the_time_is_over(tmp_path: Path) -> None:
    ((found, *_),) = run_ranks(found_in, tmp_path, 0.0, num_ranks=1)
    assert [len(values) for values in found["cpu_seconds"].values()] == [1, 1]


@pytest.mark.parametrize(
    ("norms_seconds", "picture_seconds", "expected", "is_met"),
    [
        (0.01, 0.1, 0.001 + 0.0001 + 0.0001, True),
        (0.5, 0.1, 0.001 + 0.005 + 0.0001, False),  # every 100 steps, half a step more
        (0.01, 5.0, 0.001 + 0.0001 + 0.005, False),  # every 1000 steps, five steps more
    ],
)
def test_steps_that_are_due_are_shared_among_those_of_an_interval(
    norms_seconds: float, picture_seconds: float, expected: float, is_met: bool
) -> None:
    found = {
        "cpu_seconds": {"with": [1.001, 1.9, 1.001], "without": [1.0, 2.0, 1.0]},
        "wall_seconds": {"with": [1.0] * 3, "without": [1.0] * 3},
        "own_seconds": 0.001,
        "norms_seconds": norms_seconds,
        "picture_seconds": picture_seconds,
    }
    result = result_of(found, SETTING, job_of(SETTING, one_world()))
    assert result["every_steps"] == {"norms": 100, "picture": 1000}
    assert sum(result["shares"].values()) == pytest.approx(expected)
    assert result["pairs_ratio"][1] == 1.001
    inside, pairs = result["aims"]
    assert inside["met"] is pairs["met"] is is_met
    assert pairs["found"][1] == pytest.approx(expected + 1, abs=1e-4)
