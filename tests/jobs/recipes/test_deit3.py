"""DeiT III's recipes compared with the command lines of README_revenge.md, written down independently."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from jobs.recipes.deit3 import RECIPES
from jobs.recipes.deit3_finetune import RECIPES as FINETUNING
from pipeline.models.loss import classification_loss

ON_1K = [  # recipe, image size, learning rate, stochastic depth, accuracy
    ("deit3_s16_i1k", 224, 4e-3, 0.05, "81.4 %"),
    ("deit3_b16_i1k", 192, 3e-3, 0.2, "83.8 %"),
]
ON_21K = [("deit3_s16_i21k", 0.05, "83.1 %"), ("deit3_b16_i21k", 0.1, "85.7 %")]


@pytest.mark.parametrize(("name", "image_size", "rate", "drop_path", "accuracy"), ON_1K)
def test_imagenet_1k(name: str, image_size: int, rate: float, drop_path: float, accuracy: str) -> None:
    """--batch 256 (x 8) --epochs 800 --opt fusedlamb --unscale-lr --repeated-aug --weight-decay 0.05 --sched cosine
    --smoothing 0.0 --warmup-epochs 5 --mixup .8 --cutmix 1.0 --bce-loss --color-jitter 0.3 --ThreeAugment
    --eval-crop-ratio 1.0, min-lr 1e-5 by default."""
    job = RECIPES[name]()
    assert (job.model.image_size, job.model.stochastic_depth, job.model.dropout) == (image_size, drop_path, 0.0)
    assert (job.model.gelu, job.model.pooling, job.model.layer_norm_epsilon) == ("exact", "token", 1e-6)
    assert (job.model.layer_scale, job.model.registers, job.model.head_std) == (1e-4, 0, 0.02)
    assert (job.steps, job.global_batch, job.schedule.warmup_steps) == (500_000, 2048, 3125)
    assert (job.schedule.decay, job.schedule.final_learning_rate) == ("cosine", 1e-5)
    assert (job.loss, job.label_smoothing) == ("sigmoid", 0.0)
    assert (job.optimizer.name, job.schedule.learning_rate, job.optimizer.weight_decay) == ("lamb", rate, 0.05)
    assert (job.optimizer.beta1, job.optimizer.beta2, job.data.augment.repeats) == (0.9, 0.999, 3)
    augment, mixup = job.data.augment, job.data.mixup
    assert (mixup.alpha, mixup.cutmix_alpha, mixup.binary_targets) == (0.8, 1.0, True)
    assert (augment.three_augment, augment.color_jitter, augment.flip) == (True, 0.3, True)
    assert (augment.crop, augment.min_area, augment.max_area, augment.filter) == ("random_resized", 0.08, 1, "bicubic")
    transform = job.evaluation.transform
    assert (transform.mode, transform.short_side, transform.filter) == ("central_crop", image_size, "bicubic")
    assert job.model.stochastic_depth_rates == "uniform"
    assert accuracy in (RECIPES[name].__doc__ or "")


@pytest.mark.parametrize(("name", "drop_path", "accuracy"), ON_21K)
def test_imagenet_21k(name: str, drop_path: float, accuracy: str) -> None:
    """--epochs 240 --opt fusedlamb --lr 0.001 --no-repeated-aug --weight-decay 0.02
    --smoothing 0.1 --mixup 0 --cutmix 1.0 --color-jitter 0.3 --ThreeAugment --src,
    2048 images on 16 or 32 GPUs."""
    job = RECIPES[name]()
    assert (job.model.image_size, job.model.stochastic_depth) == (224, drop_path)
    assert (job.steps, job.global_batch) == (1_664_063, 2048)
    assert (job.loss, job.label_smoothing, job.data.augment.repeats) == ("softmax", 0.1, 1)
    assert (job.optimizer.name, job.schedule.learning_rate, job.optimizer.weight_decay) == ("lamb", 1e-3, 0.02)
    assert (job.clip_norm, job.optimizer.epsilon) == (1.0, 1e-8)
    augment, mixup = job.data.augment, job.data.mixup
    assert (mixup.alpha, mixup.cutmix_alpha, mixup.binary_targets) == (0.0, 1.0, False)
    assert (augment.crop, augment.filter, augment.three_augment) == ("simple_random", "bicubic", True)
    assert job.model.stochastic_depth_rates == "uniform"
    assert accuracy in (RECIPES[name].__doc__ or "")


def test_more_epochs_at_224_px() -> None:
    """--batch 64 (x 8) --lr 1e-5 --epochs 20 --weight-decay 0.1 --input-size 224 --smoothing 0.1 --warmup-epochs 5
    --opt adamw --mixup .8 --drop-path 0.2 --cutmix 1.0 --aa rand-m9-mstd0.5-inc1 --no-repeated-aug --finetune."""
    job = FINETUNING["imagenet_224_b16_deit3"]()
    assert (job.model.name, job.model.image_size, job.model.stochastic_depth) == ("vit_b16", 224, 0.2)
    assert (job.model.layer_scale, job.model.stochastic_depth_rates, job.model.gelu) == (1e-4, "uniform", "exact")
    assert (job.initial.new_head, job.initial.resample) == (False, "bicubic")
    assert (job.steps, job.global_batch, job.schedule.warmup_steps) == (20 * 2502, 512, 5 * 2502)
    assert (job.schedule.learning_rate, job.schedule.final_learning_rate) == (1e-5, 1e-5)
    assert (job.optimizer.name, job.optimizer.weight_decay, job.optimizer.epsilon) == ("adamw", 0.1, 1e-8)
    assert (job.loss, job.label_smoothing, job.clip_norm, job.data.augment.repeats) == ("softmax", 0.1, 0.0, 1)
    augment, mixup, randaugment = job.data.augment, job.data.mixup, job.data.randaugment
    assert (mixup.alpha, mixup.cutmix_alpha, mixup.binary_targets) == (0.8, 1.0, False)
    assert (randaugment.num_ops, randaugment.magnitude) == (2, 9)
    assert (augment.crop, augment.filter, augment.three_augment, augment.color_jitter) == (
        *("random_resized", "bicubic"),
        *(False, 0.0),
    )
    assert (job.evaluation.transform.mode, job.evaluation.transform.short_side) == ("central_crop", 224)


@pytest.mark.parametrize(("size", "drop_path", "accuracy"), [("s16", 0.05, "83.1 %"), ("b16", 0.15, "85.7 %")])
def test_imagenet_1k_after_21k(size: str, drop_path: float, accuracy: str) -> None:
    """--lr 0.0003 --epochs 50 and another --drop-path; all else as on ImageNet-21k."""
    recipe, before = FINETUNING[f"imagenet_224_{size}_deit3_i21k"], RECIPES[f"deit3_{size}_i21k"]()
    job = recipe()
    assert (job.model.name, job.model.stochastic_depth, job.initial.new_head) == (f"vit_{size}", drop_path, True)
    assert (job.steps, job.schedule.learning_rate, job.schedule.warmup_steps) == (31_250, 3e-4, 3125)
    kept = replace(
        job,
        model=replace(job.model, stochastic_depth=before.model.stochastic_depth),
        steps=before.steps,
        schedule=before.schedule,
    )
    assert kept == before
    assert accuracy in (recipe.__doc__ or "")


def test_a_mean_over_classes_is_the_sum_with_a_larger_epsilon() -> None:
    """BCEWithLogitsLoss, and AdamW at epsilon 1e-8, against our sum over K classes at K x 1e-8: the same weights after
    20 steps. In double precision, with gradients as small as epsilon, so that another epsilon would show."""
    generator, found = torch.Generator().manual_seed(1), []
    num_classes = 1000
    images = 1e-5 * torch.randn(8, 4, dtype=torch.float64, generator=generator)
    targets = (torch.rand(8, num_classes, dtype=torch.float64, generator=generator) < 0.002).double()
    job = RECIPES["deit3_s16_i1k"]()
    ours = job.optimizer.epsilon
    assert job.clip_norm == num_classes, "apex's FusedLAMB clips the gradient of the mean at 1"
    for epsilon, is_ours in ((1e-8, False), (ours, True), (1e-8, True)):
        weight = nn.Parameter(torch.zeros(num_classes, 4, dtype=torch.float64))
        optimizer = torch.optim.AdamW([weight], lr=1e-3, eps=epsilon, weight_decay=0.05)
        for _ in range(20):
            logits = images @ weight.T
            if is_ours:
                loss = classification_loss(logits, targets, name="sigmoid")
            else:
                loss = nn.BCEWithLogitsLoss()(logits.float(), targets.float())
            (weight.grad,) = torch.autograd.grad(loss, [weight])
            optimizer.step()
        found.append(weight.detach())
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=0)
    assert (found[2] - found[0]).abs().max() > 0.1 * found[0].abs().max()


def test_no_row_is_missing() -> None:
    assert set(RECIPES) == {row[0] for row in (*ON_1K, *ON_21K)}
    assert all(RECIPES[name].__name__ == name for name in RECIPES)
