"""The training loop: read, forward and backward, agree, update, write down, save."""

from contextlib import nullcontext
from enum import Enum

from pipeline.data.batches import Batch
from pipeline.training.config import TrainingJob
from pipeline.training.guard import NonFiniteGuard
from pipeline.training.held_out import HeldOut
from pipeline.training.reporter import NUM_IMAGES, Reporter
from pipeline.training.saving import Saving
from pipeline.training.signals import StopRequest
from pipeline.training.stopping import WaitGivenUpError
from pipeline.training.train_step import TrainStep


class LoopEnd(Enum):
    """Why the loop ended."""

    ALL_STEPS = "all steps done"
    ASKED = "asked to save and exit"
    NOTHING_SAVED = "asked to exit before there was anything to save"


class Loop:
    """Runs the remaining steps of a run. `position`: after the batch of the last update. `reporter` is None on all
    ranks but the first."""

    def __init__(
        self,
        job: TrainingJob,
        train_step: TrainStep,
        *,
        guard: NonFiniteGuard,
        held_out: HeldOut,
        saving: Saving,
        reporter: Reporter | None,
    ) -> None:
        self.job, self.train_step, self.guard, self.held_out = job, train_step, guard, held_out
        self.saving, self.reporter = saving, reporter
        self.position = train_step.stream.typed_position
        self._start = self.step

    @property
    def step(self) -> int:
        """Steps done."""
        return self.position.next_step

    def run(self) -> LoopEnd:
        """All steps up to the job's last, or until the ranks agree to stop. A checkpoint is committed either way."""
        with self.reporter or nullcontext():
            while self.step < self.job.steps:
                try:
                    batch = self.train_step.next_batch()
                except WaitGivenUpError:
                    return self._stop_here()
                if self.reporter and self.step == self._start:
                    self.reporter.shows(*self.train_step.first_images(batch, NUM_IMAGES))
                request = self._train_on(batch)
                is_due = request > StopRequest.NOTHING or self.step % self.job.checkpoint.every_steps == 0
                if is_due and self.guard.is_sound:
                    self._save()
                # Exit code 75 promises a committed checkpoint: if there is none, the next step tries again.
                is_over = self.step == self.job.steps and not self.held_out.was_given_up
                if request == StopRequest.SAVE_AND_EXIT and self._is_saved() and not is_over:
                    return LoopEnd.ASKED
        if self._start == self.job.steps and not self._score_the_last():
            return LoopEnd.ASKED
        self.train_step.watch.stopping.finishing()
        self.guard.refuse(self.step, saved_step=self.saving.saved_step)
        while not self._is_saved():
            self._save()
        return LoopEnd.ALL_STEPS

    def _train_on(self, batch: Batch) -> StopRequest:
        """One step and its report; returns what the ranks are asked to do after it."""
        result = self.train_step.update(batch)
        self.position = self.train_step.stream.typed_position
        saved_step = self.saving.saved_step
        self.guard.count(self.step, loss=result.loss, was_skipped=result.was_skipped, saved_step=saved_step)
        scores = self.held_out.scores(self.step)
        if self.reporter:
            self.reporter.step(
                self.step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                rate=result.rate,
                traffic=result.counts,
                scores=scores,
            )
        return StopRequest.SAVE_AND_EXIT if self.held_out.was_given_up else result.request

    def _stop_here(self) -> LoopEnd:
        """The end of a rank that runs alone and has waited for data in vain: what is done so far is saved."""
        is_new = self.step > (self.saving.saved_step or 0)
        if is_new and self.guard.is_sound:
            self._save()
        return LoopEnd.ASKED if self._is_saved() else LoopEnd.NOTHING_SAVED

    def _save(self) -> None:
        self.saving.save(self.position, num_updates=self.guard.num_updates)

    def _is_saved(self) -> bool:
        return self.saving.saved_step == self.step

    def _score_the_last(self) -> bool:
        """Scores a run whose last step is saved, but whose last evaluation was given up; False if this one was too."""
        scores = self.held_out.scores(self.step)
        if scores and self.reporter:
            self.reporter.scored_late(self.step, scores)
        return not self.held_out.was_given_up
