"""`make test-flaky`: the busy loops beside the gate, and the row of its runs."""

import json
import time
from pathlib import Path

import pytest

from tests.long import load
from tests.long.load import busy_loops
from tests.rigs.ends import OWN

DEADLINE_SECONDS = 60.0


def test_busy_loops_compute_until_the_block_ends() -> None:
    before = {process.identity for process in OWN.living()}
    with busy_loops(2):
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            loops = [process for process in OWN.living() if process.identity not in before]
            if len(loops) == 2 and all(process.cpu_seconds > 0.2 for process in loops):
                break
            assert time.monotonic() < deadline, loops
    assert {process.identity for process in OWN.living()} <= before


@pytest.mark.parametrize(
    ("kept", "again", "codes"),
    [
        ([], [0, 0, 0], [0, 0, 0]),
        ([0, 0], [0], [0, 0, 0]),  # an earlier call was interrupted
        ([0, 1], [0, 0, 0], [0, 0, 0]),  # a failure ended the row
        ([0, 0, 0], [0, 1], [0, 1]),  # a whole row is history
    ],
)
def test_a_row_goes_on_until_it_is_whole_or_a_run_fails(
    kept: list[int], again: list[int], codes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "load.json"
    results.write_text(json.dumps({"load": 2, "runs": [{"exit_code": code} for code in kept]}))
    outcomes = iter(again)
    monkeypatch.setattr(load, "RESULTS", results)
    monkeypatch.setattr(load, "one_run", lambda _: {"exit_code": next(outcomes)})
    monkeypatch.setattr("sys.argv", ["load", "--times", "3", "--load", "2"])
    assert load.main() == int(1 in codes)
    assert [run["exit_code"] for run in json.loads(results.read_text())["runs"]] == codes
    assert next(outcomes, None) is None
