"""No recipe changes in silence: each is compared, fully resolved, with its frozen copy."""

import inspect
from typing import Any

import pytest

from jobs.record import read_record
from tests.jobs.recipes.freeze import ALL, FOLDER, RECIPES, path_of, resolved

HOW = "if the change is meant, say so in the changelog and run: python -m tests.jobs.recipes.freeze"


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_a_recipe_is_what_it_was(stage: str, name: str) -> None:
    path = path_of(stage, name)
    assert path.exists(), f"{stage} {name} is new; {HOW}"
    assert resolved(stage, name) == path.read_text(), f"patchline {stage} {name} is another run than before; {HOW}"


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_a_copy_is_a_record_of_the_recipe(stage: str, name: str) -> None:
    job: Any = RECIPES[stage][name]()
    assert read_record(path_of(stage, name), stage=stage, kind=type(job)) == job


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_a_recipe_says_where_it_is_from_and_how_it_is_run(stage: str, name: str) -> None:
    said = inspect.getdoc(RECIPES[stage][name]) or ""
    words = ("Source: ", "Expected") if stage in ("pretrain", "finetune") else ()
    assert [word for word in (*words, f"patchline {stage} {name} ") if word not in said] == []


def test_no_copy_is_of_a_recipe_that_is_gone() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {path_of(*one).name for one in ALL}, HOW
