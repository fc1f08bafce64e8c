"""Decides when a run saves without being asked: every N steps, by the clock, and at each new best score. It also keeps
track of the best checkpoint.

The clock's request reaches all ranks in the same way as a person's request to save (watchdog/stopping.py). The other
reasons depend only on the step and the scores, which all ranks share, so all ranks decide alike.

The checkpoint with the best score on the held-out dataset is saved when it is scored, named in RUN/best.json, and kept.
Only checkpoints that count (attempts.py) can be the best one: scores from an abandoned branch of a run are not scores
of that run.
"""

import logging
import math
from dataclasses import asdict, replace
from typing import Any

from pipeline.checkpoints.attempts import list_committed, read_attempts, standing_checkpoints
from pipeline.checkpoints.manifest import CheckpointId, CheckpointManifest
from pipeline.checkpoints.stored import FILE_NAME, Best, read_best, write_best
from pipeline.evaluation.scores import Scores
from pipeline.ranks.collectives import broadcast_json
from pipeline.training.controls import words_of
from pipeline.training.saving.save import Saving
from pipeline.training.summary import scores_of
from shards.dataset import Dataset
from shards.errors import InvalidDataError

log = logging.getLogger(__name__)


class KeptBest:
    """Keeps the checkpoint with the best score. `best`: what RUN/best.json names, the same on every rank. `dataset`:
    the held-out dataset. If it is None, nothing is scored, and an existing best checkpoint is kept and not replaced."""

    def __init__(self, saving: Saving, *, dataset: Dataset | None) -> None:
        self.job, self.checkpoints, self.dataset = saving.job, saving.checkpoints, dataset
        self.best: Best | None = None
        self._scored: Best | None = None  # the newest score that is better than all before
        self._begun: dict[str, Best] = {}  # best scores whose saves have begun, by folder

    def find(self, resumed_from: CheckpointManifest | None) -> None:
        """Finds the best checkpoint so far, for a run that continues from this checkpoint. Called after the attempt is
        recorded. Collective."""
        self._scored, self._begun = None, {}
        found: dict[str, Any] | None = None
        if self.checkpoints.world.is_first and self.job.checkpoint.keep_best:
            best = self._on_record(resumed_from)
            found = asdict(best) if best else None
        found = broadcast_json(found, device=self.checkpoints.world.device)
        self.best = Best(**found) if found else None

    def scored(self, step: int, scores: Scores, *, saved: CheckpointId | None) -> None:
        """Takes the scores after `step`. `saved`: the newest committed checkpoint; the checkpoint of `step` is usually
        saved later."""
        if self.dataset is None or not self.job.checkpoint.keep_best or not math.isfinite(scores.loss):
            return
        own = CheckpointId(step=step, attempt=self.checkpoints.attempt.token)
        checkpoint = saved if saved and saved.step == step else own
        best = _best_of(self.dataset, checkpoint, accuracy=scores.accuracy, loss=scores.loss)
        if not all(best.is_better_than(other) for other in (self.best, *self._begun.values()) if other):
            return
        self._scored = best
        if checkpoint is saved:
            self._name(best)

    def is_due(self, step: int) -> bool:
        """Returns whether the model after `step` must be saved because of its score."""
        return self._scored is not None and self._scored.step == step

    def begins(self, step: int) -> None:
        """Notes that a checkpoint of `step` begins."""
        if self._scored and self.is_due(step):
            self._begun[self._scored.checkpoint] = self._scored

    def committed(self, checkpoint: CheckpointId) -> None:
        """Notes that a checkpoint is committed. Saves that began earlier and were not committed have failed."""
        best = self._begun.get(checkpoint.folder)
        self._begun = {folder: one for folder, one in self._begun.items() if one.step > checkpoint.step}
        if best:
            self._name(best)

    def failed(self, *, under_way: int) -> None:
        """Forgets the saves that have failed. `under_way`: the step of the only save that is still running; 0 if there
        is none."""
        self._begun = {folder: one for folder, one in self._begun.items() if one.step == under_way}

    def kept(self) -> set[str]:
        """Returns the folders that retention must keep: the best checkpoint, and new best ones that are still being
        saved."""
        return {*self._begun, *([self.best.checkpoint] if self.best else [])}

    def _name(self, best: Best) -> None:
        self.best = best
        if not self.checkpoints.world.is_first:
            return
        try:
            write_best(self.checkpoints.run_dir, best)
        except OSError as error:  # the checkpoint is kept all the same
            log.warning("%s could not be written: %s", self.checkpoints.run_dir / FILE_NAME, error.strerror)

    def _on_record(self, resumed_from: CheckpointManifest | None) -> Best | None:
        """Returns the better of two checkpoints: the one that RUN/best.json names, and the one from which the run
        continues. Called on rank 0."""
        named, newest = self._named(), self._score_of(resumed_from) if resumed_from else None
        if newest is None or (named and not newest.is_better_than(named)):
            return named
        self._name(newest)
        return newest

    def _named(self) -> Best | None:
        """Returns the checkpoint that RUN/best.json names, if it still counts. If not, logs why."""
        path = self.checkpoints.run_dir / FILE_NAME
        try:
            best = read_best(self.checkpoints.run_dir)
        except InvalidDataError as error:
            log.warning("%s; it is ignored", error)
            return None
        if best is None:
            return None
        store = self.checkpoints.store
        attempts = {attempt.token: attempt for attempt in [*read_attempts(store), self.checkpoints.attempt]}
        if best.id not in standing_checkpoints(list_committed(store), list(attempts.values())):
            log.warning("%s names %s, which this run does not continue; it is ignored", path, best.checkpoint)
            return None
        if self.dataset and best.dataset != self.dataset.fingerprint:
            log.warning("%s is a score on another held-out dataset; it is ignored", path)
            return None
        return best

    def _score_of(self, manifest: CheckpointManifest) -> Best | None:
        """Returns a checkpoint's score from metrics.jsonl. Returns None if there is no such score, or if it is on other
        data. A run that was killed right after a commit may not have written the score to RUN/best.json."""
        before = manifest.job.job.get("evaluation")
        now = asdict(self.job.evaluation)
        if self.dataset is None or not isinstance(before, dict):
            return None
        if any(before.get(name) != now[name] for name in ("url", "transform")):
            return None
        found = [score for score in scores_of(self.checkpoints.run_dir) if score.step == manifest.id.step]
        if not found or not (math.isfinite(found[-1].loss) and 0 <= found[-1].accuracy <= 1):
            return None
        return _best_of(self.dataset, manifest.id, accuracy=found[-1].accuracy, loss=found[-1].loss)


