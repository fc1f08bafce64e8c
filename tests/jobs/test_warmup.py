"""The warm-up of a run that is shorter than its recipe or extended, and its use by commands."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from jobs.arguments import values_of
from jobs.fitted import with_warmup
from jobs.flags import flags_of
from jobs.models.evaluate import EvaluateJob
from jobs.recipes.pretrain import digits_smoke
from jobs.recipes.shorter import scaled, shortened
from pipeline.training.settings.schedule import ScheduleConfig
from tests.rigs.processes import patchline
from tests.rigs.training import TINY

RECIPE = digits_smoke()  # 30 of 300 steps
CONSTANT = replace(RECIPE, schedule=ScheduleConfig(decay="constant", warmup_steps=30))
FLAGS = list(flags_of(RECIPE))
NOTE = "warm-up scaled from 30 to {} steps: the run has {} of the recipe's 300 steps"


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), (3, 0), (6, 1), (14, 1), (16, 2), (150, 15), (299, 30), (300, 30), (9000, 30)]
)
def test_the_share_of_the_run_is_the_recipes_and_never_longer(steps: int, warmup: int) -> None:
    job, note = scaled(RECIPE, steps=steps, keep="")
    assert job == replace(RECIPE, schedule=replace(RECIPE.schedule, warmup_steps=warmup))
    assert bool(note) == (warmup != 30)


@pytest.mark.parametrize(
    ("words", "warmup", "note"),
    [
        pytest.param(["--steps", "3"], 0, NOTE.format(0, 3), id="too short for the recipe's own"),
        pytest.param(["--steps", "6"], 1, NOTE.format(1, 6).replace("1 steps", "1 step"), id="one step of it"),
        pytest.param(["--steps=150"], 15, NOTE.format(15, 150), id="in one word"),
        pytest.param(["--seed", "1", "--steps", "9", "--steps", "60"], 6, NOTE.format(6, 60), id="the last counts"),
        pytest.param(["--steps", "3", "--schedule.warmup-steps", "2"], 30, "", id="the user's own"),
        pytest.param(["--schedule.warmup_steps=2", "--steps", "3"], 30, "", id="with an underscore"),
        pytest.param(["--steps", "600"], 30, "", id="longer"),
        pytest.param(["--steps", "300"], 30, "", id="the recipe's length"),
        pytest.param(["--checkpoint.every-steps", "3"], 30, "", id="another flag"),
        pytest.param([], 30, "", id="nothing"),
    ],
)
def test_words(words: list[str], warmup: int, note: str) -> None:
    job, said = with_warmup("pretrain", RECIPE, values_of(words, FLAGS, command=""))
    assert (job.schedule.warmup_steps, said.partition(" (")[0]) == (warmup, note)
    assert job.steps == 300, "the words' own to change"


def test_the_note_names_the_way_back_only_where_there_is_one() -> None:
    assert with_warmup("pretrain", RECIPE, {"--steps": 60})[1].endswith(" (--schedule.warmup-steps 30 keeps it)")
    assert with_warmup("pretrain", RECIPE, {"--steps": 30})[1].endswith(" steps"), "30 of 30 would be refused"
    assert with_warmup("pretrain", CONSTANT, {"--steps": 30})[1].endswith(" keeps it)")


def test_other_jobs_stay_as_they_are() -> None:
    assert with_warmup("evaluate", EvaluateJob(), {"--steps": 3}) == (EvaluateJob(), "")


@pytest.mark.parametrize(
    ("recorded", "more", "warmup"),
    [
        pytest.param("stage: pretrain\njob: {schedule: {warmup_steps: 10}}", [], 10, id="shorter when it began"),
        pytest.param(
            "stage: pretrain\njob: {schedule: {warmup_steps: 10}}",
            ["--schedule.warmup-steps", "5"],
            30,
            id="the user's own, which the run refuses",
        ),
        pytest.param("stage: pretrain\njob: {schedule: {warmup_steps: 400}}", [], 30, id="longer than the recipe"),
        pytest.param("stage: pretrain\njob: {schedule: {}}", [], 30, id="a record without it"),
        pytest.param("job: [", [], 30, id="no YAML"),
        pytest.param("job: {schedule: {warmup_steps: [10]}}", [], 30, id="a list for a number"),
        pytest.param(f"job: {{schedule: {{warmup_steps: {'9' * 5000}}}}}", [], 30, id="an endless number"),
        pytest.param("a: &a [*a]\njob: {schedule: {warmup_steps: 10}}", [], 30, id="a list in itself"),
        pytest.param(None, [], 30, id="no record"),
    ],
)
def test_a_run_that_is_extended_keeps_its_warmup(
    tmp_path: Path, recorded: str | None, more: list[str], warmup: int
) -> None:
    if recorded is not None:
        (tmp_path / "job.yaml").write_text(recorded)
    words = ["--steps", "200", "--run-dir", str(tmp_path), *more]
    job, note = with_warmup("pretrain", RECIPE, values_of(words, FLAGS, command=""), extends=True)
    assert job.schedule.warmup_steps == warmup
    said = f"warm-up {warmup} steps, as the run in {tmp_path} began (the recipe: 30)"
    assert note == ("" if warmup == 30 else said)
    by_file = with_warmup(
        "pretrain", replace(RECIPE, run_dir=str(tmp_path)), values_of(more, FLAGS, command=""), extends=True
    )
    assert (by_file[0].schedule, by_file[1]) == (job.schedule, note), "and where a YAML job names the directory"


@pytest.mark.parametrize(
    ("recorded_steps", "warmup"),
    [pytest.param(60, 9, id="the same length"), pytest.param(50, 6, id="another, which the run refuses")],
)
def test_the_same_command_keeps_the_warmup_that_its_run_has(tmp_path: Path, recorded_steps: int, warmup: int) -> None:
    """If the run was extended, or started by an older version."""
    record = f"stage: pretrain\njob: {{steps: {recorded_steps}, schedule: {{warmup_steps: 9}}}}"
    (tmp_path / "job.yaml").write_text(record)
    job, _ = with_warmup("pretrain", RECIPE, {"--steps": 60, "--run-dir": str(tmp_path)})
    assert job.schedule.warmup_steps == warmup


@pytest.mark.parametrize(
    ("steps", "short"), [(300, (300, 30, 100)), (400, (300, 30, 100)), (20, (20, 2, 7)), (1, (1, 0, 0))]
)
def test_the_first_steps_have_a_cooldown_in_proportion(steps: int, short: tuple[int, int, int]) -> None:
    job = shortened(replace(RECIPE, schedule=replace(RECIPE.schedule, cooldown_steps=100)), steps=steps)
    assert (job.steps, job.schedule.warmup_steps, job.schedule.cooldown_steps) == short


def test_a_short_command_warms_up_in_proportion_and_says_so(digits_url: str, tmp_path: Path) -> None:
    without = [word for pair in zip(TINY[::2], TINY[1::2], strict=True) for word in pair if "warmup" not in pair[0]]
    words = [*without, "--steps", "3", "--data.url", digits_url, "--run-dir", str(tmp_path / "run")]
    ended = patchline("pretrain", "digits_smoke", *words, "--model.num-classes", "12")
    assert ended.code == 0, ended.errors
    assert ended.errors.count(NOTE.format(0, 3)) == 1
    job = yaml.safe_load((tmp_path / "run" / "job.yaml").read_text())["job"]
    assert (job["steps"], job["schedule"]["warmup_steps"]) == (3, 0)
    said = "the data has 10 classes, the model 12: 2 of its outputs never have an image"
    assert ended.errors.count(said) == 1
    assert ended.errors.index(said) < ended.errors.index("from scratch"), "before the first step"


def test_a_plan_of_fewer_steps_needs_no_word_about_the_warmup() -> None:
    ended = patchline("plan", "digits_smoke", "--training.steps", "3")
    assert ended.code == 0, ended.errors
    assert "3 of 128 images" in ended.output


def test_both_stated_are_refused_as_they_stand() -> None:
    ended = patchline("pretrain", "digits_smoke", "--steps", "3", "--schedule.warmup-steps", "30")
    assert ended.code == 2
    assert "schedule.warmup_steps is 30, not below the 3 steps" in ended.errors
