"""Learning rate as a pure function of the step, and the steps of a number of epochs. Source: "An Image is Worth 16x16
Words", Table 3 and appendix B.1; vision_transformer's create_learning_rate_schedule."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from shards.config_values import Range, refuse_wrong_values


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Linear warm-up to `learning_rate`, then a decay that would reach `final_learning_rate` (the paper's code calls
    it linear_end) at step num_steps: the last update, step num_steps - 1, is one step short of it.
    """

    learning_rate: Annotated[float, Range(0)] = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    decay: Literal["linear", "cosine", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: Annotated[int, Range(0)] = 0
    """Steps during which the learning rate rises from 0; fewer than the run's steps."""
    final_learning_rate: Annotated[float, Range(0)] = 0.0
    """Learning rate that the decay ends at."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="schedule.")


def learning_rate(step: int, *, config: ScheduleConfig, num_steps: int) -> float:
    """Rate of update `step` (0 .. num_steps - 1); 0 at step 0 if there is a warm-up, as in the paper's code."""
    if step < config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    low, high = config.final_learning_rate, config.learning_rate
    if config.decay == "constant":
        return high
    if config.decay == "linear":
        return high + (low - high) * progress
    return low + (high - low) * 0.5 * (1.0 + math.cos(math.pi * progress))


def steps_of(epochs: int, *, num_images: int, global_batch: int) -> int:
    """Steps of `epochs` passes over the images, rounded to the nearest; batches continue across the end of an epoch."""
    if epochs < 1 or num_images < 1 or global_batch < 1:
        raise ValueError(f"{epochs} epochs, {num_images} images and batches of {global_batch}: all must be 1 or more")
    return (2 * epochs * num_images + global_batch) // (2 * global_batch)
