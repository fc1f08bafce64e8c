"""Whether a loss is a spike, by a robust z-score over the losses before it. Pure.

    z = (loss - median) / max(1.4826 MAD, 1 % of the median)

MAD is the median of the distances from the median; 1.4826 MAD estimates the standard deviation of normal noise
(Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993). Earlier spikes in the history move neither. The floor
keeps a loss that hardly varies from making a spike of everything. Only a rise is a spike.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Literal

from shards.config_values import Range, refuse_wrong_values
from shards.errors import UserError

_NORMAL = 1.4826  # standard deviations in a MAD
_LEAST_SCALE = 0.01  # of the median
_TINY = 1e-12  # for losses of 0
_MOST_LOSSES = 4096  # in each manifest


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What to do about loss spikes, and about losses and gradients that are not finite.

    rewind: back to the newest checkpoint from before the data around the step, which are then left out.
    """

    on_spike: Literal["off", "warn", "skip", "rewind"] = "off"
    """Loss spikes: warn lists them in RUN/guard.jsonl; skip makes no update from such a loss, and waits for the loss of
    every step before its update; rewind goes back to a checkpoint and skips the data."""
    on_non_finite: Literal["skip", "rewind"] = "skip"
    """Loss or gradient not finite: skip leaves out the update, up to --max-skipped-updates in a row; rewind goes back
    to a checkpoint and skips the data."""
    spike_z: Annotated[float, Range(above=0)] = 10.0
    """Robust z-score from which a loss is a spike: its distance from the median of recent losses, in their noise
    (1.4826 MAD, at least 1 % of the median)."""
    spike_window: Annotated[int, Range(1, _MOST_LOSSES)] = 128
    """Number of latest losses that a loss is compared with."""
    min_history: Annotated[int, Range(1, _MOST_LOSSES)] = 64
    """Number of losses before the first is compared; at most --guard.spike-window."""
    skip_steps: Annotated[int, Range(1, 1_000_000)] = 8
    """Steps of data that a rewind leaves out, half of them before the step that caused it."""
    max_rewinds: Annotated[int, Range(0, 100)] = 10
    """Rewinds of the whole run, and at most 3 to one checkpoint, before it ends with exit code 78."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="guard.")
        if self.min_history > self.spike_window:
            raise UserError(
                f"guard.min_history is {self.min_history}, above guard.spike_window, which is {self.spike_window}; "
                "lower --guard.min-history or raise --guard.spike-window"
            )

    @property
    def rewind_steps(self) -> int:
        """Steps before a finding that its rewind may have to go back; 0 if nothing is rewound."""
        return self.skip_steps // 2 if "rewind" in (self.on_spike, self.on_non_finite) else 0


@dataclass(frozen=True, kw_only=True)
class SpikeVerdict:
    """How far a loss is from the losses before it; NaN where there are too few of them."""

    loss: float
    median: float = math.nan
    mad: float = math.nan
    z: float = math.nan
    is_spike: bool = False


def judge(loss: float, losses: Sequence[float], *, config: GuardConfig) -> SpikeVerdict:
    """The verdict on a loss after `losses`, the latest ones, all of them finite. What is not finite is no spike."""
    if config.on_spike == "off" or len(losses) < config.min_history or not math.isfinite(loss):
        return SpikeVerdict(loss=loss)
    middle = median(losses)
    mad = median(abs(each - middle) for each in losses)
    z = (loss - middle) / max(_NORMAL * mad, _LEAST_SCALE * abs(middle), _TINY)
    return SpikeVerdict(loss=loss, median=middle, mad=mad, z=z, is_spike=z >= config.spike_z)


def with_loss(losses: tuple[float, ...], loss: float, *, config: GuardConfig) -> tuple[float, ...]:
    """The latest losses with one more, if it is finite. None are kept while nothing is compared."""
    if config.on_spike == "off":
        return ()
    return (*losses, loss)[-config.spike_window :] if math.isfinite(loss) else losses[-config.spike_window :]
