"""Run flags, the flags of tools, and where the second word of a stage may stand."""

from dataclasses import dataclass
from typing import Annotated

import pytest

from jobs.arguments import (
    RUN_FLAGS,
    RunOptions,
    only_word,
    run_flags_of,
    second_word_first,
    take_own_flags,
    take_run_flags,
    value_in,
)
from jobs.stages import STAGES
from shards.errors import UserError
from shards.schema.config_values import Range


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


@dataclass(frozen=True, kw_only=True)
class Example:
    """The flags of a tool, of every type."""

    name: str | None = None
    most_rows: Annotated[int, Range(1, 9999)] | None = None
    tasks: tuple[str, ...] = ()
    json: bool = False


@pytest.mark.parametrize(
    ("words", "own", "others"),
    [
        ([], Example(), []),
        (["a", "--json", "b"], Example(json=True), ["a", "b"]),
        (["--name", "x", "--name=y", "a"], Example(name="y"), ["a"]),
        (["--name"], Example(name=""), []),
        (["--name", "--json"], Example(name="--json"), []),
        (["--most-rows=7", "--rows", "8"], Example(most_rows=7), ["--rows", "8"]),
        (["--tasks", "a", "b", "--json", "c"], Example(tasks=("a", "b"), json=True), ["c"]),
        (["--tasks=a", "b", "--tasks=", "c"], Example(tasks=("a", "b", "c")), []),
        (["--json=yes", "-x"], Example(), ["--json=yes", "-x"]),
    ],
)
def test_the_flags_of_a_tool(words: list[str], own: Example, others: list[str]) -> None:
    assert take_own_flags(Example, words) == (own, others)


@pytest.mark.parametrize("text", ["", "0", "10000", "-1", "x", "9" * 5000])
def test_a_number_outside_its_range(text: str) -> None:
    with pytest.raises(UserError, match=r"--most-rows is '.*; allowed: 1 to 9,999"):
        take_own_flags(Example, ["--most-rows", text])


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([], "usage: logs RUN"),
        (["a", "b"], "usage: logs RUN"),
        (["a", "--x\n"], r"there is no flag '--x\\n'; usage: logs RUN"),
    ],
)
def test_a_tool_that_takes_one_word(others: list[str], message: str) -> None:
    assert only_word(["a"], usage="logs RUN") == "a"
    with pytest.raises(UserError, match=message):
        only_word(others, usage="logs RUN")


@pytest.mark.parametrize(
    ("words", "value"),
    [([], ""), (["--a", "1"], "1"), (["--a=1", "--a", "2"], "2"), (["--run_dir=x"], ""), (["--a"], ""), (["a"], "")],
)
def test_the_value_of_a_flag(words: list[str], value: str) -> None:
    assert value_in(words, "--a") == value
    assert value_in(["--run_dir", "x"], "--run-dir") == "x"


@pytest.mark.parametrize(
    ("stage", "words", "expected"),
    [
        ("pretrain", ["--steps", "3"], ["--steps", "3"]),
        ("verify", ["u", "--deep"], ["u", "--deep"]),
        ("verify", ["--deep", "--url", "u"], ["u", "--deep"]),
        ("verify", ["--url=u"], ["u"]),
        ("verify", ["--deep"], ["--deep"]),
        ("doctor", ["runs/a", "--json"], ["", "--run", "runs/a", "--json"]),
        ("doctor", ["--json"], ["", "--json"]),
        ("demo", ["--num-ranks", "1"], ["", "--num-ranks", "1"]),
    ],
)
def test_the_second_word_comes_first(stage: str, words: list[str], expected: list[str]) -> None:
    assert second_word_first(stage, words, is_help=False) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(["a", "b"], ["--images", "a", "b"], id="images alone"),
        pytest.param(["a", "--top", "3", "b"], ["--top", "3", "--images", "a", "b"], id="a flag between them"),
        pytest.param(["--json", "a", "--top=3"], ["--json", "--top=3", "--images", "a"], id="flags without a word"),
        pytest.param(["--images", "a", "b"], ["--images", "a", "b"], id="named"),
        pytest.param(["--json", "--", "-a", "--b"], ["--json", "--images", "-a", "--b"], id="names that begin with -"),
        pytest.param(["--top"], ["--top"], id="no value, which is said later"),
        pytest.param(["--help"], ["--help"], id="help"),
    ],
)
def test_the_images_of_predict_may_stand_anywhere(words: list[str], expected: list[str]) -> None:
    assert second_word_first("predict", ["w", *words], is_help=False) == ["w", *expected]
