"""The table fits every width, and no name can leave its line."""

import math
from typing import Any

import pytest

from jobs.reports.ls import RunRow, table_of
from pipeline.runs.facts import RunFacts

NOW = 1e9


def facts(**values: object) -> RunFacts:
    known = {"state": "running", "step": 1200, "loss": 0.5, "accuracy": 0.9, "images_per_second": 1234.5}
    more = {"goodput": 0.87, "last_seen": NOW - 3, "reasons": ()}
    return RunFacts(**{**known, **more, **values})  # type: ignore[arg-type]


def row(run: str = "a", *reasons: str, recipe: str = "digits_smoke +2", **values: object) -> RunRow:
    return RunRow(run=run, recipe=recipe, num_steps=4000, facts=facts(**values), reasons=reasons)


def test_a_line_per_run() -> None:
    rows = [row("lr-1e-3"), row("lr-3e-4", "step 8 is saved", state="failed", loss=math.nan, accuracy=None)]
    assert table_of(rows, now=NOW, columns=120).splitlines() == [
        "run      recipe           state           step    loss  accuracy  images/s  goodput     seen",
        "lr-1e-3  digits_smoke +2  running  1,200/4,000  0.5000     0.900     1,234      87%  3 s ago",
        "lr-3e-4  digits_smoke +2  failed   1,200/4,000     nan         -     1,234      87%  3 s ago",
        "    step 8 is saved",
    ]


def test_what_is_not_known() -> None:
    nothing: dict[str, Any] = dict.fromkeys(("step", "loss", "accuracy", "images_per_second", "goodput", "last_seen"))
    line = table_of([row(state="never started", **nothing)], now=NOW, columns=120).splitlines()[1]
    assert "  never started  " in line
    assert line.endswith("0/4,000     -         -         -        -     -")


@pytest.mark.parametrize("columns", [60, 80, 100, 160])
def test_no_line_is_longer_than_the_terminal(columns: int) -> None:
    long = row("sweep/" + "x" * 200, "y" * 500, recipe="vit_b16_i21k_augreg_medium1 +11", state="never started")
    lines = table_of([long, row()], now=NOW, columns=columns).splitlines()
    assert len(lines) == 6, "a long reason has three lines"
    assert max(map(len, lines)) <= columns
    assert ("goodput" in lines[0]) == (columns >= 100)
    assert lines[1].startswith("sweep")


def test_names_cannot_act() -> None:
    text = table_of([row("a\x1b[2J\nb", "c\nd\x1b")], now=NOW, columns=120)
    assert "\x1b" not in text
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize(
    ("seconds", "shown"), [(-5, "0 s ago"), (59, "59 s ago"), (61, "1 min ago"), (7300, "2 h ago"), (1e6, "11 d ago")]
)
def test_times(seconds: float, shown: str) -> None:
    assert table_of([row(last_seen=NOW - seconds)], now=NOW, columns=120).rstrip().endswith(f"  {shown}")
