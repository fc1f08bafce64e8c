"""Ends a run whose loss or gradient stays non-finite."""

import logging
import math

from pipeline.training.config import TrainingJob
from shards.errors import WillNotSucceedError

log = logging.getLogger(__name__)


class NonFiniteGuard:
    """Counts updates. `num_updates`: those that the optimiser made, over the whole run. `skipped_in_a_row`: the
    latest ones that were skipped, or made from a loss that is not finite. `says`: whether this rank logs them."""

    def __init__(self, job: TrainingJob, *, num_updates: int, says: bool) -> None:
        self.num_updates, self.most_skipped, self.says = num_updates, job.max_skipped_updates, says
        self.skipped_in_a_row = 0

    def count(self, step: int, *, loss: float, was_skipped: bool, saved_step: int | None) -> None:
        """One more update; WillNotSucceedError after too many bad ones. `saved_step`: of the newest checkpoint."""
        self.num_updates += not was_skipped
        if not was_skipped and math.isfinite(loss):
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        if self.says:
            what = "skipped, its gradient is not finite" if was_skipped else "made from a loss that is not finite"
            log.warning("step %d: the update was %s (loss %s)", step, what, loss)
        if self.skipped_in_a_row > self.most_skipped:
            self.refuse(step, saved_step=saved_step)

    @property
    def is_sound(self) -> bool:
        """False after a bad update: a model that may be lost must not replace a good checkpoint."""
        return self.skipped_in_a_row == 0

    def refuse(self, step: int, *, saved_step: int | None) -> None:
        """Raises WillNotSucceedError unless the latest update was a good one."""
        if self.is_sound:
            return
        is_saved = saved_step is not None
        last_good = f"the last good checkpoint is of step {saved_step}" if is_saved else "no checkpoint is there"
        raise WillNotSucceedError(
            f"{self.skipped_in_a_row} updates in a row, up to step {step}, had a non-finite gradient or loss; "
            f"{last_good}; lower --schedule.learning-rate or set --clip-norm, and run the command again"
        )
