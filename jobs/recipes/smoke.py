"""Every training recipe at a size that runs in seconds on a CPU: `patchline pretrain RECIPE_smoke`.

The loss, optimiser, weight decay, schedule, clipping, augmentation, EMA and the kinds of model and head stay. The model
is tiny, images are small, warm-up and run are short, and bf16 is used only if the machine computes it natively. This
shows that a recipe runs, not how well it trains.
"""

from dataclasses import replace

from pipeline.models.config import ModelConfig, num_masked_outputs, without_masked_patches
from pipeline.training.settings.job import TrainingJob
from shards.config import SubsetConfig

SUFFIX = "_smoke"
_STEPS = 12
_WARMUP_STEPS = 4  # and of a cooldown
_LANES = 8
_BATCH = 32
_PRETRAINING_PIXELS = 224  # recipes above it fine-tune at a higher resolution; so do their smoke sizes


def smoke(job: TrainingJob) -> TrainingJob:
    """The recipe's smoke size."""
    image_size = 48 if job.model.image_size > _PRETRAINING_PIXELS else 32
    return replace(
        job,
        model=_tiny(job.model, image_size=image_size),
        data=replace(
            job.data,
            lanes=_LANES,
            window_blocks=2,
            augment=replace(job.data.augment, resize_pixels=0),  # in proportion to the image
            subset=SubsetConfig(),  # of a large dataset
        ),
        evaluation=replace(
            job.evaluation, transform=replace(job.evaluation.transform, short_side=0)
        ),  # in proportion to the image
        steps=_STEPS,
        global_batch=_BATCH,
        schedule=replace(
            job.schedule,
            warmup_steps=min(job.schedule.warmup_steps, _WARMUP_STEPS),
            cooldown_steps=min(job.schedule.cooldown_steps, _WARMUP_STEPS),
        ),
        engine=replace(job.engine, precision="auto"),
        checkpoint=replace(job.checkpoint, every_steps=_STEPS // 2),
        log_every_steps=1,
    )


def _tiny(model: ModelConfig, *, image_size: int) -> ModelConfig:
    """The same kind of model: two layers of width 32, a ResNet of two units (8 px per cell of its map), or its root
    alone (4 px)."""
    units, factor = ((1, 1) if model.resnet.units else (), 1) if model.resnet else (None, None)
    if model.is_bit:
        return replace(model, image_size=image_size, resnet_units=units, resnet_factor=factor)
    tiny = replace(
        without_masked_patches(model),
        image_size=image_size,
        patch=8 if units is None else 1 if units else 2,
        depth=2,
        width=32,
        mlp_width=64,
        num_heads=2,
        resnet_units=units,
        resnet_factor=factor,
    )
    if not model.masked_patches:
        return tiny
    target = model.masked_target
    return replace(
        tiny,
        masked_patches=True,
        masked_target=target,
        masked_share=model.masked_share,
        num_classes=num_masked_outputs(target, side=tiny.stride),
    )
