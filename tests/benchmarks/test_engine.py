"""The benchmark of engines counts what its arms send and wait for: the bytes are those of the arithmetic."""

import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from benchmarks.engine import aims, compared, figures_of, name_of, tables
from benchmarks.engine_arms import measured, num_parameters
from tests.rigs.forks import forks

RANKS, BLOCKS = 8, 2
GATHER, REDUCE = (RANKS - 1) / RANKS, 2 * (RANKS - 1) / RANKS  # of the bytes, in a ring
FP32, BF16 = 4, 2


@pytest.mark.parametrize(
    ("arm", "stage", "bytes_per_parameter", "waits"),
    [
        ("model", 1, 0, set()),
        ("ours", 1, FP32 * REDUCE + BF16 * GATHER, set()),
        ("deepspeed", 1, FP32 * REDUCE + BF16 * GATHER, {"timer.py:start", "timer.py:stop"}),
        ("ddp", 1, BF16 * REDUCE, set()),
        ("fsdp2", 1, FP32 * GATHER + BF16 * GATHER, set()),
    ],
)
def test_an_arm_sends_the_bytes_of_the_arithmetic(
    arm: str, stage: int, bytes_per_parameter: float, waits: set[str]
) -> None:
    """`waits`: some functions that wait for the device; empty: there are none."""
    with ProcessPoolExecutor(1, mp_context=forks()) as pool:
        found = pool.submit(counted, arm, stage).result(60)
    sent = bytes_per_parameter * num_parameters(BLOCKS)
    assert sent <= found["sent_bytes"] <= 1.05 * sent + 200, "partitions are padded, and norms are summed"
    assert 0 < found["launches"] < found["operations"], "views launch nothing"
    assert set(found["waits"]) >= waits
    assert bool(found["waits"]) == bool(waits)


def counted(arm: str, stage: int) -> dict[str, Any]:
    """What was counted in a step of an arm."""
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(RANKS)})
    return measured(arm, stage, RANKS, num_steps=2, num_blocks=BLOCKS)


def test_aims_compare_what_the_arms_add_to_the_passes_of_the_model() -> None:
    counts = {"launches": 1, "operations": 2, "collectives": 3, "sent_bytes": 40.0, "waits": {"step.py:read": 1}}
    times = {("model", 1): 30.0, ("ours", 1): 34.0, ("before", 1): 50.0, ("ddp", 1): 32.0}
    one_round = {name_of(*arm, 8): {"milliseconds": time, **counts} for arm, time in times.items()}
    rows = {row["what"]: row for row in (aim.row() for aim in aims([one_round]))}
    of_before = rows["ours, stage 1, 8 ranks: ms beyond the model's passes, ours / before"]
    assert (of_before["found"][1], of_before["met"]) == (0.2, True)
    assert rows["ours, stage 1, 8 ranks: ms, ours / ddp"]["found"][1] == pytest.approx(34 / 32, abs=1e-3)
    assert rows["ours, stage 1, 8 ranks: waits for the device"]["met"] is False
    assert rows["ours, stage 3, 8 ranks: ms, ours / fsdp2"]["met"] is None
    losses = compared({"ours, stage 1": [2.0, 1.0], "ddp": [2.0, 1.1]})
    assert (losses["ours, stage 1"]["equal_steps"], losses["ddp"]["equal_steps"]) == (2, 1)
    text = tables({"figures": figures_of([one_round], 10), "losses": losses, "aims": list(rows.values())})
    assert "| ours, stage 1, 8 ranks | 34 (34 to 34) | 4 (4 to 4) | 1 | 3 | 4.00 | 1 |" in text
