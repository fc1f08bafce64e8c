"""DeiT, distilled: "Training data-efficient image transformers & distillation through attention" (Touvron et al.,
2021), README_deit.md and main.py of facebookresearch/deit.

The recipes take the following from main.py's defaults and the README's command lines: model sizes, the distillation
token, 300 epochs (its sampler makes 1,251 steps of an epoch of ImageNet-1k), batch 1024, AdamW with a rate of 5e-4 per
512 images and weight decay 0.05, no clipping, 5 epochs of warm-up, cosine decay to 1e-5, stochastic depth 0.1, repeated
augmentation, the crop, mixup 0.8 and CutMix 1.0, label smoothing 0.1, and evaluation with a central crop of 224 of 256
pixels. The teacher is given by flags: --teacher.weights, with hard targets and a share of 0.5.
The following differs. DeiT's teacher is a RegNetY-16GF of 82.9 %, which is not among the models here; another teacher
may lead to another result. There is no random erasing (DeiT: 0.25). RandAugment has big_vision's operations at a fixed
magnitude of 9, where DeiT has timm's, whose magnitude is drawn with a deviation of 0.5. An image's three views are in
one lane, thus on one rank, and three epochs have every image three times. Pixels are normalised to [-1, 1], where DeiT
has ImageNet's mean and deviation. The learning rate follows the step and warms up from 0, where timm's follows the
epoch and warms up from 1e-6. Mixup and CutMix have one weight or box per pair, where DeiT has one per step. Matrices
start as in the ViT paper's code, and the class token and both heads at zero, where DeiT starts all of them with a
deviation of 0.02. The recipes have not been trained to their end here.
Command of each: patchline pretrain RECIPE --teacher.weights WEIGHTS --teacher.target hard --teacher.share 0.5
--data.url URL --run-dir DIR (RECIPE_smoke: the same, tiny, on a CPU)
"""

from dataclasses import replace

from jobs.recipes import recipes_in
from jobs.recipes.paper_images import PUBLISHED
from pipeline.data.config import AugmentConfig, DataConfig, MixupConfig, RandAugmentConfig
from pipeline.evaluation.config import EvaluationConfig
from pipeline.models.config import ModelConfig
from pipeline.shared_settings import EvaluationTransform
from pipeline.training.settings.job import OptimizerConfig, TrainingJob
from pipeline.training.settings.schedule import ScheduleConfig

_BATCH = 1024
_STEPS_PER_EPOCH = 1251  # on ImageNet-1k: whole batches of each rank's share of 1,281,024 images
_SHORT_SIDE = 256


def deit_ti16_i1k_distilled() -> TrainingJob:
    """ViT-Ti/16 with a distillation token on ImageNet-1k as in DeiT, 300 epochs.

    Source: README_deit.md, deit_tiny_distilled_patch16_224. Expected: 74.5 % on the validation split.
    """
    return _distilled("vit_ti16")


def deit_s16_i1k_distilled() -> TrainingJob:
    """ViT-S/16 with a distillation token on ImageNet-1k as in DeiT, 300 epochs.

    Source: README_deit.md, deit_small_distilled_patch16_224. Expected: 81.2 % on the validation split.
    """
    return _distilled("vit_s16")


def deit_b16_i1k_distilled() -> TrainingJob:
    """ViT-B/16 with a distillation token on ImageNet-1k as in DeiT, 300 epochs.

    Source: README_deit.md, deit_base_distilled_patch16_224. Expected: 83.4 % on the validation split.
    """
    return _distilled("vit_b16")


def _distilled(name: str) -> TrainingJob:
    return replace(
        PUBLISHED,
        model=ModelConfig(name=name, num_classes=0, distillation_token=True, stochastic_depth=0.1, gelu="exact"),
        data=DataConfig(
            augment=AugmentConfig(
                crop="random_resized", min_area=0.08, filter="bicubic", scaled_decode=False, repeats=3
            ),
            randaugment=RandAugmentConfig(num_ops=2, magnitude=9),
            mixup=MixupConfig(alpha=0.8, cutmix_alpha=1.0),
        ),
        steps=300 * _STEPS_PER_EPOCH,
        global_batch=_BATCH,
        label_smoothing=0.1,
        clip_norm=0.0,
        optimizer=OptimizerConfig(name="adamw", weight_decay=0.05),
        schedule=ScheduleConfig(
            learning_rate=5e-4 * _BATCH / 512,
            decay="cosine",
            warmup_steps=5 * _STEPS_PER_EPOCH,
            final_learning_rate=1e-5,
        ),
        evaluation=EvaluationConfig(
            transform=EvaluationTransform(mode="central_crop", short_side=_SHORT_SIDE, filter="bicubic")
        ),
    )


RECIPES = recipes_in(globals())
