"""The checkpoint benchmark saves one state with every arm, and says which aims were met."""

import argparse
from typing import Any

import pytest

from benchmarks.checkpoint import aims_of, measured, table

NAMES = {
    *("memcpy", "patchline", "patchline, committed after", "patchline, sync"),
    *("deepspeed", "dcp save", "dcp async_save", "dcp async_save, done after"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All arms on two real ranks with a small state."""
    return measured(tmp_path_factory.mktemp("work"), argparse.Namespace(rounds=2, pairs=1, model="vit_ti16", ranks=2))


@pytest.mark.long
def test_every_arm_is_measured_in_every_round(found: dict[str, Any]) -> None:
    assert {name: len(seconds) for name, seconds in found["seconds"].items()} == dict.fromkeys(NAMES, 2)
    assert min(value for seconds in found["seconds"].values() for value in seconds) > 0
    assert all(f"| {name} |" in table(found) for name in NAMES)
    (pair,) = found["steps"]
    for arm in ("with", "without"):
        assert 0 < pair[arm]["cpu"] < pair[arm]["seconds"]
        assert 0 <= pair[arm]["without_core"] < pair[arm]["seconds"]
    assert len(found["resume_seconds"]) == 2
    assert found["rank_file_bytes"] == pytest.approx(12 * found["parameters"] / 2, rel=0.01)


def test_aims_compare_what_was_measured_in_the_same_round_or_pair() -> None:
    def steps(seconds: float, waited: float) -> dict[str, float]:
        return {"seconds": seconds, "cpu": seconds, "without_core": waited}

    found = {
        "seconds": {"memcpy": [1.0, 2.0, 4.0], "patchline": [1.2, 2.4, 4.8], "patchline, sync": [10.0] * 3},
        "steps": [{"with": steps(21.0, 2.0), "without": steps(20.0, 1.8)}] * 3,
    }
    stall, share, lost = [aim.row() for aim in aims_of(found)]
    assert (stall["found"][1], stall["met"]) == (1.2, True)
    assert (share["found"][1], share["met"]) == (0.1, False)
    assert (lost["found"][1], lost["met"]) == (0.02, True)
