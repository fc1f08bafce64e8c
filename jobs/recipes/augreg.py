"""Pre-training of "How to train your ViT?" (AugReg; Steiner et al., 2021) as in big_vision's configs/vit_i21k.py and
vit_i1k.py.

NAME_i21k_augreg pools by the mean of all tokens; NAME_i1k_augreg has a class token and a hidden tanh layer.
Augmentation is big_vision's choice for each size. Neither kind has dropout or stochastic depth. All share 300 epochs,
batch 4096, Adam at 1e-3 with 10,000 steps of warm-up and cosine decay, clipping at 1, sigmoid loss, head bias -10
(ImageNet-1k: -6.9), and weight decay 1e-4 that follows the schedule (0.1 in PyTorch's terms). The number of steps is
computed for 14.2 million images without the first 51,200, which are not trained on (--data.subset.first 0 trains on
all), or for the 99 % of ImageNet-1k that are not held out. For a copy of another size, give the --steps that
`patchline plan RECIPE --num-images N` names for the N images that are trained on. In vit_i1k.py the class token has no
position embedding; here it has one, which only adds a second vector to the same token. Precision differs as in
paper_imagenet.py. big_vision also keeps Adam's first moment in bf16 (here: --optimizer.first-moment bf16). Images are
prepared as in paper_images.py.

NAME_released are the recipes of the released checkpoints, with a class token and no hidden layer (vision_transformer's
configs/models.py). The checkpoints' file names give the augmentation, weight decay (as a multiple of the learning
rate), dropout and stochastic depth. The recipes on ImageNet-21k repeat the checkpoints that vision_transformer's README
and vit_jax_augreg.ipynb name as best; the recipes on ImageNet-1k repeat the checkpoints that timm lists. Values "on
ImageNet" are from the README, after 20,000 steps of fine-tuning. All else is as above. [unverified] The code that
trained them is not public: loss, head bias, clipping and splits are big_vision's here, and the initial deviation of
position embeddings, 0.02, is vision_transformer's. Stochastic depth rises from 0 at the first block to its rate at the
last.
Command of each: patchline pretrain RECIPE --data.url URL --run-dir DIR (RECIPE_smoke: the same, tiny, on a CPU)
"""

from dataclasses import replace
from typing import Literal

from jobs.recipes import recipes_in
from jobs.recipes.paper_images import (
    IMAGENET_1K_99,
    IMAGENET_21K_AUGREG,
    IMAGENET_21K_LEFT_OUT,
    PRETRAINING,
    PUBLISHED,
    for_many_ranks,
)
from pipeline.data.config import DataConfig, MixupConfig, RandAugmentConfig
from pipeline.models.config import ModelConfig
from pipeline.training.settings.job import OptimizerConfig, TrainingJob
from pipeline.training.settings.schedule import ScheduleConfig, steps_of
from shards.config import HeldOutConfig, SubsetConfig

_BATCH, _EPOCHS = 4096, 300
Augmentation = Literal["none", "light1", "light2", "medium1", "medium2", "strong1", "strong2"]
_AUGMENTATIONS: dict[Augmentation, tuple[int, int, float]] = {  # RandAugment's operations and magnitude, mixup
    "none": (0, 0, 0.0),
    "light1": (2, 0, 0.0),
    "light2": (2, 10, 0.2),
    "medium1": (2, 15, 0.2),
    "medium2": (2, 15, 0.5),
    "strong1": (2, 20, 0.5),
    "strong2": (2, 20, 0.8),
}


def vit_ti16_i21k_augreg() -> TrainingJob:
    """ViT-Ti/16 on ImageNet-21k, 300 epochs, crop and flip alone, average pooling.

    Source: big_vision's configs/vit_i21k.py. Expected: not published for this configuration.
    """
    return _i21k("vit_ti16", "none")


def vit_s32_i21k_augreg() -> TrainingJob:
    """ViT-S/32 on ImageNet-21k, 300 epochs, crop and flip alone, average pooling.

    Source: big_vision's configs/vit_i21k.py. Expected: not published for this configuration.
    """
    return _i21k("vit_s32", "none")


def vit_s16_i21k_augreg() -> TrainingJob:
    """ViT-S/16 on ImageNet-21k, 300 epochs, light1, average pooling.

    Source: big_vision's configs/vit_i21k.py. Expected: not published for this configuration.
    """
    return _i21k("vit_s16", "light1")


def vit_b32_i21k_augreg() -> TrainingJob:
    """ViT-B/32 on ImageNet-21k, 300 epochs, light2, average pooling.

    Source: big_vision's configs/vit_i21k.py. Expected: not published for this configuration.
    """
    return _i21k("vit_b32", "light2")


def vit_b16_i21k_augreg() -> TrainingJob:
    """ViT-B/16 on ImageNet-21k, 300 epochs, light2, average pooling.

    Source: big_vision's configs/vit_i21k.py. Expected: not published for light2; the best released B/16, medium1
    with a class token, has 85.49 % on ImageNet at 384 px (vit_b16_i21k_augreg_released).
    """
    return _i21k("vit_b16", "light2")


