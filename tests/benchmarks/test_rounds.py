"""The functions behind the benchmarks' tables."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.rounds import (
    Aim,
    Report,
    Round,
    aims_table,
    in_turn,
    measured,
    ratios,
    reported,
    spread,
    summary,
    values,
    write,
)


def test_arms_take_turns_and_the_first_round_is_not_counted() -> None:
    ran: list[str] = []
    kept: list[int] = []

    def arm(name: str) -> Report:
        ran.append(name)
        return {"seconds": float(len(ran))}

    rounds = in_turn("abc", arm, rounds=2, keep=lambda done: kept.append(len(done)))
    assert "".join(ran) == "abcbcacab"
    assert [list(one) for one in rounds] == [["a", "b", "c"]] * 2  # in the given order, whichever arm runs first
    assert [one["a"]["seconds"] for one in rounds] == [6.0, 8.0]
    assert kept == [1, 2]


ROUNDS: list[Round] = [
    {"ours": {"seconds": 1.0}, "peer": {"seconds": 3.0}},
    {"ours": {"failed": "KilledError"}, "peer": {"seconds": 5.0}},
    {"ours": {"seconds": 2.0}, "peer": {"seconds": 8.0}},
]


def test_a_failed_arm_costs_its_own_figures_only() -> None:
    assert values(ROUNDS, "peer", "seconds") == [3.0, 5.0, 8.0]
    assert values(ROUNDS, "ours", "seconds") == [1.0, 2.0]
    assert ratios(ROUNDS, "peer", "ours", "seconds") == [3.0, 4.0]
    found = summary(ROUNDS, ["seconds", "bytes"])
    assert found["ours"] == {"seconds": [1.25, 1.5, 1.75], "bytes": [], "failed_rounds": 1}
    assert found["peer"]["failed_rounds"] == 0


@pytest.mark.parametrize(
    ("found", "expected", "why"),
    [
        ([], [], "nothing measured"),
        ([2.0], [2.0, 2.0, 2.0], "one round"),
        ([5.0, 1.0, 4.0, 2.0, 3.0], [2.0, 3.0, 4.0], "quartiles of five"),
    ],
)
def test_spread(found: list[float], expected: list[float], why: str) -> None:
    assert spread(found) == expected, why


@pytest.mark.parametrize(
    ("found", "at_least", "met"),
    [
        ([1.0, 1.9, 9.0], False, True),
        ([2.1], False, False),
        ([2.1], True, True),
        ([1.9], True, False),
        ([], True, None),
    ],
)
def test_an_aim_is_met_by_the_median(found: list[float], at_least: bool, met: bool | None) -> None:
    row = Aim(what="x", limit=2.0, found=found, at_least=at_least).row()
    assert row["met"] is met
    assert "2" in row["aim"]
    assert "| x |" in aims_table([row])


def test_a_command_that_fails_says_so_without_its_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report"
    program = "import os; raise FileNotFoundError(os.getcwd())"
    assert measured([sys.executable, "-c", program], report, seconds=60) == {"failed": "FileNotFoundError"}
    assert "FileNotFoundError" in capsys.readouterr().err
    assert measured(["sleep", "60"], report, seconds=0.2) == {"failed": "ended with 124"}
    assert measured(["true"], report, seconds=60) == {"failed": "FileNotFoundError"}  # no report
    assert reported(["false"], report, seconds=60, environment={}) == {"failed": "ended with 1"}
    assert reported(["sleep", "60"], report, seconds=0.2, environment={}) == {"failed": "TimeoutExpired"}


def test_a_command_is_measured(tmp_path: Path) -> None:
    report = tmp_path / "report"
    program = f"open({str(report)!r}, 'w').write('{{\"said\": 1}}')"
    found = measured([sys.executable, "-c", program], report, seconds=60)
    assert found["said"] == 1
    assert found["whole_wall_seconds"] > 0


def test_results_are_kept(tmp_path: Path) -> None:
    write(tmp_path / "results" / "x.json", {"a": 1})
    write(None, {"a": 1})
    assert json.loads((tmp_path / "results" / "x.json").read_text()) == {"a": 1}
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["x.json"]
