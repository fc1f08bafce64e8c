"""The fine-tuning recipes compared with the paper's Table 4 and section 4.1, written down independently."""

import inspect
from dataclasses import replace

import pytest

from jobs.recipes.paper_finetune import RECIPES

IMAGENET, OTHERS = (0.003, 0.01, 0.03, 0.06), (0.001, 0.003, 0.01, 0.03)
# recipe, model, pixels, steps, warm-up, the sweep's rates, EMA decay, dropout
TABLE_4 = [
    ("imagenet_384", "vit_b16", 384, 20_000, 500, IMAGENET, 0.0, 0.0),
    ("imagenet_518_h14", "vit_h14", 518, 20_000, 500, IMAGENET, 0.9999, 0.1),
    ("imagenet_518_h14_central_crop", "vit_h14", 518, 20_000, 500, IMAGENET, 0.9999, 0.1),
    ("imagenet_512_l16", "vit_l16", 512, 20_000, 500, IMAGENET, 0.9999, 0.1),
    ("imagenet_512_l16_central_crop", "vit_l16", 512, 20_000, 500, IMAGENET, 0.9999, 0.1),
    ("cifar10", "vit_b16", 384, 10_000, 500, OTHERS, 0.0, 0.0),
    ("cifar100", "vit_b16", 384, 10_000, 500, OTHERS, 0.0, 0.0),
    ("pets", "vit_b16", 384, 500, 100, OTHERS, 0.0, 0.0),
    ("flowers", "vit_b16", 384, 500, 100, OTHERS, 0.0, 0.0),
]
CODE = [("imagenet_384_code", 0.01), ("cifar10_code", 0.02), ("cifar100_code", 0.02)]
PAPER = ("imagenet_384_paper", "cifar10_paper", "cifar100_paper", "pets_paper", "flowers_paper")


@pytest.mark.parametrize(("name", "model", "pixels", "steps", "warmup", "rates", "average", "dropout"), TABLE_4)
def test_a_row_of_table_4(
    name: str,
    model: str,
    pixels: int,
    steps: int,
    warmup: int,
    rates: tuple[float, ...],
    average: float,
    dropout: float,
) -> None:
    job = RECIPES[name]()
    assert (job.model.name, job.model.image_size, job.steps, job.global_batch) == (model, pixels, steps, 512)
    assert (job.optimizer.name, job.optimizer.momentum, job.optimizer.weight_decay) == ("sgd", 0.9, 0.0)
    assert (job.schedule.decay, job.schedule.warmup_steps, job.schedule.final_learning_rate) == ("cosine", warmup, 0.0)
    assert job.schedule.learning_rate in rates
    assert (job.clip_norm, job.loss, job.label_smoothing, job.ema_decay) == (1.0, "softmax", 0.0, average)
    assert (job.initial.new_head, job.model.representation, job.model.head_bias) == (True, False, 0.0)
    assert (job.data.augment.crop, job.data.augment.flip, job.model.dropout) == ("inception", True, dropout)


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_variant_differs_from_the_codes_in_its_crop_alone(name: str) -> None:
    """Section 4.1 refers to BiT: resize to 448 x 448, random 384 x 384, flip; direct resize to evaluate."""
    paper, code = RECIPES[name](), RECIPES[name.removesuffix("_paper")]()
    assert (paper.data.augment.crop, paper.data.augment.flip) == ("resize_crop", True)
    assert (paper.evaluation.transform.mode, paper.evaluation) == ("resize", code.evaluation)
    assert replace(paper, data=replace(paper.data, augment=code.data.augment)) == code


@pytest.mark.parametrize(("name", "share"), CODE)
def test_the_codes_split_is_all_that_differs(name: str, share: float) -> None:
    """vit_jax/configs/common.py: train[:99%] of ImageNet, train[:98%] of CIFAR."""
    split, whole = RECIPES[name](), RECIPES[name.removesuffix("_code")]()
    assert split.data.held_out.share == share
    assert replace(split, data=replace(split.data, held_out=whole.data.held_out)) == whole


@pytest.mark.parametrize("name", ["imagenet_518_h14", "imagenet_512_l16"])
def test_evaluation_at_a_higher_resolution_is_a_direct_resize(name: str) -> None:
    """As in paper and code; ours, the central crop, keeps the proportion 448 to 384."""
    job, ours = RECIPES[name](), RECIPES[f"{name}_central_crop"]()
    assert (job.evaluation.transform.mode, job.evaluation.transform.filter) == ("resize", "bilinear")
    assert (ours.evaluation.transform.mode, ours.evaluation.transform.filter) == ("central_crop", "area")
    assert ours.evaluation.transform.short_side == round(ours.model.image_size * 448 / 384)
    assert replace(ours, evaluation=job.evaluation) == job
    assert "OURS" in (RECIPES[f"{name}_central_crop"].__doc__ or "").splitlines()[0]


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("imagenet_384", ("84.53", "85.05", "85.08")),
        ("imagenet_384_paper", ("83.97", "85.15", "85.13", "84.15", "87.12", "88.04")),
        ("imagenet_518_h14", ("88.55",)),
        ("imagenet_512_l16", ("87.76", "85.30")),
        ("cifar10", ("99.02", "99.14")),
        ("cifar100", ("92.06", "93.22", "92.30")),
        ("pets_paper", ("94.43", "97.56")),
        ("flowers_paper", ("99.38", "99.68")),
    ],
)
def test_expected_values_are_those_of_the_recipes_own_source(name: str, figures: tuple[str, ...]) -> None:
    """The README's for the code's images, Table 5's for the paper's, Table 2's for the high resolutions."""
    said = inspect.getdoc(RECIPES[name]) or ""
    assert [figure for figure in figures if f"{figure} %" not in said] == []
    assert not {"93.78", "99.43", "83.27", "98.55"} & set(said.split()), "those are of big_vision's images"


def test_no_row_is_missing() -> None:
    assert set(RECIPES) == {row[0] for row in TABLE_4} | {row[0] for row in CODE} | set(PAPER)
