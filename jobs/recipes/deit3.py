"""DeiT III: "DeiT III: Revenge of the ViT" (Touvron et al., 2022), README_revenge.md of facebookresearch/deit.

The recipes take the following from the README's command lines: model sizes, LayerScale, stochastic depth at the same
rate in every block, image size, steps (its sampler makes 625 steps of an epoch of ImageNet-1k), batch 2048, LAMB with
its learning rate and weight decay, repeated augmentation on ImageNet-1k, 3-Augment, colour jitter 0.3, the crop, mixup
and CutMix, the loss and its targets, label smoothing, and the final rate of 1e-5. apex's FusedLAMB clips the gradient's
norm at 1 by default. DeiT III's BCEWithLogitsLoss is the mean over K classes, and our loss is the sum, K times as much.
LAMB's updates do not depend on that factor, except for epsilon and clipping: DeiT III's 1e-8 and 1 become K x 1e-8 and
K here, which are 1e-5 and 1000 with the 1000 classes of ImageNet-1k.
The following stays different. An image's three views are in one lane, thus on one rank, and three epochs have every
image three times; in DeiT III's sampler, they are on different GPUs, and every epoch draws another third of the images.
Pixels are normalised to [-1, 1], where DeiT III has ImageNet's mean and deviation. In DeiT III, the class token has no
position embedding; here it has one, which only adds a second vector to the same token. The learning rate follows the
step and warms up from 0, where timm's follows the epoch and warms up from 1e-6. Mixup and CutMix have one weight or box
per pair, where DeiT III has one per step. The head starts with a deviation of 0.02, as DeiT III's does; the other
matrices start as in the ViT paper's code, and the class token at zero, where DeiT III has 0.02 for all of them. The
recipes have not been trained to their end here.
Command of each: patchline pretrain RECIPE --data.url URL --run-dir DIR (RECIPE_smoke: the same, tiny, on a CPU)
"""

from dataclasses import replace

from jobs.recipes import recipes_in
from jobs.recipes.paper_images import IMAGENET_1K, IMAGENET_21K, PUBLISHED, for_many_ranks
from pipeline.data.config import AugmentConfig, DataConfig, MixupConfig
from pipeline.evaluation.config import EvaluationConfig
from pipeline.models.config import ModelConfig
from pipeline.shared_settings import EvaluationTransform
from pipeline.training.settings.job import OptimizerConfig, TrainingJob
from pipeline.training.settings.schedule import ScheduleConfig, steps_of

_BATCH = 2048
_STEPS_PER_EPOCH = 625  # on ImageNet-1k: whole batches of 256 images in each of 8 ranks
_AUGMENT = AugmentConfig(filter="bicubic", scaled_decode=False, three_augment=True, color_jitter=0.3)


def deit3_s16_i1k() -> TrainingJob:
    """ViT-S/16 on ImageNet-1k as in DeiT III, 800 epochs at 224 px.

    Source: README_revenge.md, deit_small_patch16_LS. Expected: 81.4 % on the validation split.
    """
    return _imagenet_1k("vit_s16", image_size=224, learning_rate=4e-3, stochastic_depth=0.05)


def deit3_b16_i1k() -> TrainingJob:
    """ViT-B/16 on ImageNet-1k as in DeiT III, 800 epochs at 192 px.

    Source: README_revenge.md, deit_base_patch16_LS. Expected: 82.8 % on the validation split at 192 px (its log), and
    83.8 % after imagenet_224_b16_deit3, 20 more epochs at 224 px.
    """
    return _imagenet_1k("vit_b16", image_size=192, learning_rate=3e-3, stochastic_depth=0.2)


def deit3_s16_i21k() -> TrainingJob:
    """ViT-S/16 on ImageNet-21k as in DeiT III, 240 epochs at 224 px with the simple random crop.

    Source: README_revenge.md, deit_small_patch16_LS. Expected: 83.1 % after imagenet_224_s16_deit3_i21k.
    """
    return _imagenet_21k("vit_s16", stochastic_depth=0.05)


def deit3_b16_i21k() -> TrainingJob:
    """ViT-B/16 on ImageNet-21k as in DeiT III, 240 epochs at 224 px with the simple random crop.

    Source: README_revenge.md, deit_base_patch16_LS. Expected: 85.7 % after imagenet_224_b16_deit3_i21k.
    """
    return _imagenet_21k("vit_b16", stochastic_depth=0.1)


def _imagenet_1k(name: str, *, image_size: int, learning_rate: float, stochastic_depth: float) -> TrainingJob:
    job = _job(name, image_size=image_size, stochastic_depth=stochastic_depth)
    num_classes = IMAGENET_1K.num_classes
    return replace(
        job,
        steps=800 * _STEPS_PER_EPOCH,
        schedule=replace(job.schedule, learning_rate=learning_rate, warmup_steps=5 * _STEPS_PER_EPOCH),
        data=DataConfig(
            augment=replace(_AUGMENT, crop="random_resized", min_area=0.08, repeats=3),
            mixup=MixupConfig(alpha=0.8, cutmix_alpha=1.0, binary_targets=True),
        ),
        loss="sigmoid",
        clip_norm=1.0 * num_classes,
        optimizer=OptimizerConfig(name="lamb", epsilon=1e-8 * num_classes, weight_decay=0.05),
    )


def _imagenet_21k(name: str, *, stochastic_depth: float) -> TrainingJob:
    job = _job(name, image_size=224, stochastic_depth=stochastic_depth)
    steps, warmup = (steps_of(epochs, num_images=IMAGENET_21K.num_images, global_batch=_BATCH) for epochs in (240, 5))
    return replace(
        job,
        steps=steps,
        schedule=replace(job.schedule, learning_rate=1e-3, warmup_steps=warmup),
        data=for_many_ranks(
            DataConfig(augment=replace(_AUGMENT, crop="simple_random"), mixup=MixupConfig(cutmix_alpha=1.0))
        ),
        loss="softmax",
        label_smoothing=0.1,
        clip_norm=1.0,
        optimizer=OptimizerConfig(name="lamb", weight_decay=0.02),
    )


def _job(name: str, *, image_size: int, stochastic_depth: float) -> TrainingJob:
    """Returns what the jobs of both datasets share. Images are scored as with --eval-crop-ratio 1.0: the short side is
    resized to the model's size."""
    transform = EvaluationTransform(mode="central_crop", short_side=image_size, filter="bicubic")
    return replace(
        PUBLISHED,
        model=ModelConfig(
            name=name,
            image_size=image_size,
            num_classes=0,
            stochastic_depth=stochastic_depth,
            stochastic_depth_rates="uniform",
            gelu="exact",
            layer_scale=1e-4,
            head_std=0.02,
        ),
        global_batch=_BATCH,
        schedule=ScheduleConfig(decay="cosine", final_learning_rate=1e-5),
        evaluation=EvaluationConfig(transform=transform),
    )


RECIPES = recipes_in(globals())
