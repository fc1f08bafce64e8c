"""The ImageNet recipes compared with the paper's Table 3, written down independently, and the sizes of the datasets."""

import pytest

from jobs.recipes import paper_images
from jobs.recipes.paper_imagenet import RECIPES
from jobs.recipes.paper_images import PaperDataset

# recipe, steps (epochs x 14.2 M / 4096), clipping
I21K = [
    ("vit_b16_i21k", 312_012, 0.0),
    ("vit_b32_i21k", 312_012, 0.0),
    ("vit_l16_i21k", 312_012, 0.0),
    ("vit_l16_i21k_30ep", 104_004, 0.0),
    ("vit_l32_i21k", 312_012, 0.0),
    ("vit_h14_i21k", 312_012, 1.0),
]
I1K = ["vit_b16_i1k", "vit_b32_i1k", "vit_l16_i1k", "vit_l32_i1k"]


@pytest.mark.parametrize(("name", "steps", "clip_norm"), I21K)
def test_imagenet_21k(name: str, steps: int, clip_norm: float) -> None:
    job = RECIPES[name]()
    assert (job.steps, job.global_batch, job.clip_norm, job.loss) == (steps, 4096, clip_norm, "sigmoid")
    schedule = job.schedule
    assert (schedule.learning_rate, schedule.decay, schedule.final_learning_rate) == (1e-3, "linear", 1e-5)
    assert schedule.warmup_steps == 10_000
    assert (job.optimizer.weight_decay, job.optimizer.decay_scale, job.model.dropout) == (0.03, "rate", 0.1)
    assert (job.model.representation, job.model.head_bias, job.model.pooling) == (True, -10.0, "token")
    assert job.model.name == name.removesuffix("_30ep").removesuffix("_i21k")


@pytest.mark.parametrize("name", I1K)
def test_imagenet_1k(name: str) -> None:
    job = RECIPES[name]()
    assert (job.steps, job.global_batch, job.clip_norm) == (93_835, 4096, 1.0)
    assert (job.schedule.learning_rate, job.schedule.decay, job.schedule.warmup_steps) == (3e-3, "cosine", 10_000)
    assert (job.schedule.final_learning_rate, job.optimizer.weight_decay, job.model.dropout) == (0.0, 0.3, 0.1)
    assert (job.model.representation, job.model.head_bias, job.loss) == (True, -6.9, "sigmoid")


def test_no_row_is_missing() -> None:
    assert set(RECIPES) == {row[0] for row in I21K} | set(I1K)


def test_the_one_that_is_ours_says_so() -> None:
    assert "OURS" in (RECIPES["vit_h14_i21k"].__doc__ or "").splitlines()[0]


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        *(("vit_b16_i21k", "83.97"), ("vit_b32_i21k", "81.28"), ("vit_l16_i21k", "85.15"), ("vit_l32_i21k", "80.99")),
        *(("vit_h14_i21k", "85.13"), ("vit_h14_i21k", "88.70")),
        *(("vit_b16_i1k", "77.91"), ("vit_b32_i1k", "73.38"), ("vit_l16_i1k", "76.53"), ("vit_l32_i1k", "71.16")),
    ],
)
def test_expected_values_are_those_of_table_5(name: str, figure: str) -> None:
    assert f"{figure} %" in " ".join((RECIPES[name].__doc__ or "").split())


@pytest.mark.parametrize(
    ("data", "num_images", "num_classes"),
    [
        pytest.param(paper_images.JFT, 303_000_000, 18_291, id="the paper: 303 M images, 18 k classes"),
        pytest.param(paper_images.IMAGENET_21K, 14_200_000, 21_843, id="the published heads' classes"),
        pytest.param(paper_images.IMAGENET_21K_AUGREG, 14_148_800, 21_843, id="big_vision: full[51200:]"),
        pytest.param(paper_images.IMAGENET_1K, 1_281_167, 1000, id="ILSVRC 2012's training set"),
    ],
)
def test_sizes_of_the_papers_datasets(data: PaperDataset, num_images: int, num_classes: int) -> None:
    assert (data.num_images, data.num_classes) == (num_images, num_classes)
