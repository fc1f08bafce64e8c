"""The table of stages: every stage has a module with `run`, and a summary that fits a line."""

import importlib

import pytest

from jobs.stages import STAGES


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_is_a_module_with_run(name: str) -> None:
    stage = STAGES[name]
    module = importlib.import_module(f"jobs.{stage.module or name}")
    assert callable(module.run)
    assert 0 < len(stage.summary) <= 66
