"""The training loop: read, forward and backward, agree, update, write down, save.

A step's outcome is read after the next step has been launched, so the device never waits for the host; a request to
stop takes one step more. Before an evaluation, a save and the end, the outcome is read at once.
"""

from contextlib import nullcontext
from enum import Enum

from pipeline.data.batches import Batch
from pipeline.training.controls import Watch
from pipeline.training.guard import Guard
from pipeline.training.reporting.reporter import NUM_IMAGES, Reporter
from pipeline.training.saving.save import Saving
from pipeline.training.saving.when_to_save import WhenToSave
from pipeline.training.scoring import HeldOut
from pipeline.training.settings.job import TrainingJob
from pipeline.training.step import Launched, TrainStep
from pipeline.training.watchdog.signals import StopRequest
from pipeline.training.watchdog.stopping import WaitGivenUpError
from pipeline.training.zero.engine import Engine


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
        guard: Guard,
        held_out: HeldOut,
        saving: Saving,
        when: WhenToSave,
        reporter: Reporter | None,
    ) -> None:
        self.job, self.train_step, self.guard, self.held_out = job, train_step, guard, held_out
        self.saving, self.when, self.reporter = saving, when, reporter
        self.position = train_step.stream.typed_position
        self._start = self.step
        self._unread: Launched | None = None

    @property
    def engine(self) -> Engine:
        """What is trained."""
        return self.train_step.gradients.engine

    @property
    def watch(self) -> Watch:
        """The stop requests, deadlines and ledger of this rank."""
        return self.train_step.watch

    @property
    def step(self) -> int:
        """Steps launched."""
        return self.position.next_step

    def run(self) -> LoopEnd:
        """All steps up to the job's last, or until the ranks agree to stop. A checkpoint is committed either way.
        RewindNeededError if the run is to continue from an earlier one."""
        self.when.clock.started()
        self.watch.times.forget()
        with self.reporter or nullcontext():
            while self.step < self.job.steps:
                try:
                    batch = self.train_step.next_batch()
                except WaitGivenUpError:
                    self._read()
                    return self._stop_here()
                if self.step == self._start:
                    self._begins(batch)
                request = self._train_on(batch)
                is_due = request > StopRequest.NOTHING or self.when.is_due(self.step)
                if is_due:
                    request = max(request, self._read())
                    if self.guard.updates.is_sound:
                        self._save(may_be_skipped=request < StopRequest.SAVE_AND_EXIT)
                # Exit code 75 promises a committed checkpoint: if there is none, the next step tries again.
                is_over = self.step == self.job.steps and not self.held_out.was_given_up
                if request == StopRequest.SAVE_AND_EXIT and not is_over and self._is_saved():
                    return LoopEnd.ASKED
        if self._start == self.job.steps and not self._score_the_last():
            return LoopEnd.ASKED
        self.train_step.watch.stopping.finishing()
        self.guard.updates.refuse(self.step, last_saved=self.saving.last_step)
        while not self._is_saved():
            self._save()
        return LoopEnd.ALL_STEPS

    def _begins(self, batch: Batch) -> None:
        """Shows the first batch of this loop, and ends the part of the start that waited for it."""
        if self.reporter:
            self.reporter.shows(*self.train_step.first_images(batch, NUM_IMAGES))
        self.watch.parts.ends("first_batch")

    def _train_on(self, batch: Batch) -> StopRequest:
        """Launches one step; returns what the ranks are asked to do after the steps whose outcomes were read."""
        launched = self.train_step.launch(batch)
        self.position = self.train_step.stream.typed_position
        if self.reporter:
            self.reporter.launched(launched.step)
            self.watch.parts.has_begun(self.watch.ledger.run_dir, attempt=self.watch.stopping.progress.attempt)
        request = self._read()
        self._unread = launched
        is_last = self.step == self.job.steps
        return max(request, self._read()) if is_last or self.held_out.is_due(self.step) else request

    def _read(self) -> StopRequest:
        """Reads the outcome of the step that was launched last, if it was not yet read, and reports it; returns what
        the ranks were asked to do in it."""
        if self._unread is None:
            return StopRequest.NOTHING
        result, self._unread = self.train_step.read(self._unread), None
        self.saving.advance(result)
        self.guard.count(result, last_saved=self.saving.last_step)
        self.when.look()
        scores = self.held_out.scores(result.step)
        self.when.scored(result.step, scores)
        if self.reporter:
            self.reporter.step(
                result.step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                rate=result.rate,
                traffic=result.counts,
                guard=self.guard.values(),
                scores=scores,
                of_others=self.held_out.of_others,
                norms=result.norms,
            )
            if result.similarity is not None:
                self.reporter.shows_positions(result.step, result.similarity)
        return StopRequest.SAVE_AND_EXIT if self.held_out.was_given_up else result.request

    def _stop_here(self) -> LoopEnd:
        """The end of a rank that runs alone and has waited for data in vain: what is done so far is saved."""
        if not self._is_saved() and self.step > 0 and self.guard.updates.is_sound:
            self._save()
        return LoopEnd.ASKED if self._is_saved() else LoopEnd.NOTHING_SAVED

    def _save(self, *, may_be_skipped: bool = False) -> None:
        """`may_be_skipped`: if a save is running, and the model is not the best so far."""
        may_be_skipped = may_be_skipped and not self.when.best.is_due(self.step)
        self.when.begins(self.step)
        num_updates, losses = self.guard.updates.num_updates, self.guard.losses
        self.saving.save(self.position, num_updates=num_updates, losses=losses, may_be_skipped=may_be_skipped)
        self.when.began()

    def _is_saved(self) -> bool:
        """Whether this step is committed, once the save that is running has ended."""
        self.saving.wait()
        self.when.look()
        return self.saving.saved_step == self.step

    def _score_the_last(self) -> bool:
        """Scores a run whose last step is saved, but whose last evaluation was given up; False if this one was too."""
        scores = self.held_out.scores(self.step)
        self.when.scored(self.step, scores)
        if (scores or self.held_out.of_others) and self.reporter:
            self.reporter.scored_late(self.step, scores, self.held_out.of_others)
        return not self.held_out.was_given_up
