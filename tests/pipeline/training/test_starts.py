"""Starts on record, and the cause that each tells of the one before it."""

from pathlib import Path

import pytest

from pipeline.training.starts import Left, add_start, cause_of, left_behind, read_starts


@pytest.mark.parametrize(
    ("left", "cause"),
    [
        pytest.param(Left(reached=9), "killed or crashed after step 9", id="no heartbeat"),
        pytest.param(Left(reached=9, attempt="0", phase="ended"), "killed or crashed after step 9", id="an older one"),
        pytest.param(Left(attempt="1", phase="saving", step=9), "killed or crashed in step 9 (saving)", id="killed"),
        pytest.param(Left(attempt="1", phase="saving", step=9, is_hung=True), "hung in step 9 (saving)", id="hung"),
        pytest.param(Left(attempt="1", phase="ended", step=8), "stopped with step 8 saved", id="stopped"),
        pytest.param(Left(attempt="1", phase="ended", step=9), "ended by an error in step 9", id="an error"),
        pytest.param(
            Left(attempt="1", phase="ended", step=9, asked_by="SIGTERM", error="no space left"),
            "ended by an error in step 9: no space left",
            id="an error with words",
        ),
        pytest.param(
            Left(attempt="1", phase="ended", step=8, asked_by="SIGINT"),
            "stopped by SIGINT with step 8 saved",
            id="Ctrl-C",
        ),
        pytest.param(
            Left(attempt="1", phase="ended", step=9, asked_by="SIGINT"),
            "stopped by SIGINT in step 9, which was not saved",
            id="a stop whose checkpoint is damaged",
        ),
        pytest.param(
            Left(attempt="1", phase="evaluating", step=9, asked_by="SIGTERM"),
            "ended at once after SIGTERM, in step 9 (evaluating)",
            id="it did not stop in time",
        ),
        pytest.param(Left(attempt="1", phase="starting"), "killed or crashed while starting", id="no step yet"),
        pytest.param(
            Left(attempt="1", phase="ended", step=8, is_done=True), "done with step 8, and extended", id="done"
        ),
    ],
)
def test_causes(left: Left, cause: str) -> None:
    assert cause_of(left, resumed_from=8, attempt_before="1") == cause


def test_half_a_line_spoils_no_other(tmp_path: Path) -> None:
    left = left_behind(tmp_path)
    assert left == Left()
    for attempt in ("1", "2"):
        seconds = {"startup": 1.0, "total": 2.0}
        add_start(tmp_path, attempt=attempt, resumed_from=None, seconds=seconds, topology=(2, 1, "cpu"), left=left)
        with (tmp_path / "starts.jsonl").open("a") as file:
            file.write('{"attempt": "3", "unix')
    assert [start.attempt for start in read_starts(tmp_path)] == ["1", "2"]
