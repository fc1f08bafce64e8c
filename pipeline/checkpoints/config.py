"""When checkpoints are saved, where, and which are kept."""

from dataclasses import dataclass
from typing import Annotated, Literal

from shards.errors import UserError
from shards.schema.config_values import Range, refuse_wrong_values


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved, where, how, and which are kept."""

    every_steps: Annotated[int, Range(0, zero="not by steps")] = 1000
    """Steps between two checkpoints; 0: not by steps. There is always one at the end."""
    every_seconds: Annotated[float, Range(0, zero="not by time")] = 0.0
    """Seconds between two checkpoints; 0: not by time. With --checkpoint.every-steps, whichever comes first."""
    auto_interval: bool = False
    """Choose the seconds between two checkpoints from what a checkpoint takes, the number of nodes and
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
    """Whether training continues while a checkpoint is written: this takes host memory for one copy of a rank's state;
    auto: if the host has it, on requires it, off writes while training waits (to S3, with a temporary file in TMPDIR).
    """
    when_busy: Literal["wait", "skip"] = "wait"
    """What a save does while the one before is still being written: wait for its end, or skip this one."""
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
