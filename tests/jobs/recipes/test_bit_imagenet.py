"""ResNet-18 and 34 by BiT-S's values, written down independently ("Big Transfer", section 3.3)."""

import pytest

from jobs.recipes.bit_imagenet import RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_bit_s(name: str) -> None:
    """0.03 for 256 images is 0.48 for 4096; 28,151 steps are 90 epochs, 9,383 are 30."""
    job = RECIPES[name]()
    assert (job.model.name, job.model.image_size, job.loss) == (name.removesuffix("_i1k"), 224, "softmax")
    assert (job.steps, job.global_batch, job.clip_norm) == (28_151, 4096, 0.0)
    assert (job.optimizer.name, job.optimizer.momentum, job.optimizer.weight_decay) == ("sgd", 0.9, 1e-4)
    assert (job.schedule.decay, job.schedule.warmup_steps) == ("staircase", 5_000)
    assert job.schedule.learning_rate == pytest.approx(0.48)
    assert job.schedule.stair_steps == (9_383, 18_767, 25_023)
