"""The bar of a run's time sums to its wall time, and every restart has its cost."""

from dataclasses import replace

import pytest

from pipeline.runs.starts import Left, Start
from pipeline.runs.time import time_of
from pipeline.training.reporting.ledger import ACCOUNTS
from shards.files.local_files import Line


def line(at: float, attempt: str, **seconds: float) -> Line:
    return {"step": 5, "attempt": attempt, "unix_time": at, "seconds": dict.fromkeys(ACCOUNTS, 0.0) | seconds}


def start(at: float, attempt: str, *, startup: float, total: float, ranks: int = 1) -> Start:
    return Start(
        attempt=attempt,
        unix_time=at,
        startup_seconds=startup,
        total_seconds=total,
        resumed_from=None,
        num_ranks=ranks,
        zero_stage=1,
        device="cpu",
        left=Left(reached=7),
    )


def test_the_parts_sum_to_the_wall_time() -> None:
    starts = [
        start(101, "1", startup=1, total=1),  # killed before its first save
        start(121, "2", startup=1, total=1, ranks=2),
        start(152, "3", startup=4, total=32),
    ]
    lines = [line(140, "2", startup=3, compute=17), line(170, "3", startup=5, compute=33, restarts=11)]
    found = time_of(lines, starts, unix_end=175)
    assert found.wall_seconds == 75
    assert found.parts == {
        "compute": 33,
        "data_wait": 0,
        "checkpoint": 0,
        "evaluation": 0,
        "startup": 5,
        "restarts": 31,
        "unsaved": 5,
        "other": 1,
        "paused": 0,
    }
    assert [(one.seconds, one.startup_seconds) for one in found.restarts] == [(20, 3), (11, 2)]
    assert [bool(one.topology) for one in found.restarts] == [True, True]


def test_a_pause_is_no_lost_work() -> None:
    """A stop with its last step saved, 30 seconds before the next start, whose ledger has no line yet in one case."""
    left = Left(reached=5, attempt="1", phase="ended", step=5, asked_by="SIGINT")
    again = replace(start(145, "2", startup=6, total=42), resumed_from=5, left=left, paused_seconds=30)
    starts = [start(101, "1", startup=1, total=1), again]
    lines = [line(110, "1", startup=1, compute=9)]
    for more in ([], [line(150, "2", startup=6, compute=14, paused=30)]):
        found = time_of([*lines, *more], starts, unix_end=150)
        (restart,) = found.restarts
        assert (found.parts["restarts"], found.parts["paused"], found.wall_seconds) == (0, 30, 50)
        assert (found.running_seconds, restart.seconds, restart.lost_seconds) == (20, 30, 0)


def test_a_run_of_one_start_has_no_time_of_restarts() -> None:
    """What the accounts of its only start leave out is `other`, be it before its first line or after."""
    found = time_of([line(112, "1", startup=1, compute=9)], [start(101, "1", startup=1, total=1)], unix_end=112)
    assert (found.parts["restarts"], found.parts["other"], found.wall_seconds) == (0, 2, 12)


def test_the_start_up_of_a_start_that_saved_nothing_is_known_until_it_was_put_on_record() -> None:
    starts = [
        start(101, "1", startup=1, total=1),
        start(122, "2", startup=4, total=12),
        start(140, "3", startup=5, total=30),
    ]
    lines = [line(110, "1", startup=2, compute=8), line(150, "3", startup=6, compute=16, restarts=18)]
    assert [one.startup_seconds for one in time_of(lines, starts, unix_end=150).restarts] == [2, 4]


def test_nothing_is_known_of_a_run_that_never_started() -> None:
    assert time_of([], [], unix_end=9).wall_seconds == 0
    assert time_of([], [start(101, "1", startup=1, total=1)], unix_end=110).parts["unsaved"] == pytest.approx(10)
