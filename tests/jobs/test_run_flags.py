"""Flags that are not fields of the job."""

import pytest

from jobs.flags import RUN_FLAGS, RunOptions, run_flags_of, take_run_flags
from jobs.stages import STAGES
from shards.errors import UserError


@pytest.mark.parametrize(
    ("stage", "words", "left", "given"),
    [
        ("pretrain", ["r", "--steps", "3"], ["r", "--steps", "3"], RunOptions()),
        ("pretrain", ["r", "--processes", "2", "--steps", "3"], ["r", "--steps", "3"], RunOptions(processes=2)),
        ("evaluate", ["r", "--processes=2"], ["r"], RunOptions(processes=2)),
        ("finetune", ["--extend", "r"], ["r"], RunOptions(switches=("extend",))),
        ("pretrain", ["r", "--profile", "3:5"], ["r"], RunOptions(profile=range(3, 6))),
        ("finetune", ["--profile=7", "r"], ["r"], RunOptions(profile=range(7, 8))),
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
        (["--profile"], "--profile is ''; allowed: the first and the last step to trace, at most 100"),
        (["--profile", "0:3"], "--profile is '0:3'; allowed"),
        (["--profile", "5:3"], "--profile is '5:3'; allowed"),
        (["--profile", "1:101"], "--profile is '1:101'; allowed"),
        (["--profile", "1:2:3"], "--profile is '1:2:3'; allowed"),
        (["--profile", "a:b"], "--profile is 'a:b'; allowed: .* for example --profile 10:12"),
        (["--extend=yes"], "--extend takes no value, and has 'yes'"),
    ],
)
def test_wrong_values(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        take_run_flags("pretrain", words)


@pytest.mark.parametrize("words", [["--extend", "--profile", "3:5"], ["--profile=3"], ["--extend"], []], ids=" ".join)
def test_ranks_get_the_wishes_again(words: list[str]) -> None:
    _, given = take_run_flags("pretrain", ["r", *words])
    assert take_run_flags("pretrain", ["r", *given.words()]) == (["r"], given)


def test_a_stage_gets_what_was_given() -> None:
    _, given = take_run_flags("pretrain", ["r", "--extend", "--profile", "3:5"])
    assert given.arguments() == {"extend": True, "profile": range(3, 6)}
    assert RunOptions().arguments() == {}


def test_every_wish_is_of_a_stage_and_has_a_sentence() -> None:
    for flag in RUN_FLAGS:
        assert set(flag.stages) <= STAGES.keys()
        assert flag.says.endswith(".")
        assert all(flag in run_flags_of(stage) for stage in flag.stages)
