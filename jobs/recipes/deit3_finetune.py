"""The second stages of DeiT III: 20 epochs on ImageNet-1k at a higher resolution, and 50 epochs on ImageNet-1k after
ImageNet-21k.

Source: README_revenge.md of facebookresearch/deit. The recipes take its command lines for `--finetune`. The first keeps
the head and resamples positions as DeiT III's main.py does (bicubic); its rate is constant after the warm-up, since the
final rate of 1e-5, main.py's default, is the peak. The others have a new head. Steps are whole batches of each rank's
share of 1,281,168 images. In the first, RandAugment has big_vision's operations at a fixed magnitude of 9, where DeiT
III has timm's, whose magnitude is drawn with a deviation of 0.5. The other differences are those of deit3.py. The
recipes have not been trained here.
Command of each: patchline finetune RECIPE --initial.weights WEIGHTS --data.url URL --run-dir DIR (RECIPE_smoke: tiny)
"""

from dataclasses import replace

from jobs.recipes import recipes_in
from jobs.recipes.deit3 import deit3_b16_i1k, deit3_b16_i21k, deit3_s16_i21k
from pipeline.data.config import AugmentConfig, DataConfig, MixupConfig, RandAugmentConfig
from pipeline.evaluation.config import EvaluationConfig
from pipeline.training.settings.job import InitialConfig, OptimizerConfig, TrainingJob
from pipeline.training.settings.schedule import ScheduleConfig

_STEPS_OF_512, _STEPS_OF_2048 = 2502, 625  # of an epoch, by the batch
_RATE = 1e-5


def imagenet_224_b16_deit3() -> TrainingJob:
    """ViT-B/16 from deit3_b16_i1k, 20 more epochs on ImageNet-1k at 224 px instead of 192.

    Source: README_revenge.md, "finetuning for ViT-B, L and H at resolution 224x224". Expected: 83.8 % on the validation
    split.
    """
    job, image_size = deit3_b16_i1k(), 224
    return replace(
        job,
        model=replace(job.model, image_size=image_size),
        data=DataConfig(
            augment=AugmentConfig(crop="random_resized", min_area=0.08, filter="bicubic", scaled_decode=False),
            randaugment=RandAugmentConfig(num_ops=2, magnitude=9),
            mixup=MixupConfig(alpha=0.8, cutmix_alpha=1.0),
        ),
        initial=InitialConfig(new_head=False, resample="bicubic"),
        steps=20 * _STEPS_OF_512,
        global_batch=512,
        loss="softmax",
        label_smoothing=0.1,
        clip_norm=0.0,
        optimizer=OptimizerConfig(name="adamw", weight_decay=0.1),
        schedule=ScheduleConfig(
            learning_rate=_RATE, decay="cosine", warmup_steps=5 * _STEPS_OF_512, final_learning_rate=_RATE
        ),
        evaluation=EvaluationConfig(transform=replace(job.evaluation.transform, short_side=image_size)),
    )


def imagenet_224_s16_deit3_i21k() -> TrainingJob:
    """ViT-S/16 from deit3_s16_i21k, 50 epochs on ImageNet-1k at 224 px.

    Source: README_revenge.md, "finetuning on ImageNet-1k". Expected: 83.1 % on the validation split.
    """
    return _from_21k(deit3_s16_i21k(), stochastic_depth=0.05)


def imagenet_224_b16_deit3_i21k() -> TrainingJob:
    """ViT-B/16 from deit3_b16_i21k, 50 epochs on ImageNet-1k at 224 px.

    Source: README_revenge.md, "finetuning on ImageNet-1k". Expected: 85.7 % on the validation split.
    """
    return _from_21k(deit3_b16_i21k(), stochastic_depth=0.15)


def _from_21k(job: TrainingJob, *, stochastic_depth: float) -> TrainingJob:
    return replace(
        job,
        model=replace(job.model, stochastic_depth=stochastic_depth),
        steps=50 * _STEPS_OF_2048,
        schedule=replace(job.schedule, learning_rate=3e-4, warmup_steps=5 * _STEPS_OF_2048),
    )


RECIPES = recipes_in(globals())
