"""The jobs around models: they are read without torch, and stage modules hand them on."""

import importlib

import pytest

from jobs import model_jobs
from jobs.stages import STAGES


@pytest.mark.parametrize("stage", ["evaluate", "plan", "import", "export", "demo"])
def test_a_stage_takes_its_job(stage: str) -> None:
    module = importlib.import_module(f"jobs.{STAGES[stage].module or stage}")
    name = f"{stage.capitalize()}Job"
    assert getattr(module, name) is getattr(model_jobs, name)
