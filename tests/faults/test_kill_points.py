"""Runs that lose all processes, a rank or a writer at random moments end like unbroken ones.

With dropout, mixup and EMA. Three kills for each ZeRO stage and optimiser; `make soak` has thirty.
"""

import random
from pathlib import Path

import pytest

from tests.rigs.kill_points import COMBINATIONS, VICTIMS, KilledRun, unbroken, words_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("stage", "optimizer"), COMBINATIONS)
def test_a_killed_run_ends_like_the_unbroken_one(digits_url: str, tmp_path: Path, stage: int, optimizer: str) -> None:
    expected = unbroken(digits_url, tmp_path / "unbroken", stage, optimizer)
    run_dir = tmp_path / "run"
    killed = KilledRun(
        words=words_of(digits_url, run_dir, stage, optimizer), run_dir=run_dir, draw=random.Random(stage)
    )
    for victim in VICTIMS:  # the writer's kill comes last: the run goes on to its end
        killed.kill(victim)
    killed.finish(expected)
    assert killed.faults == []
    assert killed.kills, "the run ended before every kill"
