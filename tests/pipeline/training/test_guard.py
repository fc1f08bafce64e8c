"""A model that may be lost is not saved, and ends the run when it does not recover; spikes are found and acted upon.

Findings are whole lines of JSON, one after the other.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.recipes.pretrain import digits_smoke
from pipeline.data.skipped import StepRange
from pipeline.training.guard import Guard, NonFiniteGuard, RewindNeededError, add_finding
from pipeline.training.settings.job import GuardConfig
from pipeline.training.step import StepResult
from pipeline.training.watchdog.stopping import StopRequest
from shards.errors import WillNotSucceedError
from tests.pipeline.checkpoints.test_manifest import MANIFEST
from tests.pipeline.training.test_rewind import FOUND
from tests.rigs.positions import position_at

NAN = float("nan")


def guard(*, says: bool = False) -> NonFiniteGuard:
    """Of a run with 10 updates already, which tolerates two bad ones in a row."""
    return NonFiniteGuard(replace(digits_smoke(), max_skipped_updates=2), num_updates=10, says=says)


def test_good_updates_are_counted_and_forgive_bad_ones() -> None:
    found = guard()
    for step, loss in enumerate([1.0, NAN, NAN, 1.0, NAN, NAN], start=11):
        found.count(step, loss=loss, was_skipped=False, last_saved=lambda: None)
        assert found.is_sound is (loss == 1.0)
    assert found.num_updates == 16, "made, although from a loss that is not finite"


@pytest.mark.parametrize(
    ("saved_step", "words"), [(None, "no checkpoint is there"), (12, "the last good checkpoint is of step 12")]
)
def test_too_many_bad_updates_in_a_row_are_the_end(saved_step: int | None, words: str) -> None:
    found = guard()
    for step in (13, 14):
        found.count(step, loss=1.0, was_skipped=True, last_saved=lambda: saved_step)
    with pytest.raises(WillNotSucceedError, match=rf"3 updates in a row, up to step 15, had a non-finite .*; {words};"):
        found.count(15, loss=1.0, was_skipped=True, last_saved=lambda: saved_step)
    assert found.num_updates == 10


def test_a_run_must_not_end_on_a_bad_update() -> None:
    found = guard()
    found.refuse(11, last_saved=lambda: 8)
    found.count(12, loss=NAN, was_skipped=False, last_saved=lambda: 8)
    with pytest.raises(WillNotSucceedError, match="1 updates in a row, up to step 12"):
        found.refuse(12, last_saved=lambda: 8)


@pytest.mark.parametrize(
    ("was_skipped", "words"),
    [(True, "skipped, its gradient is not finite"), (False, "made from a loss that is not finite")],
)
def test_one_rank_says_what_happened(caplog: pytest.LogCaptureFixture, was_skipped: bool, words: str) -> None:
    guard().count(11, loss=NAN, was_skipped=was_skipped, last_saved=lambda: None)
    assert caplog.messages == []
    guard(says=True).count(11, loss=NAN, was_skipped=was_skipped, last_saved=lambda: None)
    assert caplog.messages == [f"step 11: the update was {words} (loss nan)"]


CALM = (1.0, 1.1, 0.9, 1.0)
SKIPPED = (StepRange(first=3, end=5),)


def whole_guard(run_dir: Path, *, says: bool = True, most_skipped: int = 1, **settings: Any) -> Guard:
    """Of a run at step 120 that has skipped two data steps, after some calm losses."""
    config = replace(GuardConfig(on_spike="warn", spike_window=4, min_history=4), **settings)
    job = replace(digits_smoke(), run_dir=str(run_dir), max_skipped_updates=most_skipped, guard=config)
    position = position_at(0).at(120, skipped=SKIPPED)
    return Guard(job, found=replace(MANIFEST, losses=CALM, position=position), position=position, says=says)


def result(step: int, loss: float, *, was_skipped: bool = False) -> StepResult:
    return StepResult(
        step=step,
        loss=loss,
        grad_norm=2.5,
        was_skipped=was_skipped,
        rate=0.1,
        request=StopRequest.NOTHING,
        counts={},
        sums={},
    )


def written(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "guard.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_spike_is_listed_with_all_that_explains_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = whole_guard(tmp_path)
    found.count(result(121, 1.05), last_saved=lambda: 120)
    found.count(result(122, 9.0), last_saved=lambda: 120)
    assert written(tmp_path) == [
        {
            "kind": "spike",
            "step": 122,
            "data_step": 123,
            "loss": 9.0,
            "action": "none",
            "was_skipped": False,
            "first_position": 123 * 128,
            "end_position": 124 * 128,
            "grad_norm": 2.5,
            "learning_rate": 0.1,
            "median": 1.025,
            "mad": pytest.approx(0.05),
            "z": pytest.approx((9 - 1.025) / (1.4826 * 0.05)),
        }
    ]
    assert caplog.messages == ["step 122: the loss 9 is a spike (z 107.6, median 1.025, MAD 0.05)"]
    assert (found.updates.num_updates, found.updates.is_sound) == (121, True), "a warning changes nothing"
    assert found.losses == (0.9, 1.0, 1.05, 9.0)
    assert found.values() == {"guard/rewinds": 1, "guard/skipped_steps": 2, "guard/z": written(tmp_path)[0]["z"]}


def test_other_ranks_decide_alike_and_write_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = whole_guard(tmp_path, says=False)
    found.count(result(121, 9.0), last_saved=lambda: 120)
    assert (written(tmp_path), caplog.messages) == ([], [])
    with pytest.raises(RewindNeededError, match="step 121: the loss 9 is a spike"):
        whole_guard(tmp_path, says=False, on_spike="rewind").count(result(121, 9.0), last_saved=lambda: 120)


def test_nothing_is_judged_or_kept_if_it_is_off(tmp_path: Path) -> None:
    found = whole_guard(tmp_path, on_spike="off")
    found.count(result(121, 1e9), last_saved=lambda: 120)
    assert (written(tmp_path), found.losses, found.discard) == ([], (), None)
    assert found.values() == {"guard/rewinds": 1, "guard/skipped_steps": 2}, "of a time when it was on"
    found.position = position_at(0)
    assert found.values() == {}, "the lines of other runs stay as they are"


def test_a_dropped_update_is_not_counted_and_the_model_stays_sound(tmp_path: Path) -> None:
    found = whole_guard(tmp_path, on_spike="skip")
    assert found.discard is not None
    for step, loss, is_bad in ((121, 9.0, True), (122, 1.0, False)):
        assert found.discard(loss) is is_bad
        found.count(result(step, loss, was_skipped=is_bad), last_saved=lambda: 120)
        assert found.updates.is_sound
    assert found.updates.num_updates == MANIFEST.num_updates + 1
    assert [line["action"] for line in written(tmp_path)] == ["no update"]


def test_too_many_dropped_updates_in_a_row_are_the_end(tmp_path: Path) -> None:
    found = whole_guard(tmp_path, on_spike="skip", most_skipped=1)
    assert found.discard is not None
    assert found.discard(9.0)
    found.count(result(121, 9.0, was_skipped=True), last_saved=lambda: 120)
    assert found.discard(99.0)
    with pytest.raises(
        WillNotSucceedError, match=r"step 122: .* and so are the 1 steps before it.* step 120.*guard\.jsonl lists"
    ):
        found.count(result(122, 99.0, was_skipped=True), last_saved=lambda: 120)
    assert [line["step"] for line in written(tmp_path)] == [121, 122]


@pytest.mark.parametrize(("loss", "was_skipped"), [(NAN, False), (1.0, True)])
def test_what_is_not_finite_is_listed_or_a_reason_to_go_back(tmp_path: Path, loss: float, was_skipped: bool) -> None:
    found = whole_guard(tmp_path)
    found.count(result(121, loss, was_skipped=was_skipped), last_saved=lambda: 120)
    assert not found.updates.is_sound
    (line,) = written(tmp_path)
    assert (line["kind"], line["action"]) == ("non_finite", "no update" if was_skipped else "none")
    with pytest.raises(RewindNeededError, match="is not finite"):
        whole_guard(tmp_path, on_non_finite="rewind").count(
            result(121, loss, was_skipped=was_skipped), last_saved=lambda: 120
        )
    assert len(written(tmp_path)) == 1, "a rewind writes it down itself"


def test_findings_are_appended(tmp_path: Path) -> None:
    add_finding(str(tmp_path), FOUND, action="ended")
    add_finding(str(tmp_path), FOUND, action="rewound", rewound_to=36)
    first, second = [json.loads(line) for line in (tmp_path / "guard.jsonl").read_text().splitlines()]
    assert (first["step"], first["z"], first["action"]) == (31, 47.0, "ended")
    assert second == first | {"action": "rewound", "rewound_to": 36}


def test_half_a_line_of_a_killed_process_spoils_no_other(tmp_path: Path) -> None:
    add_finding(str(tmp_path), FOUND, action="ended")
    path = tmp_path / "guard.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    add_finding(str(tmp_path), FOUND, action="rewound")
    half, whole = path.read_text().splitlines()
    assert half.startswith('{"kind"')
    assert json.loads(whole)["action"] == "rewound"
