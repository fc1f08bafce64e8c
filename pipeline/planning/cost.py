"""The cost of a run before it starts: parameters, operations, steps, and the images/s needed to end in time. Pure."""

from dataclasses import dataclass, replace

from pipeline.models.flops import forward_flops, num_parameters, training_flops
from pipeline.training.settings.job import TrainingJob
from shards.errors import UserError

_SECONDS_A_DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A multiply-add counts as 2 operations, a training step as three forward passes, or as one and the head's
    gradients if the backbone is frozen; branches that stochastic depth skips do not count. `num_epochs` is None if the
    number of images is not known; `num_head_parameters` is 0 if the number of classes is not."""

    num_parameters: int
    num_head_parameters: int
    forward_flops: int
    train_flops: int
    num_steps: int
    num_images_seen: int
    num_epochs: float | None
    total_exaflops: float
    images_per_second: float
    teraflops_per_second: float


def cost_of(job: TrainingJob, *, num_images: int, num_classes: int, days: float) -> Cost:
    """The cost of a job on a dataset with these numbers of images and classes (0: not known), to be done in `days`.

    The job's own number of classes takes precedence. Raises UserError for values that make no run.
    """
    if num_images < 0 or num_classes < 0 or days <= 0:
        raise UserError(
            f"--num-images is {num_images}, --num-classes {num_classes} and --days {days}; allowed: images and "
            "classes of 0 (not known) or more, and more than 0 days"
        )
    classes = job.model.num_classes or num_classes
    model = replace(job.model, num_classes=classes)
    body = num_parameters(model, head=False)
    total = num_parameters(model, head=classes > 0)
    forward = forward_flops(model, head=classes > 0)
    is_frozen, skips = job.optimizer.freeze_backbone, job.engine.skip_branches
    training = training_flops(model, head=classes > 0, is_frozen=is_frozen, skips_branches=skips)
    seen = job.steps * job.global_batch
    images_per_second = seen / (days * _SECONDS_A_DAY)
    return Cost(
        num_parameters=total,
        num_head_parameters=total - body,
        forward_flops=forward,
        train_flops=training,
        num_steps=job.steps,
        num_images_seen=seen,
        num_epochs=seen / num_images if num_images else None,
        total_exaflops=training * seen / 1e18,
        images_per_second=images_per_second,
        teraflops_per_second=training * images_per_second / 1e12,
    )
