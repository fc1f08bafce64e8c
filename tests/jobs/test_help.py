"""Help fits the terminal, shows required flags first and common flags by default, and gives commands that work."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from types import ModuleType

import pytest

from jobs import help as pages
from jobs.arguments import second_word_first, shown_run_flags, values_of
from jobs.flags import flags_of
from jobs.mistakes import required_flags
from jobs.recipes import finetune, pack, pretrain
from jobs.resolve import WITH_RECIPES, default_job
from jobs.stages import STAGES, commands_of, recipes_of
from tests.rigs.faults import differs, every_fault

WIDTHS = (80, 120)


def page(stage: str, word: str, *, everything: bool = False, width: int = 80) -> str:
    job = default_job(stage, word)
    about = recipes_of(stage)[word].__doc__ or "" if STAGES[stage].recipes else ""
    return pages.of_job(stage, word or STAGES[stage].usage, job, about=about, everything=everything, width=width)


def words_of(stage: str) -> list[str]:
    return list(recipes_of(stage)) if STAGES[stage].recipes else [""]


def pages_of(stage: str, width: int) -> Iterator[str]:
    """All pages on the narrower terminal, whose lines are broken as on the wider one; there, those of one recipe."""
    yield pages.second_words(stage, recipes_of(stage) if STAGES[stage].recipes else {}, width)
    words = words_of(stage)
    for word in words if width == min(WIDTHS) else words[:1]:
        yield page(stage, word, width=width)
        yield page(stage, word, everything=True, width=width)


@every_fault
def test_every_page_fits_its_width() -> Iterator[str]:
    for width in WIDTHS:
        texts = [("patchline", pages.overview(width))]
        texts += [(f"patchline {stage}", text) for stage in STAGES for text in pages_of(stage, width)]
        for command, text in texts:
            if not text.endswith("\n"):
                yield f"a help page of {command} does not end with a line break"
            for line in text.splitlines():
                if len(line) > width:
                    yield f"{command} --help has {len(line)} letters on a line of {width}: {line}"


def test_recipes_are_listed_below_their_paper_with_a_line_each() -> None:
    recipes = recipes_of("pretrain")
    lines = pages.second_words("pretrain", recipes, 100).splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] in recipes]
    assert listed == list(recipes)
    place = lines.index('DeiT III: "DeiT III: Revenge of the ViT" (Touvron et al., 2022), README_revenge.md of')
    assert lines[place + 1] == "facebookresearch/deit:"
    assert lines[place + 2].split()[0].startswith("deit3_")
    first, last = lines.index(next(line for line in lines if "digits_smoke " in line)), lines.index("")
    assert first > last
    assert not [line for line in lines if line.startswith(" " * 12)], "no recipe has a second line"
    of_tables = [name for name, recipe in recipes.items() if "(Table" in (recipe.__doc__ or "").split("\n")[0]]
    assert len(of_tables) > 30
    assert {
        line.split()[0] for line in lines if line.startswith("  ") and line.endswith(").") and "(Table" in line
    } == {*of_tables}, "no table is cut off"


def test_required_flags_come_first_then_the_usual_then_how_to_see_all() -> None:
    text = page("pretrain", "digits_smoke")
    places = [
        text.index(part) for part in ("usage:", "required:", "--data.url URL  ", "usual:", "--steps INT", "--help-all")
    ]
    assert places == sorted(places)
    assert "--model.width" not in text
    assert len(re.findall(r"^  --", text, re.MULTILINE)) <= 16


@every_fault
def test_all_flags_are_in_the_whole_page_once() -> Iterator[str]:
    for stage in STAGES:
        for word in words_of(stage):
            shown = Counter(re.findall(r"^  (--[^ \n]+)", page(stage, word, everything=True), re.MULTILINE))
            every = [*flags_of(default_job(stage, word)), *shown_run_flags(stage)]
            flags = Counter(flag.usage.split()[0] for flag in every)
            for flag in sorted(flags.keys() | shown.keys()):
                times = f"how often patchline {stage} --help-all shows {flag}"
                yield from differs(times, shown[flag], flags[flag])


def test_values_are_shown_with_their_units() -> None:
    text = " ".join(page("pretrain", "digits_smoke", everything=True, width=120).split())
    assert "--steps INT Training steps of the whole run. [300]" in text
    assert "Height and width of the model's images in pixels; a multiple of the patch. [32]" in text
    assert "--data.augment.flip Mirror half of the images, left to right. [off]" in text


def test_choices_that_do_not_fit_beside_their_flag_are_below_it() -> None:
    text = page("pretrain", "digits_smoke", everything=True, width=80)
    choices = "{inception,random_resized,resize_crop,short_side_crop,simple_random,none}"
    assert f"  --data.augment.crop\n      {choices}\n" in text
    assert f"  --data.augment.crop {choices}\n" in page("pretrain", "digits_smoke", everything=True, width=100)


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "completion"])
def test_examples_are_commands_that_would_run(stage: str) -> None:
    for example in STAGES[stage].examples:
        first, *given_words = example.replace("'", "").split()
        assert first == stage
        second, *words = second_word_first(stage, given_words, is_help=False)
        if second.endswith(".yaml"):
            continue
        job = default_job(stage, second)
        values_of(words, list(flags_of(job)), command=(stage, ""))
        given = {word for word in words if word.startswith("--")}
        assert {flag.name for flag in required_flags(list(flags_of(job)), STAGES[stage].required)} <= given


@every_fault
def test_every_recipe_has_commands_that_give_what_is_required() -> Iterator[str]:
    for stage in WITH_RECIPES:
        for word in words_of(stage):
            commands = commands_of(stage, word)
            if (
                not commands
                or "patchline " + commands[0].split(" --")[0] not in page(stage, word).partition("examples:")[2]
            ):
                yield f"patchline {stage} {word} --help has no example of itself"
            flags = list(flags_of(default_job(stage, word)))
            for command in commands:
                given = values_of(shlex.split(command)[2:], flags, command=(stage, word))
                for flag in required_flags(flags, STAGES[stage].required):
                    if flag.name not in given:
                        yield f"the command {command!r} lacks {flag.name}"


@pytest.mark.parametrize("module", [pretrain, finetune, pack])
def test_only_recipes_have_flags_of_their_own(module: ModuleType) -> None:
    assert set(module.COMMAND_FLAGS) - {""} <= set(module.RECIPES)


def test_long_commands_are_cut_where_a_shell_takes_them_for_one() -> None:
    text = page("finetune", "digits_48")
    assert "--data.url URL \\\n      --run-dir DIR" in text or "URL --run-dir DIR" in text
    joined = text.replace(" \\\n     ", "")
    assert (
        "patchline finetune digits_48 --initial.weights runs/digits/weights --data.url data/digits --run-dir" in joined
    )


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("120", 120), ("30", 60), ("400", 140)])
def test_pages_are_as_wide_as_the_terminal_within_reason(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert pages.columns() == width


def test_a_record_is_told_from_a_recipe() -> None:
    job = default_job("pretrain", "digits_smoke")
    text = pages.of_job("pretrain", "run/job.yaml", job, about="", everything=False, width=80)
    assert "Pre-train; the same command resumes the run." in text
