"""AugReg's pre-training compared with big_vision's vit_i21k.py and vit_i1k.py, and with the released checkpoints' file
names, written down independently."""

import inspect
import re

import pytest

from jobs.recipes import augreg
from pipeline.training.settings.job import TrainingJob, scaled_by_rate
from shards.config import SubsetConfig

RECIPES = augreg.RECIPES
# By the name of an augmentation: operations, magnitude, mixup.
AUGMENTATIONS = {
    "none": (0, 0, 0.0),
    "light1": (2, 0, 0.0),
    "light2": (2, 10, 0.2),
    "medium1": (2, 15, 0.2),
    "medium2": (2, 15, 0.5),
    "strong1": (2, 20, 0.5),
    "strong2": (2, 20, 0.8),
}
# model, width, augmentation
I21K = [
    ("vit_ti16", 192, "none"),
    ("vit_s32", 384, "none"),
    ("vit_s16", 384, "light1"),
    ("vit_b32", 768, "light2"),
    ("vit_b16", 768, "light2"),
    ("vit_l16", 1024, "medium2"),
]
I1K = [
    ("vit_ti16", 192, "light1"),
    ("vit_s32", 384, "medium1"),
    ("vit_s16", 384, "medium2"),
    ("vit_b32", 768, "medium2"),
    ("vit_b16", 768, "medium2"),
    ("vit_l16", 1024, "medium2"),
]
# model, file, accuracy on ImageNet after fine-tuning (%), or empty
RELEASED = [
    ("vit_l16", "L_16-i21k-300ep-lr_0.001-aug_strong1-wd_0.1-do_0.0-sd_0.0", "85.59"),
    ("vit_b16", "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0", "85.49"),
    ("vit_s16", "S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0", "83.73"),
    ("r50_vit_l32", "R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1", "85.99"),
    ("r26_vit_s32", "R26_S_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0", "83.85"),
    ("vit_ti16", "Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0", "78.22"),
    ("vit_b32", "B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0", "83.59"),
    ("vit_s32", "S_32-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0", "79.58"),
    ("r_vit_ti16", "R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0", "75.40"),
    ("vit_b8", "B_8-i21k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0", "85.58"),
    ("vit_s16", "S_16-i1k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0", ""),
    ("vit_b32", "B_32-i1k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.1-sd_0.1", ""),
    ("vit_b16", "B_16-i1k-300ep-lr_0.001-aug_strong2-wd_0.1-do_0.1-sd_0.1", ""),
]


def refuse_another_kind(job: TrainingJob, *, augmentation: str, is_i1k: bool) -> None:
    """AssertionError if the job lacks what all recipes on its data share."""
    data, schedule = job.data, job.schedule
    assert (data.randaugment.num_ops, data.randaugment.magnitude, data.mixup.alpha) == AUGMENTATIONS[augmentation]
    # 300 epochs of 14,148,800 or 1,268,355 images
    assert (job.steps, job.global_batch) == (92_897 if is_i1k else 1_036_289, 4096)
    assert data.subset == SubsetConfig(first=0 if is_i1k else 51_200), "what is not counted is not trained on"
    assert (job.loss, job.clip_norm, job.model.head_bias) == ("sigmoid", 1.0, -6.9 if is_i1k else -10.0)
    assert (schedule.learning_rate, schedule.decay, schedule.warmup_steps) == (1e-3, "cosine", 10_000)
    assert (schedule.final_learning_rate, data.held_out.share) == (0.0, 0.01 if is_i1k else 0.0)
    assert (job.optimizer.name, job.optimizer.decay_scale, job.optimizer.decay) == ("adamw", "schedule", "kernels")


def decay_of(job: TrainingJob) -> float:
    """Weight decay in PyTorch's terms, as in the checkpoints' names."""
    return scaled_by_rate(job.optimizer, peak_rate=job.schedule.learning_rate).weight_decay


@pytest.mark.parametrize(("model", "width", "augmentation"), I21K)
def test_vit_i21k(model: str, width: int, augmentation: str) -> None:
    job = augreg.RECIPES[f"{model}_i21k_augreg"]()
    refuse_another_kind(job, augmentation=augmentation, is_i1k=False)
    assert (job.model.name, job.model.pooling, job.model.representation) == (model, "average", False)
    assert (job.model.dropout, job.model.stochastic_depth) == (0.0, 0.0)
    assert job.model.size.width == width
    assert job.model.position_std == pytest.approx(width**-0.5)
    assert decay_of(job) == pytest.approx(0.1)


@pytest.mark.parametrize(("model", "width", "augmentation"), I1K)
def test_vit_i1k(model: str, width: int, augmentation: str) -> None:
    job = augreg.RECIPES[f"{model}_i1k_augreg"]()
    refuse_another_kind(job, augmentation=augmentation, is_i1k=True)
    assert (job.model.name, job.model.pooling, job.model.representation) == (model, "token", True)
    assert (job.model.dropout, job.model.stochastic_depth) == (0.0, 0.0)
    assert job.model.size.width == width
    assert job.model.position_std == pytest.approx(width**-0.5)
    assert decay_of(job) == pytest.approx(0.1)


@pytest.mark.parametrize(("model", "file", "accuracy"), RELEASED)
def test_a_recipe_is_what_the_name_of_its_file_says(model: str, file: str, accuracy: str) -> None:
    found = re.fullmatch(r".+-(i21k|i1k)-300ep-lr_0\.001-aug_(\w+)-wd_([\d.]+)-do_([\d.]+)-sd_([\d.]+)", file)
    assert found is not None
    dataset, augmentation, decay, dropout, depth = found.groups()
    name = f"{model}_{dataset}_augreg_released"
    job = RECIPES[name]()
    refuse_another_kind(job, augmentation=augmentation, is_i1k=dataset == "i1k")
    assert (job.model.name, job.model.pooling, job.model.representation) == (model, "token", False)
    assert (job.model.dropout, job.model.stochastic_depth) == (float(dropout), float(depth))
    assert decay_of(job) == pytest.approx(float(decay))
    said = inspect.getdoc(RECIPES[name]) or ""
    assert file in said
    assert (f"Expected: {accuracy} % on ImageNet" if accuracy else "no number") in said


def test_no_row_is_missing() -> None:
    own = {f"{row[0]}_i21k_augreg" for row in I21K} | {f"{row[0]}_i1k_augreg" for row in I1K}
    assert {name for name in RECIPES if not name.endswith("_released")} == own
    assert len(RECIPES) == len(own) + len(RELEASED)
