"""The state of a run from what stands in its folder."""

import pytest

from pipeline.runs.facts import STATES, LastBeat, LastStart, Signs, state_of
from pipeline.training.watchdog.heartbeat_files import Phase, Place


def beat(
    phase: Phase, *, step: int = 9, age: float = 3.0, is_gone: bool = False, is_hanging: bool = False, error: str = ""
) -> LastBeat:
    place = Place(phase=phase, step=step)
    return LastBeat(place=place, age_seconds=age, is_gone=is_gone, is_hanging=is_hanging, error=error)


def start(is_there: bool | None, *, age: float = 5.0) -> LastStart:
    return LastStart(attempt="1", host="node7", age_seconds=age, is_there=is_there)


COMPUTING, ENDED, STARTING = Phase.COMPUTING, Phase.ENDED, Phase.STARTING


@pytest.mark.parametrize(
    ("signs", "state", "reason"),
    [
        pytest.param(Signs(num_steps=16), "never started", "", id="only a record"),
        pytest.param(Signs(), "never started", "", id="nothing at all"),
        pytest.param(Signs(has_attempts=True), "failed", "ended before its first step", id="killed as it started"),
        pytest.param(Signs(num_steps=16, done_step=16), "done", "", id="done"),
        pytest.param(Signs(done_step=16), "done", "", id="done, and its record is damaged"),
        pytest.param(
            Signs(num_steps=32, done_step=16, saved_step=16, beat=beat(COMPUTING)), "running", "", id="extended"
        ),
        pytest.param(
            Signs(num_steps=32, done_step=16, saved_step=20, beat=beat(ENDED, step=20)), "stopped", "", id="and stopped"
        ),
        pytest.param(Signs(num_steps=16, saved_step=8, beat=beat(COMPUTING)), "running", "", id="in a step"),
        pytest.param(Signs(beat=beat(STARTING, step=0)), "running", "", id="starting"),
        pytest.param(Signs(saved_step=9, beat=beat(ENDED)), "stopped", "", id="saved the step that it ended with"),
        pytest.param(
            Signs(saved_step=8, beat=beat(ENDED)), "failed", "ended in step 9; step 8 is saved", id="an error"
        ),
        pytest.param(
            Signs(saved_step=8, beat=beat(ENDED, step=0)),
            "failed",
            "ended before its first step; step 8 is saved",
            id="an error as it resumed",
        ),
        pytest.param(Signs(beat=beat(ENDED)), "failed", "nothing is saved", id="an error before the first save"),
        pytest.param(
            Signs(beat=beat(COMPUTING, age=90)), "failed", "no heartbeat for 1 min 30 s, last in step 9", id="silent"
        ),
        pytest.param(Signs(beat=beat(COMPUTING, age=30)), "running", "", id="not silent for long"),
        pytest.param(
            Signs(beat=beat(COMPUTING, age=30, is_gone=True)), "failed", "its process is gone", id="killed on this host"
        ),
        pytest.param(Signs(beat=beat(COMPUTING, age=5, is_gone=True)), "running", "", id="a container beside this one"),
        pytest.param(Signs(beat=beat(COMPUTING, is_hanging=True)), "failed", "hung in step 9", id="hung"),
        pytest.param(Signs(told_step=9, quiet_seconds=10), "running", "", id="without heartbeats, or before the first"),
        pytest.param(Signs(start=start(True)), "running", "", id="on this host, before its first heartbeat"),
        pytest.param(Signs(start=start(True), quiet_seconds=999, told_step=1), "running", "", id="without heartbeats"),
        pytest.param(
            Signs(start=start(True), beat=beat(COMPUTING, age=90)), "running", "perhaps suspended", id="suspended"
        ),
        pytest.param(
            Signs(start=start(True), beat=beat(COMPUTING, is_hanging=True)), "failed", "hung in step 9", id="hung here"
        ),
        pytest.param(
            Signs(start=start(False), told_step=3, quiet_seconds=1),
            "failed",
            "its process is gone, before its first heartbeat; nothing is saved",
            id="killed before its first heartbeat",
        ),
        pytest.param(
            Signs(start=start(False), beat=beat(COMPUTING)), "failed", "gone, last in step 9", id="killed a moment ago"
        ),
        pytest.param(
            Signs(start=start(False), beat=beat(ENDED), saved_step=9, quiet_seconds=1), "stopped", "", id="stopped here"
        ),
        pytest.param(
            Signs(start=start(False), beat=beat(ENDED, error="no room"), saved_step=8),
            "failed",
            "ended in step 9; step 8 is saved: no room",
            id="an error with words",
        ),
        pytest.param(
            Signs(start=start(False), told_step=9, saved_step=9, quiet_seconds=1),
            "stopped",
            "",
            id="without heartbeats",
        ),
        pytest.param(Signs(start=start(None), told_step=3, quiet_seconds=9), "running", "", id="elsewhere, just begun"),
        pytest.param(
            Signs(start=start(None, age=100), told_step=3, quiet_seconds=70),
            "running",
            "started on node7 1 min 40 s ago, without a heartbeat",
            id="elsewhere, what is known",
        ),
        pytest.param(
            Signs(start=start(None, age=999), told_step=3, quiet_seconds=900),
            "failed",
            "ended in step 3",
            id="and later",
        ),
        pytest.param(
            Signs(saved_step=9, told_step=12, quiet_seconds=1, beat=beat(ENDED, age=60)), "running", "", id="resumed"
        ),
        pytest.param(
            Signs(saved_step=9, told_step=9, quiet_seconds=4, beat=beat(ENDED, age=3)), "stopped", "", id="just ended"
        ),
        pytest.param(
            Signs(told_step=9, saved_step=8, quiet_seconds=999),
            "failed",
            "ended in step 9; step 8 is saved",
            id="without heartbeats, and quiet",
        ),
        pytest.param(Signs(told_step=8, saved_step=8, quiet_seconds=999), "stopped", "", id="quiet, and saved"),
    ],
)
def test_states(signs: Signs, state: str, reason: str) -> None:
    found, why = state_of(signs)
    assert found == state
    assert reason in why
    assert bool(why) == bool(reason), why
    assert found in STATES