def vit_l16_i21k_augreg() -> TrainingJob:
    """ViT-L/16 on ImageNet-21k, 300 epochs, medium2, average pooling.

    Source: big_vision's configs/vit_i21k.py. Expected: not published for medium2; the best released L/16, strong1
    with a class token, has 85.59 % on ImageNet at 384 px (vit_l16_i21k_augreg_released).
    """
    return _i21k("vit_l16", "medium2")


def vit_ti16_i1k_augreg() -> TrainingJob:
    """ViT-Ti/16 on ImageNet-1k, 300 epochs, light1, class token and hidden layer.

    Source: big_vision's configs/vit_i1k.py. Expected: not published for this configuration.
    """
    return _i1k("vit_ti16", "light1")


def vit_s32_i1k_augreg() -> TrainingJob:
    """ViT-S/32 on ImageNet-1k, 300 epochs, medium1, class token and hidden layer.

    Source: big_vision's configs/vit_i1k.py. Expected: not published for this configuration.
    """
    return _i1k("vit_s32", "medium1")


def vit_s16_i1k_augreg() -> TrainingJob:
    """ViT-S/16 on ImageNet-1k, 300 epochs, medium2, class token and hidden layer.

    Source: big_vision's configs/vit_i1k.py. Expected: not published for this configuration.
    """
    return _i1k("vit_s16", "medium2")


def vit_b32_i1k_augreg() -> TrainingJob:
    """ViT-B/32 on ImageNet-1k, 300 epochs, medium2, class token and hidden layer.

    Source: big_vision's configs/vit_i1k.py. Expected: not published for this configuration.
    """
    return _i1k("vit_b32", "medium2")


def vit_b16_i1k_augreg() -> TrainingJob:
    """ViT-B/16 on ImageNet-1k, 300 epochs, medium2, class token and hidden layer.

    Source: big_vision's configs/vit_i1k.py. Expected: not published for this configuration.
    """
    return _i1k("vit_b16", "medium2")


def vit_l16_i1k_augreg() -> TrainingJob:
    """ViT-L/16 on ImageNet-1k, 300 epochs, medium2, class token and hidden layer.

    Source: big_vision's configs/vit_i1k.py. Expected: not published for this configuration.
    """
    return _i1k("vit_l16", "medium2")


def _i21k(name: str, augmentation: Augmentation) -> TrainingJob:
    job = augreg_job(name, augmentation, weight_decay=1e-4)
    return replace(job, model=replace(job.model, pooling="average", position_std=job.model.size.width**-0.5))


def _i1k(name: str, augmentation: Augmentation) -> TrainingJob:
    job = on_imagenet_1k(augreg_job(name, augmentation, weight_decay=1e-4))
    return replace(job, model=replace(job.model, representation=True, position_std=job.model.size.width**-0.5))


def on_imagenet_1k(job: TrainingJob) -> TrainingJob:
    """Returns the same job on 99 % of ImageNet-1k, as in vit_i1k.py."""
    return replace(
        job,
        model=replace(job.model, head_bias=-6.9),
        data=DataConfig(
            augment=job.data.augment,
            randaugment=job.data.randaugment,
            mixup=job.data.mixup,
            held_out=HeldOutConfig(share=0.01),
        ),
        steps=steps_of(_EPOCHS, num_images=IMAGENET_1K_99.num_images, global_batch=_BATCH),
    )


def augreg_job(name: str, augmentation: Augmentation, *, weight_decay: float) -> TrainingJob:
    """Returns the job that all recipes of AugReg share, on ImageNet-21k."""
    num_ops, magnitude, alpha = _AUGMENTATIONS[augmentation]
    randaugment = RandAugmentConfig(num_ops=num_ops, magnitude=magnitude)
    return replace(
        PUBLISHED,
        model=ModelConfig(name=name, image_size=224, num_classes=0, head_bias=-10.0),
        data=for_many_ranks(
            DataConfig(
                augment=PRETRAINING.training,
                randaugment=randaugment,
                mixup=MixupConfig(alpha=alpha),
                subset=SubsetConfig(first=IMAGENET_21K_LEFT_OUT),
            )
        ),
        steps=steps_of(_EPOCHS, num_images=IMAGENET_21K_AUGREG.num_images, global_batch=_BATCH),
        global_batch=_BATCH,
        loss="sigmoid",
        clip_norm=1.0,
        optimizer=OptimizerConfig(name="adamw", weight_decay=weight_decay, decay_scale="schedule"),
        schedule=ScheduleConfig(learning_rate=1e-3, decay="cosine", warmup_steps=10_000),
    )


def vit_ti16_i21k_augreg_released() -> TrainingJob:
    """ViT-Ti/16's best released checkpoint on ImageNet-21k, 300 epochs, crop and flip alone.

    Source: Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0.npz.
    Expected: 78.22 % on ImageNet at 384 px.
    """
    return _released("vit_ti16", "none", weight_decay=3e-5)


