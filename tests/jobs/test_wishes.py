"""Words that are not of the job."""

import pytest

from jobs.stages import STAGES
from jobs.wishes import WISHES, Given, take_wishes, wishes_of
from shards.errors import UserError


@pytest.mark.parametrize(
    ("stage", "words", "left", "given"),
    [
        ("pretrain", ["r", "--steps", "3"], ["r", "--steps", "3"], Given()),
        ("pretrain", ["r", "--processes", "2", "--steps", "3"], ["r", "--steps", "3"], Given(processes=2)),
        ("evaluate", ["r", "--processes=2"], ["r"], Given(processes=2)),
        ("finetune", ["--extend", "r"], ["r"], Given(switches=("extend",))),
        ("export", ["p", "--overwrite"], ["p"], Given(switches=("overwrite",))),
        ("export", ["p", "--extend"], ["p", "--extend"], Given()),  # the stage has no such flag, which others will say
        ("verify", ["p", "--processes", "2"], ["p", "--processes", "2"], Given()),
    ],
)
def test_wishes_are_taken_off(stage: str, words: list[str], left: list[str], given: Given) -> None:
    assert take_wishes(stage, words) == (left, given)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--processes"], "--processes is ''; allowed are whole numbers from 1 on"),
        (["--processes", "two"], "--processes is 'two'"),
        (["--processes=0"], "--processes is '0'"),
        (["--extend=yes"], "--extend takes no value, and has 'yes'"),
    ],
)
def test_wrong_values(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        take_wishes("pretrain", words)


def test_every_wish_is_of_a_stage_and_has_a_sentence() -> None:
    for wish in WISHES:
        assert set(wish.stages) <= STAGES.keys()
        assert wish.says.endswith(".")
        assert all(wish in wishes_of(stage) for stage in wish.stages)
