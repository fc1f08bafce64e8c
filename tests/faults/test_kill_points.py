"""Runs that lose all processes, a rank or a writer at random moments end like unbroken ones.

With dropout, mixup and EMA. One kill under ZeRO-3 in the gate, three for each stage and optimiser in the long part;
`make soak` has thirty.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.rigs.kill_points import COMBINATIONS, VICTIMS, KilledRun, Victim, unbroken, words_of

pytestmark = pytest.mark.slow


def killed(url: str, folder: Path, stage: int, optimizer: str, victims: Sequence[Victim]) -> KilledRun:
    """A run that has lost each victim in turn and was then continued to its end, compared with the unbroken run."""
    expected = unbroken(url, folder / "unbroken", stage, optimizer)
    words = words_of(url, folder / "run", stage, optimizer)
    run = KilledRun(words=words, run_dir=folder / "run", draw=random.Random(stage))
    for victim in victims:  # the writer's kill comes last: the run goes on to its end
        run.kill(victim)
    run.finish(expected)
    return run


@pytest.mark.parametrize(
    ("stage", "optimizer", "victim"),
    [
        pytest.param(1, "adamw", "all", marks=pytest.mark.long),
        pytest.param(2, "sgd", "rank", marks=pytest.mark.long),
        (3, "adamw", "all"),
    ],
)
def test_a_run_killed_once_ends_like_the_unbroken_one(
    digits_url: str, tmp_path: Path, stage: int, optimizer: str, victim: Victim
) -> None:
    run = killed(digits_url, tmp_path, stage, optimizer, [victim])
    assert run.faults == []
    assert len(run.kills) == 1, "the run ended before the kill"


@pytest.mark.long
@pytest.mark.parametrize(("stage", "optimizer"), COMBINATIONS)
def test_a_run_killed_again_and_again_ends_like_the_unbroken_one(
    digits_url: str, tmp_path: Path, stage: int, optimizer: str
) -> None:
    run = killed(digits_url, tmp_path, stage, optimizer, VICTIMS)
    assert run.faults == []
    assert run.kills, "the run ended before every kill"
