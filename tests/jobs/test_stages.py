"""The table of stages: every stage has a module whose `run` takes the job that the table names, read without torch."""

import importlib
from typing import get_type_hints

import pytest

from jobs import model_jobs
from jobs.stages import COMMANDS, RECIPE, STAGES, job_class, recipes_of


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_a_module_with_run(name: str) -> None:
    command = COMMANDS[name]
    assert callable(importlib.import_module(command.module).run)
    assert 0 < len(command.summary) <= 66


@pytest.mark.parametrize("name", STAGES)
def test_run_takes_the_job_of_the_table(name: str) -> None:
    run = importlib.import_module(STAGES[name].module).run
    assert get_type_hints(run)["job"] is job_class(name)


@pytest.mark.parametrize("name", [name for name, stage in STAGES.items() if stage.second == RECIPE])
def test_recipes_return_the_job_of_the_table(name: str) -> None:
    assert {type(recipe()) for recipe in recipes_of(name).values()} == {job_class(name)}


@pytest.mark.parametrize("stage", ["evaluate", "fewshot", "plan", "weights", "import", "export", "demo"])
def test_a_stage_takes_its_job(stage: str) -> None:
    module, name = STAGES[stage].job
    assert module == model_jobs.__name__
    assert getattr(importlib.import_module(STAGES[stage].module), name) is getattr(model_jobs, name)
