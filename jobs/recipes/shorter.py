"""Makes recipes smaller or shorter: at a size that runs in seconds on a CPU (`patchline pretrain RECIPE_smoke`), or
with fewer steps.

The smoke size of a recipe keeps its loss, optimiser, weight decay, schedule, clipping, augmentation, EMA, and kind of
model and head. The model is tiny, images are small, the warm-up and the run are short, and bf16 is used only if the
machine computes it natively. A smoke size shows that a recipe runs, not how well it trains.
"""

from dataclasses import replace
from typing import TypeVar

from pipeline.models.config import SMOKE, ModelConfig, num_masked_outputs, without_masked_patches
from pipeline.training.settings.job import TrainingJob
from pipeline.training.settings.tokens import shortened_sizes
from shards.config import SubsetConfig

_STEPS = 12
_WARMUP_STEPS = 4  # also the steps of a cooldown, and those with all patches
_LANES = 8
_BATCH = 32
_PRETRAINING_PIXELS = 224  # recipes with larger images fine-tune at a higher resolution, and so do their smoke sizes
Job = TypeVar("Job", bound=TrainingJob)


def smoke(job: TrainingJob) -> TrainingJob:
    """Returns the recipe's smoke size."""
    image_size = 48 if job.model.image_size > _PRETRAINING_PIXELS else 32
    return replace(
        job,
        model=_tiny(job.model, image_size=image_size),
        data=replace(
            job.data,
            lanes=_LANES if job.data.augment.repeats == 1 else _LANES // 2,  # mixup needs more draws of each lane
            window_blocks=2,
            augment=replace(job.data.augment, resize_pixels=0),  # 0: in proportion to the image
            subset=SubsetConfig(),  # a subset suits a large dataset only
        ),
        evaluation=replace(
            job.evaluation, transform=replace(job.evaluation.transform, short_side=0)
        ),  # 0: in proportion to the image
        steps=_STEPS,
        global_batch=_BATCH,
        schedule=replace(
            job.schedule,
            warmup_steps=min(job.schedule.warmup_steps, _WARMUP_STEPS),
            cooldown_steps=min(job.schedule.cooldown_steps, _WARMUP_STEPS),
        ),
        tokens=replace(
            job.tokens,
            whole_steps=min(job.tokens.whole_steps, _WARMUP_STEPS),
            image_sizes=(),
            size_steps=(),
            patch_sizes=(),
        ),
        engine=replace(job.engine, precision="auto"),
        checkpoint=replace(job.checkpoint, every_steps=_STEPS // 2),
        log_every_steps=1,
    )


def _tiny(model: ModelConfig, *, image_size: int) -> ModelConfig:
    """Returns a tiny model of the same kind: two layers of width 32, with a small ResNet before them if the model is a
    hybrid. A ResNet has two units (8 px per cell of its map) or, if the model's ResNet has no units, only its root (4
    px). The model's name says that it is tiny."""
    name = f"{model.name}{SMOKE}"
    units, factor = ((1, 1) if model.resnet.units else (), 1) if model.resnet else (None, None)
    if model.is_bit:
        return replace(model, name=name, image_size=image_size, resnet_units=units, resnet_factor=factor)
    tiny = replace(
        without_masked_patches(model),
        name=name,
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


def scaled(recipe: TrainingJob, *, steps: int, keep: str) -> tuple[TrainingJob, str]:
    """Returns the recipe with its warm-up scaled to a run of `steps`, rounded to the nearest step, and a note for the
    user. If the recipe's warm-up fits the run, the note names the flag `keep`, which keeps it. The warm-up never grows,
    because a longer run does not need a longer warm-up (the paper's 7 and 14 epochs have the same). Call this function
    if the user gave steps but no warm-up."""
    own = recipe.schedule.warmup_steps
    warmup = min(own, round(own * steps / recipe.steps))
    if steps < 1 or warmup == own:
        return recipe, ""
    note = f"warm-up scaled from {own} to {in_steps(warmup)}: the run has {steps} of the recipe's {recipe.steps} steps"
    may_stay = own < steps or recipe.schedule.decay == "constant"
    return with_warmup_steps(recipe, warmup), f"{note} ({keep} keeps it)" if may_stay else note


def shortened(job: Job, *, steps: int) -> Job:
    """Returns the job with at most these steps, and with a warm-up, a cooldown and last steps with all patches in
    proportion."""
    if job.steps <= steps:
        return job
    fitted, _ = scaled(job, steps=steps, keep="")
    cooldown = min(steps - fitted.schedule.warmup_steps, round(job.schedule.cooldown_steps * steps / job.steps))
    whole = min(steps - 1, round(job.tokens.whole_steps * steps / job.steps))
    return replace(
        job,
        schedule=replace(fitted.schedule, cooldown_steps=cooldown),
        tokens=replace(shortened_sizes(job.tokens, steps=steps, before=job.steps), whole_steps=whole),
        steps=steps,
    )


def in_steps(number: int) -> str:
    """Returns text such as `1 step` or `10000 steps`."""
    return f"{number} {'step' if number == 1 else 'steps'}"


def with_warmup_steps(recipe: TrainingJob, warmup_steps: int) -> TrainingJob:
    """Returns the recipe with another warm-up."""
    return replace(recipe, schedule=replace(recipe.schedule, warmup_steps=warmup_steps))
