"""The JFT recipes compared with the paper's Table 3, written down independently."""

import inspect

import pytest

from jobs.recipes.paper_jft import RECIPES

# recipe, epochs, learning rate: steps are epochs x 303,000,000 / 4096.
TABLE_3 = [
    ("vit_h14_jft", 14, 3e-4),
    ("vit_l16_jft", 14, 4e-4),
    ("vit_l16_jft_7ep", 7, 4e-4),
    ("vit_l32_jft", 7, 6e-4),
    ("vit_b16_jft", 7, 8e-4),
    ("vit_b32_jft", 7, 8e-4),
    ("r50_vit_l16_jft", 14, 4e-4),
    ("r50_vit_l16_jft_7ep", 7, 4e-4),
    ("r50_vit_l32_jft", 7, 2e-4),
    ("r50_vit_b16_jft", 7, 8e-4),
    ("r50_vit_b32_jft", 7, 8e-4),
    ("bit_r50x1_jft", 7, 1e-3),
    ("bit_r50x2_jft", 7, 1e-3),
    ("bit_r101x1_jft", 7, 8e-4),
    ("bit_r152x1_jft", 7, 6e-4),
    ("bit_r152x2_jft", 7, 6e-4),
    ("bit_r152x2_jft_14ep", 14, 6e-4),
    ("bit_r200x3_jft", 14, 6e-4),
]


@pytest.mark.parametrize(("name", "epochs", "rate"), TABLE_3)
def test_a_row_of_table_3(name: str, epochs: int, rate: float) -> None:
    job = RECIPES[name]()
    assert job.steps == {7: 517_822, 14: 1_035_645}[epochs]
    assert (job.global_batch, job.clip_norm, job.loss) == (4096, 0.0, "sigmoid")
    assert (job.schedule.learning_rate, job.schedule.decay, job.schedule.warmup_steps) == (rate, "linear", 10_000)
    assert (job.optimizer.name, job.optimizer.beta1, job.optimizer.beta2) == ("adamw", 0.9, 0.999)
    assert (job.optimizer.weight_decay, job.optimizer.decay_scale) == (0.1, "rate")
    assert (job.model.name, job.model.image_size, job.model.dropout) == (
        name.removesuffix("_7ep").removesuffix("_14ep").removesuffix("_jft"),
        224,
        0.0,
    )
    assert (job.model.head_bias, job.model.representation) == (-10.0, not name.startswith("bit"))
    assert (job.data.augment.crop, job.data.augment.min_area, job.data.augment.flip) == ("inception", 0.05, True)
    assert (job.data.randaugment.num_ops, job.data.mixup.alpha) == (0, 0.0)


def test_no_row_is_missing() -> None:
    assert set(RECIPES) == {name for name, _, _ in TABLE_3}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_it_costs(name: str) -> None:
    assert "Cost: " in (inspect.getdoc(RECIPES[name]) or "")


def test_what_is_not_published_is_said() -> None:
    marked = {name for name, recipe in RECIPES.items() if "[unverified]" in (recipe.__doc__ or "")}
    assert marked == {"bit_r200x3_jft"}


# Table 6: ImageNet after fine-tuning at 384 px.
TABLE_6 = [
    *(("vit_b32_jft", "80.73"), ("vit_b16_jft", "84.15"), ("vit_l32_jft", "84.37"), ("vit_l16_jft_7ep", "86.30")),
    *(("vit_l16_jft", "87.12"), ("vit_h14_jft", "88.08"), ("bit_r50x1_jft", "77.54"), ("bit_r50x2_jft", "82.12")),
    *(("bit_r101x1_jft", "80.67"), ("bit_r152x1_jft", "81.88"), ("bit_r152x2_jft", "84.97")),
    *(("bit_r152x2_jft_14ep", "85.56"), ("bit_r200x3_jft", "87.22"), ("r50_vit_b32_jft", "84.90")),
    *(("r50_vit_b16_jft", "85.58"), ("r50_vit_l32_jft", "85.68"), ("r50_vit_l16_jft_7ep", "86.60")),
    ("r50_vit_l16_jft", "87.12"),
]


@pytest.mark.parametrize(("name", "figure"), TABLE_6)
def test_expected_values_are_those_of_table_6(name: str, figure: str) -> None:
    assert f"{figure} %" in " ".join((RECIPES[name].__doc__ or "").split())


def test_no_recipe_is_without_a_figure() -> None:
    assert {name for name, _ in TABLE_6} == set(RECIPES)
