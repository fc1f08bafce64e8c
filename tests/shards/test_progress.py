"""A log gets a line with count, share, rate and time left; a terminal gets a bar."""

import logging

import pytest

from shards.progress import Progress


def test_line_tells_count_rate_and_time_left() -> None:
    progress = Progress("scan", 200, unit="images", start=100)
    progress.advance(50, note="loss 1.2")
    line = progress.line()
    assert line.startswith("scan: 150/200 images (75 %), ")
    assert "images/s" in line
    assert line.endswith("s left loss 1.2")


def test_a_log_gets_the_last_line_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), Progress("pack", 3, unit="shards") as progress:
        for _ in range(3):
            progress.advance()
    assert [record.message.split(",")[0] for record in caplog.records] == ["pack: 3/3 shards (100 %)"]


def test_work_of_unknown_size_tells_count_and_rate() -> None:
    progress = Progress("list", 0, unit="entries")
    progress.advance(1500)
    assert progress.line().startswith("list: 1,500 entries, ")
