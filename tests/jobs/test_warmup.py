"""The warm-up of a run that is shorter than its recipe: as words, as the fields of a YAML job, and as commands."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.recipes.pretrain import digits_smoke
from jobs.warmup import scaled_warmup, warmup_in_fields, warmup_in_words
from pipeline.training.schedule import ScheduleConfig
from tests.rigs.processes import patchline
from tests.rigs.training import TINY

RECIPE = digits_smoke()  # 30 of 300 steps
CONSTANT = replace(RECIPE, schedule=ScheduleConfig(decay="constant", warmup_steps=30))
NOTE = "warm-up scaled from 30 to {} steps: the run has {} of the recipe's 300 steps"


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), (3, 0), (6, 1), (14, 1), (16, 2), (150, 15), (299, 30), (300, 30), (9000, 30)]
)
def test_the_share_of_the_run_is_the_recipes_and_never_longer(steps: int, warmup: int) -> None:
    assert scaled_warmup(RECIPE, steps=steps) == warmup


@pytest.mark.parametrize(
    ("words", "added", "note"),
    [
        pytest.param(["--steps", "3"], "0", NOTE.format(0, 3), id="too short for the recipe's own"),
        pytest.param(["--steps=150"], "15", NOTE.format(15, 150), id="in one word"),
        pytest.param(["--seed", "1", "--steps", "9", "--steps", "60"], "6", NOTE.format(6, 60), id="the last counts"),
        pytest.param(["--steps", "3", "--schedule.warmup-steps", "2"], "", "", id="the user's own"),
        pytest.param(["--schedule.warmup_steps=2", "--steps", "3"], "", "", id="with an underscore"),
        pytest.param(["--steps", "600"], "", "", id="longer"),
        pytest.param(["--steps", "300"], "", "", id="the recipe's length"),
        pytest.param(["--steps", "0"], "", "", id="no length: refused elsewhere"),
        pytest.param(["--steps", "many"], "", "", id="no number: refused elsewhere"),
        pytest.param(["--steps"], "", "", id="no value: refused elsewhere"),
        pytest.param(["--checkpoint.every-steps", "3"], "", "", id="another flag"),
        pytest.param([], "", "", id="nothing"),
    ],
)
def test_words(words: list[str], added: str, note: str) -> None:
    found, said = warmup_in_words(words, RECIPE)
    assert found == [*words, *(["--schedule.warmup-steps", added] if added else [])]
    assert said.partition(" (")[0] == note


def test_the_note_names_the_way_back_only_where_there_is_one() -> None:
    assert warmup_in_words(["--steps", "60"], RECIPE)[1].endswith(" (--schedule.warmup-steps 30 keeps it)")
    assert warmup_in_words(["--steps", "30"], RECIPE)[1].endswith(" steps"), "30 of 30 would be refused"
    assert warmup_in_words(["--steps", "30"], CONSTANT)[1].endswith(" keeps it)")


def test_words_of_a_job_inside_another() -> None:
    found, note = warmup_in_words(["--training.steps", "3"], RECIPE, prefix="training.")
    assert found == ["--training.steps", "3", "--training.schedule.warmup-steps", "0"]
    assert note == NOTE.format(0, 3)


@pytest.mark.parametrize(
    ("fields", "changed", "note"),
    [
        ({"steps": 3}, {"schedule": {"warmup_steps": 0}}, NOTE.format(0, 3)),
        (
            {"steps": 60, "schedule": {"learning_rate": 0.1}},
            {"schedule": {"learning_rate": 0.1, "warmup_steps": 6}},
            NOTE.format(6, 60),
        ),
        ({"steps": 60, "schedule": None}, {"schedule": {"warmup_steps": 6}}, NOTE.format(6, 60)),
        ({"steps": 3, "schedule": {"warmup_steps": 2}}, {}, ""),
        ({"steps": "3"}, {}, ""),
        ({"steps": 3, "schedule": "cosine"}, {}, ""),
        ({"seed": 3}, {}, ""),
    ],
)
def test_fields(fields: dict[str, Any], changed: dict[str, Any], note: str) -> None:
    found, said = warmup_in_fields(fields, RECIPE)
    assert found == fields | changed
    assert said.partition(" (")[0] == note


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
