"""Flags that are not fields of the job."""

import pytest

from jobs.run_flags import RUN_FLAGS, RunOptions, run_flags_of, take_run_flags
from jobs.stages import STAGES
from shards.errors import UserError


@pytest.mark.parametrize(
    ("stage", "words", "left", "given"),
    [
        ("pretrain", ["r", "--steps", "3"], ["r", "--steps", "3"], RunOptions()),
        ("pretrain", ["r", "--processes", "2", "--steps", "3"], ["r", "--steps", "3"], RunOptions(processes=2)),
        ("evaluate", ["r", "--processes=2"], ["r"], RunOptions(processes=2)),
        ("finetune", ["--extend", "r"], ["r"], RunOptions(switches=("extend",))),
        ("export", ["p", "--overwrite"], ["p"], RunOptions(switches=("overwrite",))),
        (
            "export",
            ["p", "--extend"],
            ["p", "--extend"],
            RunOptions(),
        ),  # the stage has no such flag, which is reported elsewhere
        ("verify", ["p", "--processes", "2"], ["p", "--processes", "2"], RunOptions()),
    ],
)
def test_wishes_are_taken_off(stage: str, words: list[str], left: list[str], given: RunOptions) -> None:
    assert take_run_flags(stage, words) == (left, given)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--processes"], "--processes is ''; allowed: whole numbers from 1 on"),
        (["--processes", "two"], "--processes is 'two'"),
        (["--processes=0"], "--processes is '0'"),
        (["--processes", "9" * 5000], r"--processes is '9{199}\.\.\.; allowed: whole numbers"),
        (["--extend=yes"], "--extend takes no value, and has 'yes'"),
    ],
)
def test_wrong_values(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        take_run_flags("pretrain", words)


def test_every_wish_is_of_a_stage_and_has_a_sentence() -> None:
    for flag in RUN_FLAGS:
        assert set(flag.stages) <= STAGES.keys()
        assert flag.says.endswith(".")
        assert all(flag in run_flags_of(stage) for stage in flag.stages)
