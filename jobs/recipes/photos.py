"""Recipes for your own photographs: fine-tuning from published weights or a run's, and training from scratch.

The recipes adapt to their inputs (jobs/fitted.py): the model is that of --initial.weights, the number of steps follows
the number of images, and images that `pack --split-test` set aside at URL-test are scored. Flags override this.
"""

from dataclasses import replace

from jobs.recipes import recipes_in
from pipeline.data.config import AugmentConfig, DataConfig, MixupConfig, RandAugmentConfig
from pipeline.evaluation.config import EvaluationConfig
from pipeline.models.config import ModelConfig
from pipeline.shared_settings import EvaluationTransform
from pipeline.training.settings.job import EngineConfig, OptimizerConfig, TrainingJob
from pipeline.training.settings.schedule import ScheduleConfig, steps_of

_BATCH = 64
SCRATCH = ("photos_scratch_s16", "photos_scratch_b16")
_RATE_OF_512 = 0.03  # from the paper's fine-tuning with a batch of 512 images (Table 4)
_EPOCHS, _LEAST_STEPS, _MOST_STEPS = 20, 100, 20_000
_SCRATCH_EPOCHS, _LEAST_SCRATCH_STEPS, _MOST_SCRATCH_STEPS = 300, 1000, 300_000
_EVALUATIONS = 10  # evaluations during a run


def photos() -> TrainingJob:
    """Fine-tunes weights of any kind on your own photographs: one command, and no other flag is needed.

    Source: ours, after the paper's fine-tuning (Table 4): SGD with momentum, cosine decay, no weight decay, clipping at
    1, a new zero head, and the paper's rate, 0.03 for 512 images, scaled with the batch. The model, its image size,
    GELU and epsilon are those of the weights, and so is the preparation of scored images if the weights specify it;
    otherwise images are resized with antialiasing, as in other libraries. The run has 20 epochs, but at least 100 and
    at most 20,000 steps. A tenth of the steps, at most 500, are warm-up.
    Expected: with weights of ImageNet-21k, 90 % and more on everyday classes of 50 images each [unverified].
    """
    return with_steps(
        TrainingJob(
            model=ModelConfig(name="vit_b16", image_size=224, num_classes=0),
            data=DataConfig(augment=AugmentConfig(min_area=0.25)),
            evaluation=EvaluationConfig(transform=EvaluationTransform(antialias=True)),
            global_batch=_BATCH,
            clip_norm=1.0,
            optimizer=OptimizerConfig(name="sgd", momentum=0.9, weight_decay=0.0),
            schedule=ScheduleConfig(learning_rate=_RATE_OF_512 * _BATCH / 512, decay="cosine"),
            engine=EngineConfig(zero_stage=1, precision="auto"),
            log_every_steps=5,
        ),
        steps=500,
    )


def photos_scratch_s16() -> TrainingJob:
    """A ViT-S/16 from scratch on your own photographs, for when no published weights may be used.

    Source: ours, after big_vision's plain ViT-S/16 (vit_s16_i1k_plain): average pooling, fixed sine positions,
    RandAugment, mixup, AdamW; batch 64, a rate in proportion to it, and 300 epochs, but at least 1,000 and at most
    300,000 steps. Expected: well below photos. Vision Transformers need far more images than most collections have
    (section 4.3).
    """
    return _scratch("vit_s16")


def photos_scratch_b16() -> TrainingJob:
    """A ViT-B/16 from scratch on your own photographs, for 100,000 images and more.

    Source: ours, as photos_scratch_s16. Expected: below photos, as with photos_scratch_s16.
    """
    return _scratch("vit_b16")


def steps_for(recipe: str, *, num_images: int, global_batch: int) -> int:
    """Returns the number of steps of a recipe of this module for a dataset of this size."""
    is_scratch = recipe in SCRATCH
    epochs = _SCRATCH_EPOCHS if is_scratch else _EPOCHS
    least, most = (_LEAST_SCRATCH_STEPS, _MOST_SCRATCH_STEPS) if is_scratch else (_LEAST_STEPS, _MOST_STEPS)
    return max(least, min(most, steps_of(epochs, num_images=num_images, global_batch=global_batch)))


def with_steps(job: TrainingJob, *, steps: int) -> TrainingJob:
    """Returns the job with this number of steps, and with a warm-up, evaluations and checkpoints in proportion."""
    every = max(1, steps // _EVALUATIONS)
    return replace(
        job,
        steps=steps,
        schedule=replace(job.schedule, warmup_steps=min(500, steps // 10)),
        evaluation=replace(job.evaluation, every_steps=every),
        checkpoint=replace(job.checkpoint, every_steps=every),
    )


def with_batch(job: TrainingJob, *, global_batch: int) -> TrainingJob:
    """Returns the job with this batch, and with a learning rate in proportion to it."""
    rate = job.schedule.learning_rate * global_batch / job.global_batch
    return replace(job, global_batch=global_batch, schedule=replace(job.schedule, learning_rate=rate))


def _scratch(name: str) -> TrainingJob:
    return with_steps(
        TrainingJob(
            model=ModelConfig(name=name, image_size=224, num_classes=0, pooling="average", position="sincos2d"),
            data=DataConfig(
                augment=AugmentConfig(min_area=0.05),
                randaugment=RandAugmentConfig(num_ops=2, magnitude=10),
                mixup=MixupConfig(alpha=0.2),
            ),
            global_batch=_BATCH,
            clip_norm=1.0,
            optimizer=OptimizerConfig(name="adamw", weight_decay=1e-4, decay_scale="schedule"),
            schedule=ScheduleConfig(learning_rate=2.5e-4, decay="cosine"),
            engine=EngineConfig(zero_stage=1, precision="auto"),
            log_every_steps=5,
        ),
        steps=20_000,
    )


RECIPES = recipes_in(globals())
FINETUNE_RECIPES = {"photos": RECIPES.pop("photos")}
