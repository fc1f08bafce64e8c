"""A log gets lines with count, share, rate and time left; a terminal gets a live line that vanishes."""

import logging
from contextlib import suppress

import pytest

from shards.output.progress import Fact, Progress, as_live_line, as_log_line
from tests.rigs.screens import Screen

FACTS = [
    Fact(full="step 120/300", short="120/300", weight=3),
    Fact(full="learning rate 0.00097", short="lr 0.00097"),
    Fact(full="1,843 images/s", short="1,843 img/s", weight=2),
    Fact(full="2 min 31 s left", short="2:31 left", weight=3),
]


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        pytest.param(80, "step 120/300  learning rate 0.00097  1,843 images/s  2 min 31 s left", id="room for all"),
        pytest.param(60, "120/300  lr 0.00097  1,843 img/s  2:31 left", id="short"),
        pytest.param(34, "120/300  1,843 img/s  2:31 left", id="the lightest is gone, the others are short"),
        pytest.param(20, "120/300  2:31 left", id="and the next"),
        pytest.param(5, "120/3", id="no room for anything"),
    ],
)
def test_facts_that_fit(columns: int, line: str) -> None:
    assert as_live_line(FACTS, columns) == line


def test_no_facts_are_no_line() -> None:
    assert as_live_line([], 80) == ""
    assert as_live_line([Fact(full="", short=""), Fact(full="step 1", short="1")], 80) == "step 1"


def test_line_tells_count_rate_and_time_left() -> None:
    progress = Progress("scan", 200, unit="images")
    progress.advance(150, note="2 refused")
    line = as_log_line(progress.facts())
    assert line.startswith("scan: 150/200 images (75 %), ")
    assert "images/s" in line
    assert line.endswith(" left, 2 refused")


@pytest.mark.parametrize(
    ("seconds", "messages"),
    [(0.3, ["pack: 3 shards in 0.3 s, 0 faults"]), (0.06, ["pack: 3 shards in 0.1 s, 0 faults"]), (0.04, [])],
)
def test_a_log_gets_the_last_line_once_if_the_work_took_time(
    seconds: float, messages: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("shards.output.progress.time.monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO), Progress("pack", 3, unit="shards") as progress:
        for _ in range(3):
            progress.advance(note="0 faults")
        now[0] = seconds
    assert caplog.messages == messages


def test_nothing_is_said_of_work_that_says_its_result_itself(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), Progress("evaluate", 3, unit="images", says_end=False) as progress:
        progress.advance(3)
    assert caplog.records == []


def test_a_log_gets_a_line_every_30_seconds(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("shards.output.progress.time.monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO), Progress("pack", 100, unit="shards") as progress:
        for second in range(1, 100):
            now[0] = second
            progress.advance()
    counts = [record.message.split(" ")[1] for record in caplog.records]
    assert counts == ["30/100", "60/100", "90/100", "99"]
    assert caplog.records[0].message == "pack: 30/100 shards (30 %), 1.0 shards/s, 1:10 left"


def test_work_of_unknown_size_tells_count_and_rate() -> None:
    progress = Progress("list", 0, unit="entries")
    progress.advance(1500)
    assert as_log_line(progress.facts()).startswith("list: 1,500 entries, ")


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_terminal_gets_one_line_that_vanishes(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(columns)
    screen.take(monkeypatch)
    with Progress("verify", 4, unit="shards") as progress:
        progress.advance(note="no fault")
        (line,) = screen.read()
        assert line.startswith("verify: 1/4 shards")
        assert ("(25 %)" in line, "no fault" in line) == (columns > 40, columns > 40)
    assert screen.read() == [""]
    assert (screen.controls, screen.num_wrapped) == ("", 0)
    screen.close()


def test_work_that_fails_leaves_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(80)
    screen.take(monkeypatch)
    with suppress(ZeroDivisionError), Progress("verify", 4, unit="shards") as progress:
        progress.advance()
        _ = 1 / 0
    first, *rest = screen.read()
    assert first.startswith("verify: 1/4 shards (25 %)")
    assert rest == [""]
    screen.close()
