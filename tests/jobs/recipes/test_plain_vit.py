"""The plain ViT's recipes compared with big_vision's vit_s16_i1k.py, written down independently."""

from dataclasses import replace

import pytest

from jobs.recipes import paper_images
from jobs.recipes.plain_vit import RECIPES
from pipeline.models.config import ModelConfig
from pipeline.models.flops import num_parameters
from pipeline.training.settings.job import TrainingJob, scaled_by_rate

# recipe, steps (epochs x 1,268,355 / 1024), expected
IMAGENET = [("vit_s16_i1k_plain", 111_477, "76.5 %"), ("vit_s16_i1k_plain_300ep", 371_588, "80 %")]


def refuse_another_kind(job: TrainingJob) -> None:
    """AssertionError if the job has not what all plain recipes share."""
    model, optimizer, schedule = job.model, job.optimizer, job.schedule
    assert (model.pooling, model.representation, model.position) == ("average", True, "sincos2d")
    assert (model.head_bias, model.dropout, model.stochastic_depth) == (0.0, 0.0, 0.0)
    assert (job.loss, job.label_smoothing, job.clip_norm) == ("softmax", 0.0, 1.0)
    assert job.data.mixup.alpha == 0.2
    assert (optimizer.name, optimizer.beta1, optimizer.beta2, optimizer.decay) == ("adamw", 0.9, 0.999, "kernels")
    assert (optimizer.weight_decay, optimizer.decay_scale) == (1e-4, "schedule")
    assert scaled_by_rate(optimizer, peak_rate=1e-3).weight_decay == pytest.approx(0.1)
    assert (schedule.learning_rate, schedule.decay, schedule.final_learning_rate) == (1e-3, "cosine", 0.0)


@pytest.mark.parametrize(("name", "steps", "expected"), IMAGENET)
def test_vit_s16_i1k(name: str, steps: int, expected: str) -> None:
    job = RECIPES[name]()
    refuse_another_kind(job)
    assert (job.steps, job.global_batch, job.schedule.warmup_steps) == (steps, 1024, 10_000)
    assert (job.model.name, job.model.image_size, job.model.size.width) == ("vit_s16", 224, 384)
    assert (job.data.held_out.share, job.data.subset.is_whole) == (0.01, True)
    assert (job.data.randaugment.num_ops, job.data.randaugment.magnitude) == (2, 10)
    augment, transform = job.data.augment, job.evaluation.transform
    assert (augment.crop, augment.min_area, augment.max_area, augment.flip) == ("inception", 0.05, 1.0, True)
    assert (transform.mode, transform.short_side, transform.filter) == ("central_crop", 0, "area")  # 0: 256 of 224
    assert job.evaluation.every_steps == 2500
    assert f"Expected: {expected} on the validation split" in (RECIPES[name].__doc__ or "")


def test_the_small_one_is_of_the_same_kind() -> None:
    job, source = RECIPES["cifar10_plain"](), RECIPES["vit_s16_i1k_plain"]()
    refuse_another_kind(job)
    assert job.data.randaugment.num_ops == 0, "its shifts are in pixels of 224"
    assert job.steps == round(90 * 50_000 / 256)
    assert job.schedule.warmup_steps / job.steps == pytest.approx(source.schedule.warmup_steps / source.steps, rel=0.01)
    assert "OURS" in (RECIPES["cifar10_plain"].__doc__ or "").splitlines()[0]


def test_parameters_are_those_of_s16_without_token_and_table() -> None:
    plain = replace(RECIPES["vit_s16_i1k_plain"]().model, num_classes=1000)
    usual = ModelConfig(name="vit_s16", num_classes=1000, representation=True)
    assert num_parameters(usual) - num_parameters(plain) == (1 + 197) * 384


def test_99_percent_are_rounded_as_by_tfds() -> None:
    assert paper_images.IMAGENET_1K_99.num_images == round(0.99 * paper_images.IMAGENET_1K.num_images)


def test_no_row_is_missing() -> None:
    assert set(RECIPES) == {name for name, _, _ in IMAGENET} | {"cifar10_plain"}
    assert all(RECIPES[name].__name__ == name for name in RECIPES)
