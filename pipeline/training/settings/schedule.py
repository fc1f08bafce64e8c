"""The learning rate as a pure function of the step, and the number of steps in a number of epochs.

Sources: "An Image is Worth 16x16 Words", Table 3 and appendix B.1, and vision_transformer's
create_learning_rate_schedule. rsqrt, and the cooldown that any decay may have, are from big_vision's utils.py, as in
"Scaling Vision Transformers" (Zhai et al., 2022). staircase is from big_transfer's bit_hyperrule.py (Kolesnikov et al.,
2020).
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from shards.config_values import Range, refuse_wrong_values, shown_value
from shards.errors import UserError

MOST_STEPS = 10**9


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate at each step: a linear warm-up to `learning_rate`, then a decay. linear and cosine would reach
    `final_learning_rate` (linear_end in the paper's code) at step num_steps; the last update is step num_steps - 1, one
    step short of it.

    rsqrt and staircase do not depend on the number of steps, so a run can be extended at full rate from a checkpoint
    before its cooldown.
    """

    learning_rate: Annotated[float, Range(0)] = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    decay: Literal["linear", "cosine", "constant", "rsqrt", "staircase"] = "cosine"
    """Shape of the learning rate after the warm-up; rsqrt: 1 / sqrt(1 + steps since then / timescale); staircase:
    multiplied by stair-factor after each of the stair-steps."""
    warmup_steps: Annotated[int, Range(0)] = 0
    """Steps during which the learning rate rises from 0; fewer than the run's steps."""
    final_learning_rate: Annotated[float, Range(0)] = 0.0
    """Learning rate at which the decay ends (rsqrt, staircase and constant: the cooldown)."""
    cooldown_steps: Annotated[int, Range(0, MOST_STEPS, zero="none")] = 0
    """Last steps of the run, in which the learning rate also falls to the final one in a straight line (with rsqrt,
    big_vision takes 50,000)."""
    timescale: Annotated[int, Range(1, MOST_STEPS)] = 10_000
    """Steps after the warm-up until the learning rate of rsqrt is 0.71 of its peak; after three times that number of
    steps, it is half its peak."""
    stair_steps: tuple[Annotated[int, Range(1, MOST_STEPS)], ...] = ()
    """The last step before each fall of staircase, such as 6000 12000 18000 (BiT, of 20,000 steps)."""
    stair_factor: Annotated[float, Range(above=0, most=1)] = 0.1
    """Factor by which staircase multiplies the learning rate at each fall."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="schedule.")
        if bool(self.stair_steps) != (self.decay == "staircase"):
            raise UserError(
                f"schedule.stair_steps is {shown_value(self.stair_steps)} with schedule.decay {self.decay!r}; a "
                "staircase needs them and no other decay has them: give --schedule.decay staircase "
                "--schedule.stair-steps 6000 12000 18000, or neither"
            )
        if list(self.stair_steps) != sorted(set(self.stair_steps)):
            raise UserError(
                f"schedule.stair_steps is {shown_value(self.stair_steps)}; allowed: rising steps, such as 6000 12000"
            )
        if self.final_learning_rate and self.decay in ("rsqrt", "staircase") and not self.cooldown_steps:
            raise UserError(
                f"schedule.final_learning_rate is {self.final_learning_rate:g} with schedule.decay {self.decay!r}, "
                "which has no end of its own; add --schedule.cooldown-steps, or take --schedule.final-learning-rate 0"
            )


def learning_rate(step: int, *, config: ScheduleConfig, num_steps: int) -> float:
    """Returns the learning rate of update `step` (0 .. num_steps - 1). It is 0 at step 0 if there is a warm-up, as in
    the paper's code."""
    if step < config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    rate, num_left = _decayed(step, config=config, num_steps=num_steps), num_steps - step
    if num_left >= config.cooldown_steps:
        return rate
    return config.final_learning_rate + (rate - config.final_learning_rate) * num_left / config.cooldown_steps


def average_decay(step: int, *, ema_decay: float, ema_warmup: bool) -> float:
    """Returns the decay of the weights' moving average in update `step` (0 .. num_steps - 1).

    With a warm-up it is at most (1 + t) / (10 + t) in update t = step + 1, as in TensorFlow's ExponentialMovingAverage
    with `num_updates`. Without a warm-up, the initial weights keep a share of decay**updates: 13.5 % after 20,000
    updates at 0.9999.
    """
    return min(ema_decay, (2.0 + step) / (11.0 + step)) if ema_warmup else ema_decay


def refuse_long_schedule(config: ScheduleConfig, *, num_steps: int) -> None:
    """Raises UserError if the warm-up and the cooldown do not fit a run of `num_steps`."""
    warmup, cooldown = config.warmup_steps, config.cooldown_steps
    if warmup >= num_steps and config.decay != "constant":
        raise UserError(
            f"schedule.warmup_steps is {warmup}, not below the {num_steps} steps of the run; "
            "lower --schedule.warmup-steps or raise --steps"
        )
    if cooldown and warmup + cooldown > num_steps:
        raise UserError(
            f"schedule.cooldown_steps is {cooldown}, after schedule.warmup_steps of {warmup}; allowed: up to "
            f"{max(0, num_steps - warmup)}, what is left of the run's {num_steps} steps; lower one of them or raise "
            "--steps"
        )


def _decayed(step: int, *, config: ScheduleConfig, num_steps: int) -> float:
    """Returns the rate after the warm-up, without a cooldown."""
    since = step - config.warmup_steps
    progress = since / max(1, num_steps - config.warmup_steps)
    low, high = config.final_learning_rate, config.learning_rate
    if config.decay == "constant":
        return high
    if config.decay == "rsqrt":
        return high / math.sqrt(1.0 + since / config.timescale)
    if config.decay == "staircase":
        return high * config.stair_factor ** sum(last < step for last in config.stair_steps)
    if config.decay == "linear":
        return high + (low - high) * progress
    return low + (high - low) * 0.5 * (1.0 + math.cos(math.pi * progress))


def steps_of(epochs: int, *, num_images: int, global_batch: int) -> int:
    """Returns the number of steps in `epochs` passes over the images, rounded to the nearest. Batches continue across
    the end of an epoch."""
    if epochs < 1 or num_images < 1 or global_batch < 1:
        raise ValueError(f"{epochs} epochs, {num_images} images and batches of {global_batch}: all must be 1 or more")
    return (2 * epochs * num_images + global_batch) // (2 * global_batch)
