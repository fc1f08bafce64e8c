"""The table of stages: every stage has a module whose `run` takes the job that the table names, read without torch."""

import importlib
from collections.abc import Iterator
from typing import get_type_hints

import pytest

from jobs.resolve import default_job
from jobs.settings import data, models, runs
from jobs.stages import COMMANDS, STAGES, job_class, recipes_of
from tests.rigs.faults import differs, every_fault

# Training's settings are in pipeline/training/settings/job.py; the other two stages have a field each.
ELSEWHERE = ("pretrain", "finetune", "example", "completion")


@every_fault
def test_a_command_is_a_module_with_run() -> Iterator[str]:
    for name, command in COMMANDS.items():
        if not callable(getattr(importlib.import_module(command.module), "run", None)):
            yield f"{name}: {command.module} has no function run"
        if not 0 < len(command.summary) <= 66:
            yield f"{name}: its summary has {len(command.summary)} letters, allowed: 1 to 66"


@every_fault
def test_run_takes_the_job_of_the_table() -> Iterator[str]:
    for name, stage in STAGES.items():
        run = getattr(importlib.import_module(stage.module), "run", None)
        taken = get_type_hints(run).get("job") if run else None
        yield from differs(f"{name}: the type of what {stage.module}.run takes as job", taken, job_class(name))


@every_fault
def test_recipes_return_the_job_of_the_table() -> Iterator[str]:
    for stage in (name for name in STAGES if STAGES[name].recipes):
        for name in recipes_of(stage):
            yield from differs(f"{stage} {name}: the type of the job", type(default_job(stage, name)), job_class(stage))


@pytest.mark.parametrize("stage", [name for name in STAGES if name not in ELSEWHERE])
def test_the_settings_of_a_stage_are_with_those_of_its_kind(stage: str) -> None:
    module, name = STAGES[stage].job
    assert module in (data.__name__, models.__name__, runs.__name__)
    assert getattr(importlib.import_module(STAGES[stage].module), name) is job_class(stage)
