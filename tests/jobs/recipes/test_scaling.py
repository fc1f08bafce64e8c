"""Recipes of "Scaling Vision Transformers" compared with big_vision's train_vit_g.py, written down independently."""

import pytest

from jobs.recipes.scaling import RECIPES
from pipeline.training.settings.job import scaled_by_rate
from pipeline.training.settings.schedule import learning_rate

SIZES = {"vit_g14_jft3b": (1408, 40, 6144, 16), "vit_bigg14_jft3b": (1664, 48, 8192, 16)}  # Table 2


@pytest.mark.parametrize("name", RECIPES)
def test_a_variant_of_train_vit_g(name: str) -> None:
    job = RECIPES[name]()
    size, model = job.model.size, job.model
    assert (size.width, size.depth, size.mlp_width, size.num_heads) == SIZES[name]
    assert (size.patch, model.image_size, model.pooling, model.head_bias) == (14, 224, "attention", -10.0)
    assert (model.representation, model.dropout, model.stochastic_depth) == (False, 0.0, 0.0)
    assert model.position_std == pytest.approx(1 / size.width**0.5)  # models/vit.py: normal(stddev=1/np.sqrt(width))
    assert (job.steps, job.global_batch, job.loss, job.clip_norm) == (1_000_000, 4096 * 4, "sigmoid", 1.0)
    decay = scaled_by_rate(job.optimizer, peak_rate=8e-4)
    assert decay.weight_decay == pytest.approx(0.03)
    assert (decay.head_decay, decay.decay, decay.first_moment) == (100.0, "kernels", "bf16")
    assert (decay.name, decay.beta1, decay.beta2) == ("adafactor", 0.9, 0.999)  # big_vision.scale_by_adafactor
    augment, transform = job.data.augment, job.evaluation.transform
    assert (augment.crop, augment.min_area, augment.flip) == ("inception", 0.05, True)
    assert (transform.mode, transform.filter, transform.short_side) == ("central_crop", "area", 0)  # 0: 256 of 224


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        pytest.param(5000, 4e-4, id="half of the warm-up"),
        pytest.param(10_000, 8e-4, id="its end"),
        pytest.param(40_000, 4e-4, id="1 / sqrt(1 + 30,000 / 10,000)"),
        pytest.param(950_000, 8e-4 / 95**0.5, id="the last step before the cooldown"),
        pytest.param(975_000, 0.5 * 8e-4 / 97.5**0.5, id="half of the cooldown"),
    ],
)
def test_the_schedule(step: int, rate: float) -> None:
    job = RECIPES["vit_g14_jft3b"]()
    assert learning_rate(step, config=job.schedule, num_steps=job.steps) == pytest.approx(rate, rel=1e-12)


def test_no_row_is_missing() -> None:
    assert set(RECIPES) == set(SIZES)
    assert all(RECIPES[name].__name__ == name for name in RECIPES)
