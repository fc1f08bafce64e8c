"""The rules that all fine-tuning recipes share, against the published files, and AugReg's fine-tuning recipes, compared
with big_vision's transfer.py, written down independently."""

import inspect

import pytest

from jobs.recipes.augreg_finetune import RECIPES
from jobs.recipes.paper_finetune import dropout_of, warmup_steps_of

# recipe, crop, rate, steps, warm-up, expected (%)
TRANSFER = [
    ("imagenet_384_augreg", "inception", 0.03, 20_000, 500, "83.27"),
    ("cifar10_augreg", "short_side_crop", 0.003, 10_000, 500, "98.55"),
    ("cifar100_augreg", "short_side_crop", 0.01, 10_000, 500, "91.35"),
    ("pets_augreg", "inception", 0.003, 500, 100, "93.78"),
    ("flowers_augreg", "inception", 0.003, 500, 100, "99.43"),
]


@pytest.mark.parametrize(
    ("num_images", "steps"),
    [
        pytest.param(1000, 100, id="VTAB-1k"),
        pytest.param(3680, 100, id="Pets"),
        pytest.param(19_999, 100, id="the largest small set"),
        pytest.param(20_000, 500, id="the smallest medium set"),
        pytest.param(1_281_167, 500, id="ImageNet"),
    ],
)
def test_warm_up_is_bits_rule(num_images: int, steps: int) -> None:
    assert warmup_steps_of(num_images) == steps


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        *(("vit_l16", 0.1), ("vit_h14", 0.1), ("r50_vit_b16", 0.1), ("r50_vit_l32", 0.1)),
        *(("vit_b16", 0.0), ("vit_b32", 0.0), ("vit_l32", 0.0)),
    ],
)
def test_dropout_is_that_of_the_published_models_py(name: str, rate: float) -> None:
    assert dropout_of(name) == rate


@pytest.mark.parametrize(("name", "crop", "rate", "steps", "warmup", "expected"), TRANSFER)
def test_a_row_of_transfer_py(name: str, crop: str, rate: float, steps: int, warmup: int, expected: str) -> None:
    job = RECIPES[name]()
    assert (job.model.name, job.model.image_size, job.model.dropout) == ("vit_b32", 384, 0.0)
    assert (job.data.augment.crop, job.schedule.learning_rate) == (crop, rate)
    assert (job.steps, job.schedule.warmup_steps, job.global_batch) == (steps, warmup, 512)
    transform = job.evaluation.transform
    assert (transform.mode, transform.short_side, transform.filter) == ("central_crop", 448, "area")
    assert f"Expected: {expected} %" in (inspect.getdoc(RECIPES[name]) or "")


def test_no_row_is_missing() -> None:
    assert set(RECIPES) == {row[0] for row in TRANSFER}
    assert all(RECIPES[name].__name__ == name for name in RECIPES)
