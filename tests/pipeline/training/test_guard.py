"""A model that may be lost is not saved, and ends the run when it does not recover."""

from dataclasses import replace

import pytest

from jobs.recipes.pretrain import digits_smoke
from pipeline.training.guard import NonFiniteGuard
from shards.errors import WillNotSucceedError

NAN = float("nan")


def guard(*, says: bool = False) -> NonFiniteGuard:
    """Of a run with 10 updates already, which tolerates two bad ones in a row."""
    return NonFiniteGuard(replace(digits_smoke(), max_skipped_updates=2), num_updates=10, says=says)


def test_good_updates_are_counted_and_forgive_bad_ones() -> None:
    found = guard()
    for step, loss in enumerate([1.0, NAN, NAN, 1.0, NAN, NAN], start=11):
        found.count(step, loss=loss, was_skipped=False, saved_step=None)
        assert found.is_sound is (loss == 1.0)
    assert found.num_updates == 16, "made, although from a loss that is not finite"


@pytest.mark.parametrize(
    ("saved_step", "words"), [(None, "no checkpoint is there"), (12, "the last good checkpoint is of step 12")]
)
def test_too_many_bad_updates_in_a_row_are_the_end(saved_step: int | None, words: str) -> None:
    found = guard()
    for step in (13, 14):
        found.count(step, loss=1.0, was_skipped=True, saved_step=saved_step)
    with pytest.raises(WillNotSucceedError, match=rf"3 updates in a row, up to step 15, had a non-finite .*; {words};"):
        found.count(15, loss=1.0, was_skipped=True, saved_step=saved_step)
    assert found.num_updates == 10


def test_a_run_must_not_end_on_a_bad_update() -> None:
    found = guard()
    found.refuse(11, saved_step=8)
    found.count(12, loss=NAN, was_skipped=False, saved_step=8)
    with pytest.raises(WillNotSucceedError, match="1 updates in a row, up to step 12"):
        found.refuse(12, saved_step=8)


@pytest.mark.parametrize(
    ("was_skipped", "words"),
    [(True, "skipped, its gradient is not finite"), (False, "made from a loss that is not finite")],
)
def test_one_rank_says_what_happened(caplog: pytest.LogCaptureFixture, was_skipped: bool, words: str) -> None:
    guard().count(11, loss=NAN, was_skipped=was_skipped, saved_step=None)
    assert caplog.messages == []
    guard(says=True).count(11, loss=NAN, was_skipped=was_skipped, saved_step=None)
    assert caplog.messages == [f"step 11: the update was {words} (loss nan)"]