def _best_of(dataset: Dataset, checkpoint: CheckpointId, *, accuracy: float, loss: float) -> Best:
    return Best(
        step=checkpoint.step,
        checkpoint=checkpoint.folder,
        accuracy=accuracy,
        loss=loss,
        images=dataset.num_samples,
        dataset=dataset.fingerprint,
    )


def decide_when_to_save(
    saving: Saving, *, dataset: Dataset | None, resumed_from: CheckpointManifest | None
) -> "WhenToSave":
    """Returns the object that tells a run when to save. Rank 0 logs when that will be. `dataset`: the dataset that
    decides which model is best, if there is one. `resumed_from`: the checkpoint from which the run continues, if there
    is one. Collective."""
    words = words_of(saving.job.checkpoint, is_scored=dataset is not None)
    if words and saving.reporter:
        log.info("%s", words)
    best = KeptBest(saving, dataset=dataset)
    best.find(resumed_from)
    return WhenToSave(saving, best)


class WhenToSave:
    """Tells the loop when to save, and keeps track of running saves."""

    def __init__(self, saving: Saving, best: KeptBest) -> None:
        self.saving, self.best, self.clock = saving, best, saving.controls.clock
        self._seen, self._num_failed = self._saved, saving.num_failed
        self._follow()

    def scored(self, step: int, scores: Scores | None) -> None:
        """Takes the scores after `step`, if there are any."""
        if scores:
            self.best.scored(step, scores, saved=self._saved)
            self._follow()

    def is_due(self, step: int) -> bool:
        """Returns whether a checkpoint of `step` is due."""
        every = self.saving.job.checkpoint.every_steps
        by_steps = every > 0 and step % every == 0
        return by_steps or self.best.is_due(step)

    def begins(self, step: int) -> None:
        """Notes that a checkpoint of `step` begins."""
        self.best.begins(step)
        self._follow()

    def began(self) -> None:
        """Starts the clock again. Called when training continues after a save has begun."""
        self.clock.began()
        self.look()
        self._follow()

    def look(self) -> None:
        """Notices commits and failures of saves. Called after each step and each save."""
        if self._saved and self._saved != self._seen:
            self._committed(self._saved)
        if self.saving.num_failed > self._num_failed:
            self._num_failed = self.saving.num_failed
            self.best.failed(under_way=self.saving.saves.step)
            self._follow()

    def _committed(self, saved: CheckpointId) -> None:
        self._seen = saved
        if saved.step < self.saving.job.steps:  # training waits for the last save, and none follows it
            self.clock.committed(stall_seconds=self.saving.stall_seconds, commit_seconds=self.saving.commit_seconds)
        self.best.committed(saved)
        self._follow()

    @property
    def _saved(self) -> CheckpointId | None:
        """The newest committed checkpoint."""
        return self.saving.saved

    def _follow(self) -> None:
        """Tells the saves which folders retention must keep, and the reporter which interval the clock has."""
        saves = self.saving.saves
        saves.retention = replace(saves.retention, folders=tuple(self.best.kept()))
        if self.saving.reporter:
            self.saving.reporter.save_interval_seconds = self.clock.interval_seconds
