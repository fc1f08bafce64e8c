"""When time asks for a checkpoint: by a clock that the tests set."""

import logging

import pytest

from pipeline.checkpoints.config import CheckpointConfig, best_interval, mean_seconds_to_failure
from pipeline.training.controls import FIRST_SECONDS, SaveClock, words_of

EVERY_MINUTE, AUTO = CheckpointConfig(every_seconds=60), CheckpointConfig(auto_interval=True, failures_per_node_day=1.0)


class _Time:
    """A monotonic clock that stands still."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def now() -> _Time:
    return _Time()


def due_after(clock: SaveClock, now: _Time) -> float:
    """Seconds until the clock asks, a second at a time; infinity if it does not within a day."""
    began = now.seconds
    while not clock.is_due() and now.seconds < began + 86400:
        now.seconds += 1
    return now.seconds - began if clock.is_due() else float("inf")


def test_it_counts_from_the_start_and_from_each_save(now: _Time) -> None:
    clock = SaveClock(EVERY_MINUTE, decides=True, now=now)
    now.seconds += 500  # the start-up is not training
    clock.started()
    assert due_after(clock, now) == 60
    assert clock.is_due(), "until there is a save"
    clock.began()
    now.seconds += 30
    clock.began()  # by steps, or on request
    assert due_after(clock, now) == 60


@pytest.mark.parametrize(
    "clock",
    [
        pytest.param(SaveClock(EVERY_MINUTE, decides=False, now=_Time()), id="not the first rank"),
        pytest.param(SaveClock(CheckpointConfig(every_steps=10), decides=True, now=_Time()), id="only by steps"),
        pytest.param(SaveClock(), id="none"),
    ],
)
def test_otherwise_it_never_asks(clock: SaveClock) -> None:
    now = _Time()
    clock._now = now
    clock.started()
    now.seconds += 1e9
    assert not clock.is_due()


def test_auto_measures_first(now: _Time) -> None:
    clock = SaveClock(AUTO, num_nodes=4, decides=True, now=now)
    clock.started()
    assert due_after(clock, now) == FIRST_SECONDS
    clock.began()
    assert due_after(clock, now) > 5 * FIRST_SECONDS, "a commit under way is given time"
    clock.committed(stall_seconds=2.0, commit_seconds=30.0)
    mean = mean_seconds_to_failure(num_nodes=4, failures_per_node_day=1.0)
    assert clock.interval_seconds == best_interval(stall_seconds=2.0, commit_seconds=30.0, mean_seconds=mean)
    assert 250 < clock.interval_seconds < 310
    clock.began()
    assert due_after(clock, now) == pytest.approx(clock.interval_seconds, abs=1)


def test_a_slow_checkpoint_among_fast_ones_changes_nothing(now: _Time) -> None:
    clock = SaveClock(AUTO, decides=True, now=now)
    for stall in (1.0, 1.0, 1.0, 1.0):
        clock.committed(stall_seconds=stall, commit_seconds=stall)
    before = clock.interval_seconds
    clock.committed(stall_seconds=500.0, commit_seconds=500.0)
    assert clock.interval_seconds == before
    for _ in range(3):
        clock.committed(stall_seconds=100.0, commit_seconds=100.0)
    assert clock.interval_seconds > 5 * before, "the newest five count"


def test_the_interval_is_logged_when_it_is_known_and_when_it_changes_much(
    now: _Time, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = SaveClock(AUTO, num_nodes=4, decides=True, now=now)
    for stall in (2.0, 2.1, 1.9, 2.0, 2.0, 2.0, 2.1):
        clock.committed(stall_seconds=stall, commit_seconds=10.0)
    assert len(caplog.messages) == 1
    assert caplog.messages[0] == (
        "checkpoints every 4 min 53 s from now on: a checkpoint stalls training for 2.0 s and is committed after 10 s; "
        "4 nodes with 1 failures per node and day"
    )
    for _ in range(5):
        clock.committed(stall_seconds=20.0, commit_seconds=40.0)
    assert len(caplog.messages) == 2
    assert caplog.messages[1].startswith("checkpoints every 15 min ")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(CheckpointConfig(), "", id="the usual way"),
        pytest.param(
            CheckpointConfig(every_seconds=600), "checkpoints every 1,000 steps and every 10 min 0 s", id="both"
        ),
        pytest.param(
            CheckpointConfig(every_steps=0, auto_interval=True),
            "checkpoints by time: the first after 1 min 0 s, then at an interval computed from what it took",
            id="auto",
        ),
        pytest.param(
            CheckpointConfig(every_steps=0),
            "checkpoints at each new best score and at the end only, or on request (a signal, RUN/STOP, RUN/SAVE)",
            id="scores",
        ),
        pytest.param(
            CheckpointConfig(every_steps=0, keep_best=False),
            "checkpoints at the end only, or on request (a signal, RUN/STOP, RUN/SAVE)",
            id="the end",
        ),
    ],
)
def test_a_run_says_when_it_saves(config: CheckpointConfig, expected: str) -> None:
    assert words_of(config, is_scored=True) == expected
    assert "score" not in words_of(config, is_scored=False)
