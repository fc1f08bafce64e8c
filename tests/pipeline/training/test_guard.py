"""A model that may be lost is not saved, and ends the run when it does not recover; spikes are found and acted upon.

Findings are whole lines of JSON, one after the other. A spike is a loss far above those before it, whatever their
scale; earlier spikes do not hide later ones.
"""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.recipes.pretrain import digits_smoke
from pipeline.data.position import StepRange
from pipeline.training.guard import Guard, NonFiniteGuard, RewindNeededError, add_finding, judge, with_loss
from pipeline.training.settings.job import GuardConfig
from pipeline.training.step import StepResult
from pipeline.training.watchdog.stopping import StopRequest
from shards.errors import WillNotSucceedError
from tests.pipeline.checkpoints.test_manifest import MANIFEST
from tests.pipeline.training.test_rewind import FOUND
from tests.rigs.positions import position_at

NAN = float("nan")
CALM = (1.0, 1.1, 0.9, 1.0)
SKIPPED = (StepRange(first=3, end=5),)
CONFIG = GuardConfig(on_spike="warn", spike_z=8.0, spike_window=16, min_history=4)
QUIET = (2.0, 2.1, 1.9, 2.0, 2.1, 1.9, 2.0)  # median 2, MAD 0.1: a z of 8 is 2 + 8 x 1.4826 x 0.1 = 3.186
finite = st.floats(-1e6, 1e6).map(lambda value: round(value, 3))


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
    with pytest.raises(WillNotSucceedError):
        found.count(15, loss=1.0, was_skipped=True, last_saved=lambda: saved_step)
    assert found.num_updates == 10


@pytest.mark.parametrize(
    ("was_skipped", "words"),
    [(True, "skipped, its gradient is not finite"), (False, "made from a loss that is not finite")],
)
def test_one_rank_says_what_happened(caplog: pytest.LogCaptureFixture, was_skipped: bool, words: str) -> None:
    guard().count(11, loss=NAN, was_skipped=was_skipped, last_saved=lambda: None)
    assert caplog.messages == []
    guard(says=True).count(11, loss=NAN, was_skipped=was_skipped, last_saved=lambda: None)
    assert caplog.messages == [f"step 11: the update was {words} (loss nan)"]


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


@pytest.mark.parametrize(
    ("loss", "losses", "is_spike"),
    [
        pytest.param(3.18, QUIET, False, id="just below the threshold"),
        pytest.param(3.19, QUIET, True, id="just above it"),
        pytest.param(0.1, QUIET, False, id="a fall is no spike"),
        pytest.param(9.0, QUIET[:3], False, id="too few losses to compare with"),
        pytest.param(9.0, QUIET[:4], True, id="just enough"),
        pytest.param(3.19, (*QUIET, 50.0, 60.0), True, id="earlier spikes do not hide a later one"),
        pytest.param(2.15, (2.0,) * 8, False, id="losses that do not vary: 8 % is the least of a spike"),
        pytest.param(2.17, (2.0,) * 8, True, id="more than that"),
        pytest.param(0.0, (0.0,) * 8, False, id="nothing but zeros"),
        pytest.param(1e-9, (0.0,) * 8, True, id="and something"),
        pytest.param(math.nan, QUIET, False, id="not a number: of another guard"),
        pytest.param(math.inf, QUIET, False, id="infinite: of another guard"),
    ],
)
def test_what_is_a_spike(loss: float, losses: tuple[float, ...], is_spike: bool) -> None:
    assert judge(loss, losses, config=CONFIG).is_spike is is_spike


def test_nothing_is_a_spike_if_it_is_off() -> None:
    """The losses may be of a time when it was on."""
    assert judge(9.0, QUIET, config=replace(CONFIG, on_spike="off")).is_spike is False


def test_a_verdict_says_how_far_it_is() -> None:
    found = judge(3.4826, QUIET, config=CONFIG)
    assert (found.loss, found.median, found.is_spike) == (3.4826, 2.0, True)
    assert found.mad == pytest.approx(0.1)
    assert found.z == pytest.approx(10.0)


@given(st.lists(finite, min_size=4, max_size=16), finite, st.floats(0, 1e6))
def test_a_higher_loss_is_never_less_of_a_spike(losses: list[float], loss: float, more: float) -> None:
    assert judge(loss + more, losses, config=CONFIG).z >= judge(loss, losses, config=CONFIG).z


@given(st.lists(finite, min_size=4, max_size=16), finite)
def test_the_order_of_the_losses_does_not_matter(losses: list[float], loss: float) -> None:
    mixed = random.Random(0).sample(losses, len(losses))
    assert judge(loss, mixed, config=CONFIG) == judge(loss, losses, config=CONFIG)


@given(st.lists(st.floats(1.0, 1.2), min_size=9, max_size=16), st.integers(-30, 30))
def test_the_scale_of_the_losses_does_not_matter(losses: list[float], power: int) -> None:
    """A power of two changes no rounding."""
    factor = 2.0**power
    scaled = judge(3.0 * factor, [each * factor for each in losses], config=CONFIG)
    assert scaled.z == judge(3.0, losses, config=CONFIG).z
    assert scaled.is_spike


@given(st.lists(st.floats(1.0, 1.2), min_size=9, max_size=15), st.integers(0, 4))
def test_a_minority_of_spikes_moves_the_median_within_the_others(losses: list[float], num_spikes: int) -> None:
    found = judge(3.0, [*losses, *[100.0] * num_spikes], config=CONFIG)
    assert min(losses) <= found.median <= max(losses)
    assert found.median <= median([*losses, *[100.0] * num_spikes])


def test_the_latest_finite_losses_are_kept() -> None:
    losses: tuple[float, ...] = ()
    for loss in [math.nan, *map(float, range(20)), math.inf]:
        losses = with_loss(losses, loss, config=CONFIG)
    assert losses == tuple(map(float, range(4, 20)))
    assert with_loss(losses, 1.0, config=GuardConfig()) == (), "nothing is compared"


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (GuardConfig(skip_steps=9), 0),
        (GuardConfig(on_spike="rewind", skip_steps=9), 4),
        (GuardConfig(on_non_finite="rewind", skip_steps=1), 0),
    ],
)
def test_how_far_a_rewind_goes_back_before_its_finding(config: GuardConfig, steps: int) -> None:
    assert config.rewind_steps == steps
