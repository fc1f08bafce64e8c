"""BiT's fine-tuning recipes compared with big_transfer's bit_hyperrule.py, written down independently."""

import pytest

from jobs.recipes.bit_finetune import RECIPES
from pipeline.training.settings.schedule import learning_rate

# recipe, pixels, resized to, steps, warm-up, mixup, steps and rates
SMALL = {0: 0.0, 50: 1.5e-3, 100: 3e-3, 200: 3e-3, 201: 3e-4, 300: 3e-4, 301: 3e-5, 401: 3e-6, 499: 3e-6}
MEDIUM = {0: 0.0, 250: 1.5e-3, 500: 3e-3, 3000: 3e-3, 3001: 3e-4, 6001: 3e-5, 9000: 3e-5, 9001: 3e-6, 9999: 3e-6}
LARGE = {0: 0.0, 499: 2.994e-3, 6000: 3e-3, 6001: 3e-4, 12_000: 3e-4, 12_001: 3e-5, 18_001: 3e-6, 19_999: 3e-6}
HYPER_RULE = [
    ("imagenet_bit", 480, 512, 20_000, 500, 0.1, LARGE),
    ("cifar10_bit", 128, 160, 10_000, 500, 0.1, MEDIUM),
    ("cifar100_bit", 128, 160, 10_000, 500, 0.1, MEDIUM),
    ("pets_bit", 480, 512, 500, 100, 0.0, SMALL),
    ("flowers_bit", 480, 512, 500, 100, 0.0, SMALL),
]


@pytest.mark.parametrize(("name", "pixels", "resized", "steps", "warmup", "mixup", "rates"), HYPER_RULE)
def test_a_row_of_the_hyper_rule(
    name: str, pixels: int, resized: int, steps: int, warmup: int, mixup: float, rates: dict[int, float]
) -> None:
    job = RECIPES[name]()
    assert (job.model.name, job.model.image_size, job.steps, job.global_batch) == ("bit_r50x1", pixels, steps, 512)
    assert (job.optimizer.name, job.optimizer.momentum, job.optimizer.weight_decay) == ("sgd", 0.9, 0.0)
    assert (job.clip_norm, job.loss, job.label_smoothing, job.data.mixup.alpha) == (0.0, "softmax", 0.0, mixup)
    augment = job.data.augment
    assert (augment.crop, augment.resize_pixels, augment.flip) == ("resize_crop", resized, True)
    assert (job.evaluation.transform.mode, job.schedule.warmup_steps) == ("resize", warmup)
    found = {step: learning_rate(step, config=job.schedule, num_steps=job.steps) for step in rates}
    assert found == pytest.approx(rates)


def test_no_row_is_missing() -> None:
    assert set(RECIPES) == {row[0] for row in HYPER_RULE}
