"""Pre-training of the released AugReg checkpoints ("How to train your ViT?", Steiner et al., 2021): a class token and
no hidden layer (vision_transformer's configs/models.py).

The checkpoints' file names give the augmentation, weight decay (as a multiple of the learning rate), dropout and
stochastic depth. Those of ImageNet-21k are the ones that vision_transformer's README and vit_jax_augreg.ipynb name as
best; those of ImageNet-1k are the ones that timm lists. "On ImageNet" are the README's values of the weights after
20,000 steps of fine-tuning. All else is as in augreg.py.
[unverified] The code that trained them is not public: loss, head bias, clipping and splits are big_vision's here, the
initial deviation of position embeddings, 0.02, is vision_transformer's. Stochastic depth rises from 0 at the first
block to its rate at the last.
Command of each: patchline pretrain RECIPE --data.url URL --run-dir DIR (RECIPE_smoke: the same, tiny, on a CPU)
"""

from collections.abc import Callable
from dataclasses import replace

from jobs.recipes.augreg import Augmentation, augreg_job, on_imagenet_1k
from pipeline.training.settings.job import TrainingJob


def vit_ti16_i21k_augreg_released() -> TrainingJob:
    """ViT-Ti/16's best released checkpoint on ImageNet-21k, 300 epochs, crop and flip alone.

    Source: Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0.npz.
    Expected: 78.22 % on ImageNet at 384 px.
    Command: patchline pretrain vit_ti16_i21k_augreg_released --data.url URL --run-dir DIR
    """
    return _released("vit_ti16", "none", weight_decay=3e-5)


def vit_s32_i21k_augreg_released() -> TrainingJob:
    """ViT-S/32's best released checkpoint on ImageNet-21k, 300 epochs, crop and flip alone.

    Source: S_32-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0.npz.
    Expected: 79.58 % on ImageNet at 384 px.
    Command: patchline pretrain vit_s32_i21k_augreg_released --data.url URL --run-dir DIR
    """
    return _released("vit_s32", "none", weight_decay=1e-4)


def vit_s16_i21k_augreg_released() -> TrainingJob:
    """ViT-S/16's best released checkpoint on ImageNet-21k, 300 epochs, light1.

    Source: S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0.npz.
    Expected: 83.73 % on ImageNet at 384 px.
    Command: patchline pretrain vit_s16_i21k_augreg_released --data.url URL --run-dir DIR
    """
    return _released("vit_s16", "light1", weight_decay=3e-5)


def vit_b32_i21k_augreg_released() -> TrainingJob:
    """ViT-B/32's best released checkpoint on ImageNet-21k, 300 epochs, light1.

    Source: B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0.npz.
    Expected: 83.59 % on ImageNet at 384 px.
    Command: patchline pretrain vit_b32_i21k_augreg_released --data.url URL --run-dir DIR
    """
    return _released("vit_b32", "light1", weight_decay=1e-4)


def vit_b16_i21k_augreg_released() -> TrainingJob:
    """ViT-B/16's best released checkpoint on ImageNet-21k, 300 epochs, medium1.

    Source: B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz.
    Expected: 85.49 % on ImageNet at 384 px.
    Command: patchline pretrain vit_b16_i21k_augreg_released --data.url URL --run-dir DIR
    """
    return _released("vit_b16", "medium1", weight_decay=1e-4)


def vit_b8_i21k_augreg_released() -> TrainingJob:
    """ViT-B/8's best released checkpoint on ImageNet-21k, 300 epochs, medium2.

    Source: B_8-i21k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0.npz.
    Expected: 85.58 % on ImageNet at 224 px (vit_jax_augreg.ipynb).
    Command: patchline pretrain vit_b8_i21k_augreg_released --data.url URL --run-dir DIR
    """
    return _released("vit_b8", "medium2", weight_decay=1e-4)


def vit_l16_i21k_augreg_released() -> TrainingJob:
    """ViT-L/16's best released checkpoint on ImageNet-21k, 300 epochs, strong1.

    Source: L_16-i21k-300ep-lr_0.001-aug_strong1-wd_0.1-do_0.0-sd_0.0.npz.
    Expected: 85.59 % on ImageNet at 384 px.
    Command: patchline pretrain vit_l16_i21k_augreg_released --data.url URL --run-dir DIR
    """
    return _released("vit_l16", "strong1", weight_decay=1e-4)


