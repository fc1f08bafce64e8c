"""The benchmark of packing records the command that repeats it."""

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.packing import command_of
from benchmarks.packing_arms import ARMS

BARE = "python -m benchmarks.packing --data DIR --scratch DIR --images 10 --rounds 2"


@pytest.mark.parametrize(
    ("arms", "out", "more"),
    [
        pytest.param(list(ARMS), None, "", id="all arms, only on the screen"),
        pytest.param(list(ARMS), Path("results/other.json"), " --out results/other.json", id="the file that it wrote"),
        pytest.param(["patchline, 1 worker"], None, " --arms 'patchline, 1 worker'", id="one arm, quoted"),
    ],
)
def test_the_command_has_what_differs_from_the_defaults(arms: list[str], out: Path | None, more: str) -> None:
    assert command_of(Namespace(images=10, rounds=2, arms=arms, out=out)) == BARE + more
