"""Which differences are allowed: none on the same topology, rounding on another one."""

import math
from pathlib import Path

import pytest

from jobs.train.resume_verdict import ROUNDING, ResumeOutcome, rounding_of
from pipeline.runs.comparison import CheckpointComparison, LossDifference, TensorDifference

A_TENSOR = TensorDifference(
    step=8, slot="master", name="head.bias", relative=0.25, num_elements=2, element=1, expected=1.0, found=1.5
)


def outcome(*losses: tuple[float | None, float | None], limit: float = 0.0, num_different: int = 0) -> ResumeOutcome:
    """Of a run of 10 steps; `losses`: those of steps 5, 6, ... that differ."""
    tensor = A_TENSOR if num_different else None
    pairs = [LossDifference(step=5 + at, expected=one, found=other) for at, (one, other) in enumerate(losses)]
    return ResumeOutcome(
        title="2 ranks, ZeRO-1",
        kills=("after step 6",),
        continued_from=(4,),
        limit=limit,
        num_losses=10,
        losses=tuple(pairs),
        checkpoint_steps=(4, 8),
        checkpoint=CheckpointComparison(
            step=8, num_tensors=30, num_different=num_different, first=tensor, largest=tensor
        ),
    )


@pytest.mark.parametrize(
    ("one", "is_right", "is_exact", "first_above"),
    [
        pytest.param(outcome(), True, True, None, id="the same"),
        pytest.param(outcome((1.0, 1.0 + 2**-52)), False, False, 5, id="a bit of a loss"),
        pytest.param(outcome(num_different=1), False, False, None, id="a tensor"),
        pytest.param(outcome((1.0, 1.0 + 1e-6), limit=1e-5, num_different=9), True, False, None, id="rounding"),
        pytest.param(outcome((1.0, 1.0 + 1e-6), (1.0, 1.1), limit=1e-5), False, False, 6, id="above rounding"),
        pytest.param(outcome((1.0, math.nan), limit=1e-5), False, False, 5, id="not finite"),
        pytest.param(outcome((1.0, None), limit=1e-2), False, False, 5, id="a missing step"),
        pytest.param(outcome((0.0, -0.0)), False, False, None, id="a sign of zero"),
    ],
)
def test_what_is_right(one: ResumeOutcome, is_right: bool, is_exact: bool, first_above: int | None) -> None:
    assert (one.is_right, one.is_exact) == (is_right, is_exact)
    assert (one.first_above.step if one.first_above else None) == first_above


@pytest.mark.parametrize(
    ("losses", "limit"),
    [
        pytest.param([], 1e-5, id="the same losses"),
        pytest.param([(1.0, 1.0 - 1e-6)], 1e-5, id="less apart than rounding"),
        pytest.param([(1.0, 0.75), (1.0, 1.0 - 1e-6)], 1.0, id="four times the largest"),
        pytest.param([(1.0, 0.75), (1.0, math.nan), (2.0, None)], 1.0, id="one that diverged allows no other to"),
        pytest.param([(math.inf, 2.0)], 1e-5, id="none is finite"),
    ],
)
def test_what_unbroken_runs_differ_by_is_rounding(losses: list[tuple[float, float | None]], limit: float) -> None:
    pairs = [LossDifference(step=at, expected=one, found=other) for at, (one, other) in enumerate(losses)]
    assert rounding_of("fp32", pairs) == pytest.approx(limit)


def test_the_tolerance_in_fp32_is_that_of_the_test_of_elastic_continuation() -> None:
    text = (Path(__file__).parents[2] / "pipeline" / "training" / "test_elastic.py").read_text()
    assert ROUNDING["fp32"] == 1e-5
    assert "rel=1e-5" in text
