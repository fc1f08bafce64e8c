"""The jobs around models: they are read without torch, and stage modules hand them on."""

import importlib

import pytest

from jobs import model_jobs
from jobs.stages import STAGES


@pytest.mark.parametrize("stage", ["evaluate", "fewshot", "plan", "weights", "import", "export", "demo"])
def test_a_stage_takes_its_job(stage: str) -> None:
    module, name = STAGES[stage].job
    assert module == model_jobs.__name__
    assert getattr(importlib.import_module(STAGES[stage].module), name) is getattr(model_jobs, name)
