"""At which steps a run saves without being asked: every N steps, by the clock, and at each new best score.

The clock's wish comes back as a stop request of all ranks, as a person's does (signals.py); the others are functions of
the step and of scores, which all ranks share.
"""

import logging
from dataclasses import replace

from pipeline.checkpoints.manifest import CheckpointId, CheckpointManifest
from pipeline.evaluation.scores import Scores
from pipeline.training.save_clock import SaveClock, words_of
from pipeline.training.saving.best import KeptBest
from pipeline.training.saving.save import Saving
from pipeline.training.settings.job import TrainingJob
from shards.dataset import Dataset

log = logging.getLogger(__name__)


def decide_when_to_save(
    job: TrainingJob, saving: Saving, *, dataset: Dataset | None, resumed_from: CheckpointManifest | None
) -> "WhenToSave":
    """Decides when to save, for a run that continues from a checkpoint, None if there is none, and is evaluated on
    `dataset`, None if it is not. Rank 0 logs when it saves. Collective."""
    words = words_of(job.checkpoint, is_scored=dataset is not None)
    if words and saving.reporter:
        log.info("%s", words)
    best = KeptBest(job, saving.checkpoints, dataset=dataset)
    best.find(resumed_from)
    return WhenToSave(job, saving, clock=saving.controls.clock, best=best)


class WhenToSave:
    """Tells the loop when to save, and follows what becomes of it."""

    def __init__(self, job: TrainingJob, saving: Saving, *, clock: SaveClock, best: KeptBest) -> None:
        self.config, self.saving, self.clock, self.best = job.checkpoint, saving, clock, best
        self._last_step = job.steps
        self._seen, self._num_failed = self._saved, saving.num_failed
        self._follow()

    def scored(self, step: int, scores: Scores | None) -> None:
        """The scores after `step`, if there are any."""
        if scores:
            self.best.scored(step, scores, saved=self._saved)
            self._follow()

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint of `step` is due."""
        by_steps = self.config.every_steps > 0 and step % self.config.every_steps == 0
        return by_steps or self.best.is_due(step)

    def begins(self, step: int) -> None:
        """A checkpoint of `step` begins."""
        self.best.begins(step)
        self._follow()

    def began(self) -> None:
        """Training continues after a save."""
        self.clock.began()
        self.look()
        self._follow()

    def look(self) -> None:
        """Measures, after each step and each save, a commit that all ranks know of by now, which may be the best."""
        if self._saved and self._saved != self._seen:
            self._committed(self._saved)
        if self.saving.num_failed > self._num_failed:
            self._num_failed = self.saving.num_failed
            self.best.failed(under_way=self.saving.saves.step)
            self._follow()

    def _committed(self, saved: CheckpointId) -> None:
        self._seen = saved
        if saved.step < self._last_step:  # that one is waited for, and none follows
            self.clock.committed(stall_seconds=self.saving.stall_seconds, commit_seconds=self.saving.commit_seconds)
        self.best.committed(saved)
        self._follow()

    @property
    def _saved(self) -> CheckpointId | None:
        """The newest committed checkpoint."""
        return self.saving.saved

    def _follow(self) -> None:
        """Tells the others what has changed."""
        saves = self.saving.saves
        saves.retention = replace(saves.retention, folders=tuple(self.best.kept()))
        if self.saving.reporter:
            self.saving.reporter.save_interval_seconds = self.clock.interval_seconds
