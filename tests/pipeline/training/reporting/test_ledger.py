"""Wall time by account adds up, even after errors, and goodput is the share of compute."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoints.manifest import CheckpointId
from pipeline.training.reporting.ledger import ACCOUNTS, Ledger, last_saved


@pytest.fixture
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands at a moment, however long a test takes."""
    monkeypatch.setattr("pipeline.training.reporting.ledger.time.time", lambda: 1_764_000_000.0)


def test_time_is_added_to_its_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = iter([10.0, 12.5, 100.0, 101.0, 200.0, 200.5])
    monkeypatch.setattr("pipeline.training.reporting.ledger.time.monotonic", lambda: next(clock))
    ledger = Ledger(tmp_path)
    with ledger.time("compute"):
        pass
    with ledger.time("data_wait"):
        pass
    with ledger.time("compute"):
        pass
    assert ledger.seconds == dict.fromkeys(ACCOUNTS, 0.0) | {"compute": 3.0, "data_wait": 1.0}
    assert ledger.record() == dict.fromkeys(ACCOUNTS, 0.0) | {
        "compute": 3.0,
        "data_wait": 1.0,
        "total": 4.0,
        "goodput": 0.75,
    }


def test_time_of_what_fails_is_counted_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = iter([1.0, 3.0])
    monkeypatch.setattr("pipeline.training.reporting.ledger.time.monotonic", lambda: next(clock))
    ledger = Ledger(tmp_path)
    with pytest.raises(ZeroDivisionError), ledger.time("checkpoint"):
        raise ZeroDivisionError
    assert ledger.seconds["checkpoint"] == 2.0


def test_an_unused_ledger_divides_by_nothing(tmp_path: Path) -> None:
    assert Ledger(tmp_path).record()["goodput"] == 0.0


def test_a_line_a_save(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with ledger.time("compute"):
        pass
    for step in (25, 50):
        ledger.append(tmp_path, step=step, attempt="0001-aa")
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [(line["step"], line["attempt"]) for line in lines] == [(25, "0001-aa"), (50, "0001-aa")]
    assert lines[0]["seconds"] == ledger.record()


@pytest.mark.usefixtures("still_clock")
def test_a_continued_run_counts_on_and_what_passed_is_restarts(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.seconds["compute"] = 40.0
    ledger.append(tmp_path, step=25, attempt="0001-aa")
    lines = (tmp_path / "ledger.jsonl").read_text()
    line = json.loads(lines)
    line["unix_time"] -= 100.0
    (tmp_path / "ledger.jsonl").write_text(json.dumps(line) + '\n{"step": 50, "att')  # killed while writing
    again = Ledger(tmp_path)
    assert again.seconds["compute"] == 40.0
    assert again.seconds["restarts"] == pytest.approx(100.0)
    assert again.record()["goodput"] == pytest.approx(40 / 140, abs=1e-4)
    again.count_as_pause()  # it had saved and stopped
    assert (again.seconds["restarts"], again.seconds["paused"]) == pytest.approx((0.0, 100.0))
    assert again.record()["goodput"] == 1.0
    again.resume()  # after a rewind
    assert (again.seconds["restarts"], again.seconds["paused"]) == pytest.approx((0.0, 100.0))
    killed = Ledger(tmp_path)
    killed.count_as_pause(30.0)  # the start after this pause was killed before its first save
    assert (killed.seconds["restarts"], killed.seconds["paused"]) == pytest.approx((70.0, 30.0))


def killed_before_its_line(folder: Path) -> dict[str, float]:
    """A ledger whose last line is of step 25, from 100 seconds ago; returns its seconds."""
    ledger = Ledger(folder)
    ledger.seconds["compute"] = 40.0
    ledger.append(folder, step=25, attempt="0001-aa")
    line = json.loads((folder / "ledger.jsonl").read_text())
    (folder / "ledger.jsonl").write_text(json.dumps(line | {"unix_time": line["unix_time"] - 100.0}) + "\n")
    return ledger.record()


@pytest.mark.usefixtures("still_clock")
def test_a_checkpoint_gets_the_line_that_its_run_was_killed_before(tmp_path: Path) -> None:
    before = killed_before_its_line(tmp_path)
    again, saved = Ledger(tmp_path), CheckpointId(step=50, attempt="0001-aa")
    for _ in range(2):  # the second time, it is there
        again.complete(saved, {**before, "compute": 90.0, "evaluation": 5.0})
    assert again.seconds["compute"] == 90.0
    assert again.seconds["evaluation"] == 5.0
    assert again.seconds["restarts"] == pytest.approx(100.0 - 50.0 - 5.0)
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [25, 50]
    assert lines[1]["unix_time"] == pytest.approx(lines[0]["unix_time"] + 55.0)
    assert last_saved(tmp_path) == saved
    assert Ledger(tmp_path).seconds["compute"] == 90.0


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"compute": 30.0}, id="an older checkpoint"),
        pytest.param({"compute": math.nan}, id="NaN"),
        pytest.param({"compute": -1.0}, id="negative"),
        pytest.param({"compute": "90"}, id="text"),
        pytest.param({"compute": 10**400}, id="too large for a float"),
        pytest.param({"compute": 200.0}, id="more than has passed"),
        pytest.param({"compute": 90.0, "startup": -0.1}, id="less of one account"),
    ],
)
def test_seconds_of_a_checkpoint_that_make_no_sense_are_left_out(tmp_path: Path, more: dict[str, Any]) -> None:
    before = killed_before_its_line(tmp_path)
    again, text = Ledger(tmp_path), (tmp_path / "ledger.jsonl").read_text()
    found: list[Any] = [before | more, more, None, [], {}]
    for seconds in found:
        again.complete(CheckpointId(step=50, attempt="0001-aa"), seconds)
    assert again.seconds["compute"] == 40.0
    assert (tmp_path / "ledger.jsonl").read_text() == text


