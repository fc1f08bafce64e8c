"""The recipe that a record comes from."""

from dataclasses import replace
from typing import Any

import pytest

from jobs.nearest_recipe import Nearest, nearest
from jobs.record import Leaves, leaves_of
from jobs.resolve import recipe_job
from jobs.stages import WITH_SMOKE, recipes_of
from pipeline.models.config import ModelConfig


def record(job: Any) -> Leaves:
    return {f"job.{name}": text for name, text in leaves_of(job).items()}


@pytest.mark.parametrize("stage", WITH_SMOKE)
def test_every_recipe_is_found_again(stage: str) -> None:
    """Several may have the same fields."""
    for name in recipes_of(stage):
        for word in (name, f"{name}_smoke"):
            if word.count("_smoke") > 1:
                continue
            job = recipe_job(stage, word)
            moved = replace(job, run_dir="here", threads=3, data=replace(job.data, url="s3://a/b"))
            found = nearest(stage, record(moved))
            assert found.num_changed == 0
            assert leaves_of(recipe_job(stage, found.recipe)) == leaves_of(job)


def test_changes_are_counted() -> None:
    job = recipe_job("pretrain", "vit_b16_i21k")
    changed = replace(job, steps=7, seed=5, schedule=replace(job.schedule, warmup_steps=2))
    found = nearest("pretrain", record(changed))
    assert (found, found.words()) == (Nearest(recipe="vit_b16_i21k", num_changed=3), "vit_b16_i21k +3")
    assert nearest("pretrain", record(job)).words() == "vit_b16_i21k"


def test_a_record_of_another_kind_is_nobodys() -> None:
    leaves = {f"job.field_{number}": "x" for number in range(100)}
    assert nearest("pretrain", leaves).words() == "own"


def test_an_older_record_lacks_fields() -> None:
    leaves = record(recipe_job("pretrain", "digits_smoke"))
    older = {name: text for name, text in leaves.items() if not name.startswith(("job.guard", "job.hang"))}
    assert nearest("pretrain", older) == Nearest(recipe="digits_smoke", num_changed=0)


def test_the_model_counts() -> None:
    job = recipe_job("pretrain", "digits_smoke")
    assert isinstance(job.model, ModelConfig)
    wider = replace(job, model=replace(job.model, width=2 * (job.model.width or 1)))
    assert nearest("pretrain", record(wider)) == Nearest(recipe="digits_smoke", num_changed=1)