def vit_s32_i21k_augreg_released() -> TrainingJob:
    """ViT-S/32's best released checkpoint on ImageNet-21k, 300 epochs, crop and flip alone.

    Source: S_32-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0.npz.
    Expected: 79.58 % on ImageNet at 384 px.
    """
    return _released("vit_s32", "none", weight_decay=1e-4)


def vit_s16_i21k_augreg_released() -> TrainingJob:
    """ViT-S/16's best released checkpoint on ImageNet-21k, 300 epochs, light1.

    Source: S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0.npz.
    Expected: 83.73 % on ImageNet at 384 px.
    """
    return _released("vit_s16", "light1", weight_decay=3e-5)


def vit_b32_i21k_augreg_released() -> TrainingJob:
    """ViT-B/32's best released checkpoint on ImageNet-21k, 300 epochs, light1.

    Source: B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0.npz.
    Expected: 83.59 % on ImageNet at 384 px.
    """
    return _released("vit_b32", "light1", weight_decay=1e-4)


def vit_b16_i21k_augreg_released() -> TrainingJob:
    """ViT-B/16's best released checkpoint on ImageNet-21k, 300 epochs, medium1.

    Source: B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz.
    Expected: 85.49 % on ImageNet at 384 px.
    """
    return _released("vit_b16", "medium1", weight_decay=1e-4)


def vit_b8_i21k_augreg_released() -> TrainingJob:
    """ViT-B/8's best released checkpoint on ImageNet-21k, 300 epochs, medium2.

    Source: B_8-i21k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0.npz.
    Expected: 85.58 % on ImageNet at 224 px (vit_jax_augreg.ipynb).
    """
    return _released("vit_b8", "medium2", weight_decay=1e-4)


def vit_l16_i21k_augreg_released() -> TrainingJob:
    """ViT-L/16's best released checkpoint on ImageNet-21k, 300 epochs, strong1.

    Source: L_16-i21k-300ep-lr_0.001-aug_strong1-wd_0.1-do_0.0-sd_0.0.npz.
    Expected: 85.59 % on ImageNet at 384 px.
    """
    return _released("vit_l16", "strong1", weight_decay=1e-4)


def r_vit_ti16_i21k_augreg_released() -> TrainingJob:
    """R+Ti/16's best released checkpoint on ImageNet-21k, 300 epochs, crop and flip alone.

    Source: R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0.npz.
    Expected: 75.40 % on ImageNet at 384 px.
    """
    return _released("r_vit_ti16", "none", weight_decay=3e-5)


def r26_vit_s32_i21k_augreg_released() -> TrainingJob:
    """R26+S/32's best released checkpoint on ImageNet-21k, 300 epochs, light1.

    Source: R26_S_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0.npz.
    Expected: 83.85 % on ImageNet at 384 px.
    """
    return _released("r26_vit_s32", "light1", weight_decay=1e-4)


def r50_vit_l32_i21k_augreg_released() -> TrainingJob:
    """R50+L/32's best released checkpoint on ImageNet-21k, 300 epochs, medium1.

    Source: R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1.npz.
    Expected: 85.99 % on ImageNet at 384 px.
    """
    return _released("r50_vit_l32", "medium1", weight_decay=1e-4, dropout=0.1)


def vit_s16_i1k_augreg_released() -> TrainingJob:
    """ViT-S/16's released checkpoint on ImageNet-1k, 300 epochs, medium2.

    Source: S_16-i1k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0 (timm).
    Expected: the authors publish no number for it.
    """
    return on_imagenet_1k(_released("vit_s16", "medium2", weight_decay=1e-4))


def vit_b32_i1k_augreg_released() -> TrainingJob:
    """ViT-B/32's released checkpoint on ImageNet-1k, 300 epochs, medium2.

    Source: B_32-i1k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.1-sd_0.1 (timm).
    Expected: the authors publish no number for it.
    """
    return on_imagenet_1k(_released("vit_b32", "medium2", weight_decay=1e-4, dropout=0.1))


def vit_b16_i1k_augreg_released() -> TrainingJob:
    """ViT-B/16's released checkpoint on ImageNet-1k, 300 epochs, strong2.

    Source: B_16-i1k-300ep-lr_0.001-aug_strong2-wd_0.1-do_0.1-sd_0.1 (timm).
    Expected: the authors publish no number for it.
    """
    return on_imagenet_1k(_released("vit_b16", "strong2", weight_decay=1e-4, dropout=0.1))


def _released(name: str, augmentation: Augmentation, *, weight_decay: float, dropout: float = 0.0) -> TrainingJob:
    """Returns the job of a released checkpoint. `weight_decay`: 1e-4 for 0.1 in the file name, 3e-5 for 0.03.
    `dropout`: both rates in the file name, `do` and `sd`."""
    job = augreg_job(name, augmentation, weight_decay=weight_decay)
    return replace(job, model=replace(job.model, dropout=dropout, stochastic_depth=dropout))


RECIPES = recipes_in(globals())