def test_without_any_line_there_is_nothing_to_complete(tmp_path: Path) -> None:
    Ledger(tmp_path).complete(CheckpointId(step=50, attempt="0001-aa"), dict.fromkeys(ACCOUNTS, 1.0))
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_half_written_line_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"step": 25, "att')
    ledger = Ledger(tmp_path)
    ledger.seconds["compute"] = 40.0
    for step in (50, 75):
        ledger.append(tmp_path, step=step, attempt="0001-aa")
    assert Ledger(tmp_path).seconds["compute"] == 40.0
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()[1:]] == [50, 75]


@pytest.mark.parametrize(
    "bad",
    [
        b"[1]",
        b"NaN",
        b"\xff",
        b"{}",
        b"[" * 200_000,
        b'{"step": 50, "unix_time": 1, "seconds": {}}',
        b'{"step": 50, "unix_time": 1, "seconds": []}',
        json.dumps({"step": 50, "unix_time": 1.0, "seconds": dict.fromkeys(ACCOUNTS, float("nan"))}).encode(),
        json.dumps({"step": 50, "unix_time": 1.0, "seconds": dict.fromkeys(ACCOUNTS, -1.0)}).encode(),
        json.dumps({"step": 50, "unix_time": "1", "seconds": dict.fromkeys(ACCOUNTS, 1.0)}).encode(),
        json.dumps({"step": 50, "unix_time": 10**400, "seconds": dict.fromkeys(ACCOUNTS, 1.0)}).encode(),
    ],
    ids=range(11),
)
def test_unusable_lines_are_skipped_and_that_is_said(
    tmp_path: Path, bad: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path)
    ledger.seconds["compute"] = 40.0
    ledger.append(tmp_path, step=25, attempt="0001-aa")
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(path.read_bytes() + bad + b"\n" + bad)
    assert Ledger(tmp_path, says=True).seconds["compute"] == 40.0
    assert caplog.messages == [f"{path}: skipped 2 lines that are no lines of a ledger"]


def test_the_last_line_names_the_last_checkpoint(tmp_path: Path) -> None:
    assert last_saved(tmp_path) is None
    ledger = Ledger(tmp_path)
    ledger.append(tmp_path, step=25, attempt="0001-aa")
    assert last_saved(tmp_path) == CheckpointId(step=25, attempt="0001-aa")
    for foreign in ("../../0001-aa", "0001-aa\n", ""):
        ledger.append(tmp_path, step=50, attempt=foreign)
        assert last_saved(tmp_path) is None, foreign
