"""`patchline finetune` needs initial weights; everything else is the same as in pre-training."""

from dataclasses import replace

import pytest

from jobs.finetune import run
from jobs.recipes.finetune import RECIPES
from pipeline.training.config import InitialConfig, TrainingJob
from shards.errors import UserError


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_needed(recipe: str) -> None:
    with pytest.raises(UserError, match=r"--initial\.weights is missing: .*RUN/weights"):
        run(RECIPES[recipe]())


@pytest.mark.parametrize(
    ("job", "message"),
    [
        pytest.param(TrainingJob(), "--run-dir is missing", id="no run directory"),
        pytest.param(TrainingJob(run_dir="x"), r"--data\.url is missing", id="no dataset"),
    ],
)
def test_what_pretraining_needs_is_needed_too(job: TrainingJob, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(replace(job, initial=InitialConfig(weights="somewhere"), device="cpu"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_fine_tune_as_the_paper_does(recipe: str) -> None:
    """Table 4 and appendix B.1.1: SGD with momentum 0.9, cosine decay, no weight decay, clipping at 1, a new head."""
    job = RECIPES[recipe]()
    assert (job.optimizer.name, job.optimizer.momentum, job.optimizer.weight_decay) == ("sgd", 0.9, 0.0)
    assert (job.schedule.decay, job.clip_norm, job.initial.new_head) == ("cosine", 1.0, True)
    assert job.model.image_size > 32
