"""The fine-tuning recipes compared with the paper's Table 4 and section 4.1, written down independently."""

import inspect

import pytest

from jobs.recipes.paper_finetune import RECIPES

# recipe, model, pixels, steps, warm-up, the sweep's rates, EMA decay
TABLE_4 = [
    ("imagenet_384", "vit_b16", 384, 20_000, 500, (0.003, 0.01, 0.03, 0.06), 0.0),
    ("imagenet_518_h14", "vit_h14", 518, 20_000, 500, (0.003, 0.01, 0.03, 0.06), 0.9999),
    ("imagenet_512_l16", "vit_l16", 512, 20_000, 500, (0.003, 0.01, 0.03, 0.06), 0.9999),
    ("cifar10", "vit_b16", 384, 10_000, 500, (0.001, 0.003, 0.01, 0.03), 0.0),
    ("cifar100", "vit_b16", 384, 10_000, 500, (0.001, 0.003, 0.01, 0.03), 0.0),
    ("pets", "vit_b16", 384, 500, 100, (0.001, 0.003, 0.01, 0.03), 0.0),
    ("flowers", "vit_b16", 384, 500, 100, (0.001, 0.003, 0.01, 0.03), 0.0),
    ("vtab", "vit_b16", 384, 2500, 500, (0.01,), 0.0),
]


@pytest.mark.parametrize(("name", "model", "pixels", "steps", "warmup", "rates", "average"), TABLE_4)
def test_a_row_of_table_4(
    name: str, model: str, pixels: int, steps: int, warmup: int, rates: tuple[float, ...], average: float
) -> None:
    job = RECIPES[name]()
    assert (job.model.name, job.model.image_size, job.steps, job.global_batch) == (model, pixels, steps, 512)
    assert (job.optimizer.name, job.optimizer.momentum, job.optimizer.weight_decay) == ("sgd", 0.9, 0.0)
    assert (job.schedule.decay, job.schedule.warmup_steps, job.schedule.final_learning_rate) == ("cosine", warmup, 0.0)
    assert job.schedule.learning_rate in rates
    assert (job.clip_norm, job.loss, job.label_smoothing, job.ema_decay) == (1.0, "softmax", 0.0, average)
    assert (job.initial.new_head, job.model.representation, job.model.head_bias) == (True, False, 0.0)


@pytest.mark.parametrize(("name", "short_side"), [("imagenet_518_h14", 604), ("imagenet_512_l16", 597)])
def test_evaluation_at_a_higher_resolution_keeps_the_proportion_448_to_384(name: str, short_side: int) -> None:
    job = RECIPES[name]()
    assert job.evaluation.transform.mode == "central_crop"
    assert job.evaluation.transform.short_side == short_side == round(job.model.image_size * 448 / 384)


def test_no_row_is_missing() -> None:
    assert set(RECIPES) == {row[0] for row in TABLE_4}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_where_it_comes_from_and_how_to_run_it(name: str) -> None:
    assert RECIPES[name].__name__ == name
    said = inspect.getdoc(RECIPES[name]) or ""
    assert all(word in said for word in ("Source: ", "Expected", f"patchline finetune {name} --initial.weights"))
