"""The settings of checkpoints: when they are saved, where, and which are kept.

`best_interval` chooses how long to train between two checkpoints, from what they cost and how often machines fail: J.
W. Young, "A first order approximation to the optimum checkpoint interval" (1974); J. T. Daly, "A higher order estimate
of the optimum checkpoint interval for restart dumps" (2006). With failures that are exponentially distributed with the
mean M, an interval t and a stall C, a segment with the time t of work takes the wall time M exp(R/M) (exp((t + C)/M) -
1). The time R to restart is a factor, so the best interval does not depend on it. Nor does it depend on the time that
writing a checkpoint in the background takes, since each failure loses that time once, whatever the interval is.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from shards.config_values import Range, refuse_wrong_values
from shards.errors import UserError
from shards.output.quantities import DAY_SECONDS

LEAST_SECONDS = 10.0  # for shorter intervals, requests to the store would cost more than the work that a failure loses
MOST_SECONDS = 7200.0  # no failure loses more work than this, even if a longer interval would be best
_MARGIN = 0.25  # a share of the commit time: saves must not pile up if one takes longer than those before


def mean_seconds_to_failure(*, num_nodes: int, failures_per_node_day: float) -> float:
    """Returns the mean time until any of `num_nodes` nodes fails."""
    return DAY_SECONDS / (num_nodes * failures_per_node_day)


def best_interval(*, stall_seconds: float, commit_seconds: float, mean_seconds: float) -> float:
    """Returns the interval between two checkpoints, in seconds of training, that loses the least time.

    It lies between LEAST_SECONDS and MOST_SECONDS, but is never below the commit time plus a margin. `stall_seconds`:
    how long training waits for a save. `commit_seconds`: the time from the beginning of a save to its commit.
    `mean_seconds`: the mean time between failures.
    """
    best = daly_interval(stall_seconds=stall_seconds, mean_seconds=mean_seconds)
    return max(min(max(best, LEAST_SECONDS), MOST_SECONDS), commit_seconds * (1 + _MARGIN))


def daly_interval(*, stall_seconds: float, mean_seconds: float) -> float:
    """Returns Daly's estimate of the interval with the least wall time. It is within 2 % of the true interval for a
    stall up to the mean time between failures, and within 6 % up to twice that mean. For a longer stall, it is the
    mean."""
    if stall_seconds >= 2 * mean_seconds:
        return mean_seconds
    ratio = stall_seconds / (2 * mean_seconds)
    return math.sqrt(2 * stall_seconds * mean_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_seconds


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints stay after a commit: the newest `keep_newest`, those whose step is a multiple of `keep_every`
    (0: none), one that is at least `rewind_steps` before the newest, and those in `folders`, such as the best one.
    commit.py deletes the others."""

    keep_newest: Annotated[int, Range(1)]
    keep_every: Annotated[int, Range(0)] = 0
    rewind_steps: Annotated[int, Range(0)] = 0
    folders: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved, where, how, and which are kept."""

    every_steps: Annotated[int, Range(0, zero="not by steps")] = 1000
    """Steps between two checkpoints; 0: not by steps. There is always one at the end."""
    every_seconds: Annotated[float, Range(0, zero="not by time")] = 0.0
    """Seconds between two checkpoints; 0: not by time. With --checkpoint.every-steps, whichever comes first."""
    auto_interval: bool = False
    """Choose the seconds between two checkpoints from how long a checkpoint takes, the number of nodes and
    --checkpoint.failures-per-node-day (Young, Daly)."""
    failures_per_node_day: Annotated[float, Range(1e-9, 1000)] = 0.0065
    """For --checkpoint.auto-interval: failures per node and day (0.0065: Meta's RSC-1, arXiv 2410.21680; 0.00234:
    RSC-2; its jobs of 1,024 GPUs had 0.0237)."""
    keep_newest: Annotated[int, Range(1)] = 2
    """Number of newest checkpoints that are kept."""
    keep_every: Annotated[int, Range(0, zero="none")] = 0
    """Steps between checkpoints that are kept forever; 0: none."""
    keep_best: bool = True
    """Save at each evaluation with the best accuracy so far, and keep that checkpoint (RUN/best.json)."""
    url: str = ""
    """Folder or s3://bucket/prefix for checkpoints; empty: RUN/checkpoints."""
    asynchronous: Literal["auto", "on", "off"] = "auto"
    """Whether training continues while a checkpoint is written, which takes host memory for one copy of a rank's state;
    auto: if the host has that memory; on requires it; off: training waits (on S3, with a temporary file in TMPDIR).
    """
    when_busy: Literal["wait", "skip"] = "wait"
    """What to do if the previous save is still being written: wait for its end, or skip the new save."""
    max_failed: Annotated[int, Range(1)] = 3
    """Saves in a row that may fail before the run stops."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="checkpoint.")
        if self.auto_interval and self.every_seconds:
            raise UserError(
                f"checkpoint.auto_interval is on with checkpoint.every_seconds {self.every_seconds:g}, and chooses the "
                "seconds itself; leave out one of the two (--checkpoint.no-auto-interval, or "
                "--checkpoint.every-seconds 0)"
            )
        if self.keep_every and not self.every_steps:
            raise UserError(
                f"checkpoint.keep_every is {self.keep_every} with checkpoint.every_steps 0, so no checkpoint is due at "
                f"its steps; give --checkpoint.every-steps {self.keep_every}, or --checkpoint.keep-every 0"
            )

    def retention(self, *, rewind_steps: int) -> Retention:
        """Returns which checkpoints a run keeps if it may go back by `rewind_steps`."""
        return Retention(keep_newest=self.keep_newest, keep_every=self.keep_every, rewind_steps=rewind_steps)