def r_vit_ti16_i21k_augreg_released() -> TrainingJob:
    """R+Ti/16's best released checkpoint on ImageNet-21k, 300 epochs, crop and flip alone.

    Source: R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0.npz.
    Expected: 75.40 % on ImageNet at 384 px.
    Command: patchline pretrain r_vit_ti16_i21k_augreg_released --data.url URL --run-dir DIR
    """
    return _released("r_vit_ti16", "none", weight_decay=3e-5)


def r26_vit_s32_i21k_augreg_released() -> TrainingJob:
    """R26+S/32's best released checkpoint on ImageNet-21k, 300 epochs, light1.

    Source: R26_S_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0.npz.
    Expected: 83.85 % on ImageNet at 384 px.
    Command: patchline pretrain r26_vit_s32_i21k_augreg_released --data.url URL --run-dir DIR
    """
    return _released("r26_vit_s32", "light1", weight_decay=1e-4)


def r50_vit_l32_i21k_augreg_released() -> TrainingJob:
    """R50+L/32's best released checkpoint on ImageNet-21k, 300 epochs, medium1.

    Source: R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1.npz.
    Expected: 85.99 % on ImageNet at 384 px.
    Command: patchline pretrain r50_vit_l32_i21k_augreg_released --data.url URL --run-dir DIR
    """
    return _released("r50_vit_l32", "medium1", weight_decay=1e-4, dropout=0.1)


def vit_s16_i1k_augreg_released() -> TrainingJob:
    """ViT-S/16's released checkpoint on ImageNet-1k, 300 epochs, medium2.

    Source: S_16-i1k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0 (timm).
    Expected: the authors publish no number for it.
    Command: patchline pretrain vit_s16_i1k_augreg_released --data.url URL --evaluation.url URL-val --run-dir DIR
    """
    return on_imagenet_1k(_released("vit_s16", "medium2", weight_decay=1e-4))


def vit_b32_i1k_augreg_released() -> TrainingJob:
    """ViT-B/32's released checkpoint on ImageNet-1k, 300 epochs, medium2.

    Source: B_32-i1k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.1-sd_0.1 (timm).
    Expected: the authors publish no number for it.
    Command: patchline pretrain vit_b32_i1k_augreg_released --data.url URL --evaluation.url URL-val --run-dir DIR
    """
    return on_imagenet_1k(_released("vit_b32", "medium2", weight_decay=1e-4, dropout=0.1))


def vit_b16_i1k_augreg_released() -> TrainingJob:
    """ViT-B/16's released checkpoint on ImageNet-1k, 300 epochs, strong2.

    Source: B_16-i1k-300ep-lr_0.001-aug_strong2-wd_0.1-do_0.1-sd_0.1 (timm).
    Expected: the authors publish no number for it.
    Command: patchline pretrain vit_b16_i1k_augreg_released --data.url URL --evaluation.url URL-val --run-dir DIR
    """
    return on_imagenet_1k(_released("vit_b16", "strong2", weight_decay=1e-4, dropout=0.1))


def _released(name: str, augmentation: Augmentation, *, weight_decay: float, dropout: float = 0.0) -> TrainingJob:
    """`weight_decay`: 1e-4 for the 0.1 of a file name, 3e-5 for its 0.03. Both rates, `do` and `sd`, are `dropout`."""
    job = augreg_job(name, augmentation, weight_decay=weight_decay)
    return replace(job, model=replace(job.model, dropout=dropout, stochastic_depth=dropout))


RECIPES: dict[str, Callable[[], TrainingJob]] = {
    "vit_ti16_i21k_augreg_released": vit_ti16_i21k_augreg_released,
    "vit_s32_i21k_augreg_released": vit_s32_i21k_augreg_released,
    "vit_s16_i21k_augreg_released": vit_s16_i21k_augreg_released,
    "vit_b32_i21k_augreg_released": vit_b32_i21k_augreg_released,
    "vit_b16_i21k_augreg_released": vit_b16_i21k_augreg_released,
    "vit_b8_i21k_augreg_released": vit_b8_i21k_augreg_released,
    "vit_l16_i21k_augreg_released": vit_l16_i21k_augreg_released,
    "r_vit_ti16_i21k_augreg_released": r_vit_ti16_i21k_augreg_released,
    "r26_vit_s32_i21k_augreg_released": r26_vit_s32_i21k_augreg_released,
    "r50_vit_l32_i21k_augreg_released": r50_vit_l32_i21k_augreg_released,
    "vit_s16_i1k_augreg_released": vit_s16_i1k_augreg_released,
    "vit_b32_i1k_augreg_released": vit_b32_i1k_augreg_released,
    "vit_b16_i1k_augreg_released": vit_b16_i1k_augreg_released,
}
