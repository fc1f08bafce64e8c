"""Run flags, the flags of tools and of jobs, and where the second word of a stage may stand."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

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
    values_of,
    with_flags,
    with_flags_of_group,
    with_values,
)
from jobs.flags import flags_of
from jobs.recipes import pack
from jobs.recipes.pretrain import digits_smoke
from jobs.resolve import default_job
from jobs.stages import STAGES
from pipeline.training.settings.job import TrainingJob
from shards.config_values import Range, differences
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
    ("words", "left"),
    [
        (["r", "--b=1", "--a", "1", "2", "--c"], ["r", "--b=1", "--c"]),
        (["r", "--a_b=1", "--a-b", "2", "--no-x", "--a", "1"], ["r", "--a_b=1", "--a-b", "2"]),
    ],
)
def test_a_command_with_other_flags(words: list[str], left: list[str]) -> None:
    assert with_flags(words, ("--a", "9", "--no-x")) == [*left, "--a", "9", "--no-x"]


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps"], "--steps needs a value: a whole number"),
        (["--steps", "--seed", "1"], "--steps needs a value: a whole number"),
        (["--steps", "ten"], "--steps is 'ten'; allowed: a whole number"),
        (["--steps=1.5"], "--steps is '1.5'; allowed: a whole number"),
        (["--clip-norm", "x"], "--clip-norm is 'x'; allowed: a number"),
        (["--engine.zero-stage", "4"], "--engine.zero-stage is '4'; allowed: 1 or 2 or 3"),
        (["--model.resnet-units", "3", "x"], "--model.resnet-units is 'x'; allowed: a whole number"),
        (["--steps", "0"], "--steps is 0; allowed: 1 to 1,000,000,000"),
        (["--optimizer.weight-decay", "-1"], "--optimizer.weight-decay is -1; allowed: 0 or more"),
        (["--optimizer.weight-decay=nan"], "--optimizer.weight-decay is nan; allowed: a finite number"),
        (["--model.resnet-units", "3", "0"], "--model.resnet-units is 0; allowed: 1 to 1,000"),
        (["--evaluation.transform.short_side", "-1"], "--evaluation.transform.short_side is -1; allowed: 0 (256/224"),
        (["--steps", "1", "2"], "unexpected word '2'; a value follows its flag"),
        (["stray"], "unexpected word 'stray'"),
        (
            ["--data.augment.flip", "yes"],
            "--data.augment.flip is a switch and takes no value; give --data.augment.flip or",
        ),
        (["--data.augment.flip=no"], "is a switch and takes no value"),
        (["-s", "3"], "unknown flag -s"),
        (["--out-dir", "-x"], "unknown flag --out-dir"),
        (["--steps", "-x"], "--steps is '-x'; allowed: a whole number"),
        (["--data.mix", "a"], "--data.mix is 'a'; allowed: URL WEIGHT ..."),
        (["--data.mix", "a", "b"], "--data.mix is 'a b'; allowed: URL WEIGHT ..."),
    ],
)
def test_wrong_words(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as raised:
        values_of(words, list(flags_of(digits_smoke())), command=("pretrain", "digits_smoke"))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ([], {}),
        (["--steps", "3", "--seed=4", "--run_dir", "-x"], {"--steps": 3, "--seed": 4, "--run-dir": "-x"}),
        (["--data.augment.flip", "--data.augment.no-flip"], {"--data.augment.flip": False}),
        (["--data.augment.no_flip", "--data.augment.flip"], {"--data.augment.flip": True}),
        (["--steps", "3", "--steps", "4", "--run-dir", ""], {"--steps": 4, "--run-dir": ""}),
        (["--model.resnet-units", "3", "4"], {"--model.resnet-units": (3, 4)}),
        (["--model.resnet-units", "None", "--model.patch=None"], {"--model.resnet-units": None, "--model.patch": None}),
        (["--schedule.learning-rate", "1e-3"], {"--schedule.learning-rate": 1e-3}),
        (["--model.head-bias", "-10"], {"--model.head-bias": -10.0}),
        (["--data.mix", "s3://a/b", "2", "c", "0.5"], {"--data.mix": (("s3://a/b", 2.0), ("c", 0.5))}),
        (["--data.mix"], {"--data.mix": ()}),
        (["--engine.zero-stage", "3", "--device", "cpu"], {"--engine.zero-stage": 3, "--device": "cpu"}),
    ],
)
def test_the_values_of_a_jobs_flags(words: list[str], values: dict[str, Any]) -> None:
    found = values_of(words, list(flags_of(digits_smoke())), command=("pretrain", "digits_smoke"))
    assert found == values
    assert list(map(type, found.values())) == list(map(type, values.values()))  # 3 is also 3.0


def test_a_job_with_other_values() -> None:
    recipe = digits_smoke()
    values = {"--steps": 70, "--data.augment.flip": True, "--data.url": "d", "--schedule.learning-rate": 0.5}
    found = differences(asdict(recipe), asdict(with_values(recipe, values)))
    assert {f"--{each.field}".replace("_", "-"): each.now for each in found} == values
    assert with_values(recipe, {}) == recipe
    with pytest.raises(UserError, match=r"schedule\.warmup_steps is 30, not below the 7 steps of the run"):
        with_values(recipe, {"--steps": 7})


def test_a_plans_message_names_the_plans_flags() -> None:
    """Every flag of a training job, as a word of a sentence; other flags and longer words stay as they are."""
    flags = list(flags_of(TrainingJob()))
    for name in (name for flag in flags for name in flag.names):
        said = "give {0}, `{0} 1`, or {0}. Not --gpu, {0}-x, {0}.x, x{0} or --training.x"
        expected = said.replace("{0}-x", f"{name}-x").replace("{0}.x", f"{name}.x").replace("x{0}", f"x{name}")
        given = with_flags_of_group(said.format(name), flags, group="training")
        assert given == expected.format(f"--training.{name.removeprefix('--')}")


def test_the_flags_that_a_plans_message_names_are_the_plans() -> None:
    job = default_job("plan", "vit_b16_i1k")
    values = {"--training.optimizer.sam-rho": 0.2, "--training.engine.zero-stage": 3}
    with pytest.raises(UserError) as refused:
        with_values(job, values)
    for words in (("--training.engine.zero-stage", "1"), ("--training.optimizer.sam-rho", "0")):
        assert " ".join(words) in str(refused.value)
        with_values(job, values | values_of(words, list(flags_of(job)), command=("plan", "vit_b16_i1k")))
    with pytest.raises(UserError, match="add --gpu h100"):
        with_values(job, {"--num-gpus": 4})


def test_a_source_keeps_its_kind() -> None:
    found = with_values(pack.folder(), {"--source.root": "photos"})
    assert asdict(found.source) == asdict(pack.folder().source) | {"root": "photos"}
